"""The worker's end of the memory shared with the server for captured rows.

Invariants: no range is written while the server may still read it. If a range does not fit,
`reserve` returns None and does not wait. On CUDA the memory is pinned once at startup, so sending
rows never allocates in the driver.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import secrets

import numpy as np
import torch

from rheostat_engine.channel.staging import (
    COUNTER,
    HEADER,
    MAGIC,
    PAGE,
    StagingRange,
    StagingReport,
)

_LOG = logging.getLogger(__name__)


class Ranges:
    """Reserves contiguous ranges around a ring of `size` bytes."""

    def __init__(self, size: int) -> None:
        """`size` is a multiple of 64."""
        self.size = size
        self.skipped_bytes = 0
        """Bytes skipped at the end of the ring because the next range did not fit there."""
        self._next = 0
        self._skipped = (0, 0)
        """The position from which bytes were skipped last, and to which."""
        self._floor = 0  # free up to here, even if the reader's counter is lower

    def largest(self, taken: int) -> int:
        """The bytes of the largest range that fits now.

        Args:
            taken: the position up to which the reader has read.
        """
        taken = max(taken, self._floor)
        if taken == self._next:
            return self.size
        free = self.size - (self._next - taken)
        tail = self.size - self._next % self.size
        return max(min(tail, free), free - tail)

    def reserve(self, size: int, taken: int) -> StagingRange | None:
        """Reserves the next range; returns None if it does not fit. `taken` as in `largest`."""
        if size > self.largest(taken):
            return None
        tail = self.size - self._next % self.size
        if (
            max(taken, self._floor) == self._next
        ):  # all free: restart at 0, whose pages are in memory
            self._next += tail % self.size
            self._floor = self._next
        elif size > tail:
            self._skipped = self._next, self._next + tail
            self._next += tail
            self.skipped_bytes += tail
        staging_range = StagingRange(self._next, size)
        self._next = staging_range.end
        return staging_range

    def give_back(self, staging_range: StagingRange) -> None:
        """Frees the last reserved range, which was not used, with the bytes skipped before it."""
        self._next = staging_range.position
        start, end = self._skipped
        if self._next == end:
            self._next = start
            self.skipped_bytes -= end - start
            self._skipped = (0, 0)


class StagingArea:
    """Memory shared with the server."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocates `size` bytes, rounded up to pages; `device` copies rows into them.

        The system provides pages when they are touched or pinned.
        """
        size = max(1, -(-size // PAGE)) * PAGE
        self.ranges = Ranges(size)
        self._nonce = secrets.token_bytes(16)
        self._fd = os.memfd_create("rheostat-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, PAGE + size)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        memory = mmap.mmap(self._fd, PAGE + size)
        HEADER.pack_into(memory, 0, MAGIC, self._nonce, size)
        self._counter = np.frombuffer(memory, "<u8", 1, COUNTER)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8, offset=PAGE)
        self.pinned = device.type == "cuda" and _pin(self._bytes, device)
        """Whether the memory is pinned, so that copies don't use the CPU."""

    @property
    def size(self) -> int:
        """Bytes of the area."""
        return self.ranges.size

    @property
    def free_bytes(self) -> int:
        """Bytes of the largest range that fits."""
        return self.ranges.largest(int(self._counter[0]))

    def reserve(self, size: int) -> StagingRange | None:
        """Reserves the next range; returns None if it does not fit."""
        return self.ranges.reserve(size, int(self._counter[0]))

    def __getitem__(self, staging_range: StagingRange) -> torch.Tensor:
        """The bytes of a range."""
        start = staging_range.position % self.size
        return self._bytes[start : start + staging_range.size]

    def report(self, rank: int) -> StagingReport:
        """The fields with which the server maps the memory, until `close`."""
        return StagingReport(rank=rank, pid=os.getpid(), fd=self._fd, nonce=self._nonce.hex())

    def close(self) -> None:
        """Closes the memory. No copy into it may be running."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self.pinned = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _pin(memory: torch.Tensor, device: torch.device) -> bool:
    """Pins the memory; returns whether the driver did."""
    try:
        torch.cuda.check_error(
            torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        )
    except RuntimeError as error:
        _LOG.warning(
            "the %d MiB of staging memory could not be pinned (%s); captured rows are copied "
            "slowly. A smaller --staging-mib may help",
            memory.nbytes >> 20,
            error,
        )
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)  # clears the error, which the next launch would raise
        return False
    return True
