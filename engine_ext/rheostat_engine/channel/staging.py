"""Host memory that a worker shares with the server: its layout, and the server's end.

Invariants: ranges are reserved and freed first in, first out. Only the worker writes rows. Only the
server writes the counter of what it has read, so that it needs no message back. The memory has no
name in any file system and can't shrink, and ends with the last process that has it.

The first page is a header. A position counts bytes since the start of the worker. Its byte is at
`position % size` behind the header.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypedDict, cast

import numpy as np

HEADER = struct.Struct("<8s16sQ")
"""Magic, nonce, and the number of bytes behind the header's page."""
MAGIC = b"rheostat"
PAGE = 4096
"""Bytes of the header."""
COUNTER = 64
"""Offset of the counter in the header: the position up to which everything has been read."""
ALIGNMENT = 64
"""Ranges begin at multiples of it."""


class StagingError(Exception):
    """A worker's staging area can't be mapped, or a range of it is invalid."""


class StagingRange(NamedTuple):
    """A range of the area."""

    position: int
    """Its first position."""
    size: int
    """Its used bytes."""

    @property
    def end(self) -> int:
        """The position behind it."""
        return self.position + aligned(self.size)


class StagingReport(TypedDict):
    """The fields with which the server maps the memory of a worker."""

    rank: int
    pid: int
    fd: int
    nonce: str
    """Hexadecimal; the nonce in the memory's header."""


def aligned(size: int) -> int:
    """The bytes that a range of `size` bytes takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class StagingReader:
    """The server's end of a worker's area."""

    def __init__(self, report: StagingReport) -> None:
        """Maps the memory.

        Raises:
            StagingError: it can't be mapped, or it is other memory.
        """
        try:
            self._memory = _mapped(report)
        except (OSError, ValueError, struct.error) as error:
            raise StagingError(
                f"captured rows of worker {report['rank']} (process {report['pid']}) can't be "
                f"reached: {error}. The server and its workers must run on one machine, as one "
                "user and in one PID namespace, with /proc mounted there"
            ) from error
        self.size = len(self._memory) - PAGE
        """Bytes of the area."""
        self._rows = memoryview(self._memory)[PAGE:].toreadonly()
        self._counter = np.frombuffer(self._memory, "<u8", 1, COUNTER)
        self._taken = int(self._counter[0])

    @contextmanager
    def taken(self, staging_range: StagingRange) -> Iterator[memoryview]:
        """The bytes of a range, which the worker may write again after the `with` block.

        Raises:
            StagingError: the range can't be the next one.
        """
        start = staging_range.position % self.size
        if not (
            0 <= staging_range.size <= self.size - start
            and self._taken <= staging_range.position <= self._taken + 2 * self.size
        ):
            raise StagingError(
                f"{staging_range} is no range of an area of {self.size} bytes, taken up to "
                f"{self._taken}"
            )
        try:
            yield self._rows[start : start + staging_range.size]
        finally:
            self._taken = staging_range.end
            self._counter[0] = self._taken  # one aligned store of eight bytes


def _mapped(report: StagingReport) -> mmap.mmap:
    fd = os.open(f"/proc/{report['pid']}/fd/{report['fd']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("the memory could shrink under its readers")
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)
    magic, nonce, size = HEADER.unpack_from(memory)
    if (magic, nonce.hex(), size) != (MAGIC, report["nonce"], len(memory) - PAGE):
        raise ValueError("it is other memory")
    return memory


def readers_of(reports: Sequence[Mapping[str, object]]) -> dict[int, StagingReader]:
    """The areas of all workers that report, by rank.

    Args:
        reports: the answers of all workers to `rheostat_describe`.

    Raises:
        StagingError: an area can't be mapped.
    """
    areas = [cast(StagingReport | None, report["staging"]) for report in reports]
    return {area["rank"]: StagingReader(area) for area in areas if area is not None}
