"""The worker's end of the memory in which captured rows wait for the server.

Invariant: nothing is written where the server may still read. What finds no room gets none at
once; nobody waits here. On CUDA the memory is pinned once, at the start, so that handing rows over
never asks the driver for memory.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import secrets

import numpy as np
import torch

from rheostat_engine.staging import (
    COUNTER,
    HEADER,
    MAGIC,
    PAGE,
    Place,
    StagingReport,
)

_LOG = logging.getLogger(__name__)


class Ranges:
    """Gives out contiguous ranges of `size` bytes, around and around."""

    def __init__(self, size: int) -> None:
        """All of it is free.

        Args:
            size: a multiple of 64.
        """
        self.size = size
        self.skipped_bytes = 0
        """Bytes at the end that were too few for the range that came next."""
        self._next = 0
        self._floor = 0  # free up to here, whatever the reader has said

    def largest(self, taken: int) -> int:
        """The largest range that finds room now.

        Args:
            taken: the position up to which the reader has taken everything.
        """
        taken = max(taken, self._floor)
        if taken == self._next:
            return self.size
        free = self.size - (self._next - taken)
        tail = self.size - self._next % self.size
        return max(min(tail, free), free - tail)

    def reserve(self, size: int, taken: int) -> Place | None:
        """The next range; None if there is no room for it. `taken` as above."""
        if size > self.largest(taken):
            return None
        tail = self.size - self._next % self.size
        if max(taken, self._floor) == self._next:  # pages that have been used are used again
            self._next += tail % self.size
            self._floor = self._next
        elif size > tail:
            self._next += tail
            self.skipped_bytes += tail
        place = Place(self._next, size)
        self._next = place.end
        return place

    def give_back(self, place: Place) -> None:
        """Takes back the range that was reserved last and is not needed."""
        self._next = place.position


class StagingArea:
    """Memory that is shared with the server."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Makes it; the system provides its pages as they are touched, or pinned.

        Args:
            size: bytes; rounded up to pages.
            device: what copies into it.
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
        """Whether the device copies into it without help of the CPU."""

    @property
    def size(self) -> int:
        """Bytes of the area."""
        return self.ranges.size

    @property
    def free_bytes(self) -> int:
        """Bytes of the largest range that finds room."""
        return self.ranges.largest(int(self._counter[0]))

    def reserve(self, size: int) -> Place | None:
        """The next range; None if there is no room for it."""
        return self.ranges.reserve(size, int(self._counter[0]))

    def __getitem__(self, place: Place) -> torch.Tensor:
        """The bytes of a range."""
        start = place.position % self.size
        return self._bytes[start : start + place.size]

    def report(self, rank: int) -> StagingReport:
        """How the server finds it, as long as it isn't closed."""
        return StagingReport(rank=rank, pid=os.getpid(), fd=self._fd, nonce=self._nonce.hex())

    def close(self) -> None:
        """Gives up the worker's hold on it, once the device writes nothing more there."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
            self.pinned = False
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _pin(memory: torch.Tensor, device: torch.device) -> bool:
    """Whether the driver has pinned the memory, which this asks it to."""
    try:
        torch.cuda.check_error(
            torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
        )
    except RuntimeError as error:
        _LOG.warning(
            "the %d MiB that captured rows leave through could not be pinned (%s); they leave "
            "slowly. A smaller --staging-mib may help",
            memory.nbytes >> 20,
            error,
        )
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)  # or the next launch would meet what is left of the error
        return False
    return True
