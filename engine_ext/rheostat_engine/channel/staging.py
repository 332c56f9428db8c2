"""Host memory that a worker shares with the server: its layout, and the server's end.

Invariants: ranges are reserved and freed first in, first out. Only the worker writes rows. Only the
server writes the counter of read bytes, which replaces messages to the worker. The memory has no
name in a file system, can't shrink, and is freed with the last process that maps it.

Layout: the first page is a header. A position counts bytes since the start of the worker; its byte
is at `position % size` after the header.
"""

import fcntl
import mmap
import os
import struct
from typing import NamedTuple, TypedDict

import numpy as np

HEADER = struct.Struct("<8s16sQ")
"""Magic, nonce, and the number of bytes after the header's page."""
MAGIC = b"rheostat"
PAGE = 4096
"""Bytes of the header."""
COUNTER = 64
"""Offset in the header of the counter: the position up to which the server has read."""
ALIGNMENT = 64
"""Bytes to which ranges are aligned."""


class StagingError(Exception):
    """A worker's staging area can't be mapped, or a range of it is invalid."""


class StagingRange(NamedTuple):
    """A range of the area."""

    position: int
    """The first position."""
    size: int
    """Bytes, without padding."""

    @property
    def end(self) -> int:
        """One past the last position, aligned."""
        return self.position + aligned(self.size)


class StagingReport(TypedDict):
    """The fields with which the server maps the memory of a worker."""

    rank: int
    pid: int
    fd: int
    nonce: str
    """The nonce in the header, hexadecimal."""


def aligned(size: int) -> int:
    """`size` rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class StagingReader:
    """The server's end of a worker's staging area."""

    def __init__(self, report: StagingReport) -> None:
        """Maps the memory.

        Raises:
            StagingError: the memory can't be mapped, or is not the worker's.
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

    def taken(self, staging_range: StagingRange) -> "_Taken":
        """A context manager for the bytes of a range. After it the worker may overwrite them.

        Raises:
            StagingError: the range is not valid as the next range.
        """
        start = staging_range.position % self.size
        if not (
            0 <= staging_range.size <= self.size - start
            and self._taken <= staging_range.position <= self._taken + 2 * self.size
        ):
            raise StagingError(
                f"{staging_range} is no range of a staging area of {self.size} bytes, read "
                f"up to {self._taken}"
            )
        return _Taken(self, self._rows[start : start + staging_range.size], staging_range.end)

    def free(self, end: int) -> None:
        """Lets the worker write the bytes before a position again."""
        self._taken = end
        self._counter[0] = end  # atomic: one aligned store of eight bytes


class _Taken:
    """A range that is being read. A generator would take several times as long for each step."""

    __slots__ = ("_end", "_reader", "_rows")

    def __init__(self, reader: StagingReader, rows: memoryview, end: int) -> None:
        self._reader, self._rows, self._end = reader, rows, end

    def __enter__(self) -> memoryview:
        return self._rows

    def __exit__(self, *_: object) -> None:
        self._reader.free(self._end)


def _mapped(report: StagingReport) -> mmap.mmap:
    fd = os.open(f"/proc/{report['pid']}/fd/{report['fd']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError("the memory is not sealed against shrinking")
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)
    magic, nonce, size = HEADER.unpack_from(memory)
    if (magic, nonce.hex(), size) != (MAGIC, report["nonce"], len(memory) - PAGE):
        raise ValueError("the memory is not the worker's")
    return memory
