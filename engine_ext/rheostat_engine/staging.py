"""Host memory that a worker shares with the server: its layout, and the server's end of it.

Invariant: ranges are given out and given back first in, first out. The worker alone writes rows,
the server alone the counter of what it has taken, so that nothing is said back. The memory has no
name in any file system and can't shrink: it goes with the last process that has it.

A page of header comes first. A position counts bytes from the start of the worker on; it lies at
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
"""Magic, nonce, and how many bytes follow the header's page."""
MAGIC = b"rheostat"
PAGE = 4096
"""Bytes of the header."""
COUNTER = 64
"""Where in the header the counter lies: the position up to which all has been taken."""
ALIGNMENT = 64
"""Ranges begin at multiples of it."""


class StagingError(Exception):
    """A worker's staging area can't be reached, or a range of it is not what it should be."""


class Place(NamedTuple):
    """A range of the area."""

    position: int
    """Where it begins."""
    size: int
    """Bytes that are used."""

    @property
    def end(self) -> int:
        """Position behind it."""
        return self.position + aligned(self.size)


class StagingReport(TypedDict):
    """How the server finds the memory of a worker."""

    rank: int
    pid: int
    fd: int
    nonce: str
    """Hexadecimal; what the memory must begin with."""


def aligned(size: int) -> int:
    """Bytes that a range of so many takes."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class StagingReader:
    """The server's end of a worker's area."""

    def __init__(self, report: StagingReport) -> None:
        """Maps the memory.

        Raises:
            StagingError: it is not there, or it is other memory.
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
    def taken(self, place: Place) -> Iterator[memoryview]:
        """The bytes of a range; they are the worker's again behind the block.

        Raises:
            StagingError: the range is not one that can be next.
        """
        start = place.position % self.size
        if not (
            0 <= place.size <= self.size - start
            and self._taken <= place.position <= self._taken + 2 * self.size
        ):
            raise StagingError(
                f"{place} is no range of an area of {self.size} bytes, taken up to {self._taken}"
            )
        try:
            yield self._rows[start : start + place.size]
        finally:
            self._taken = place.end
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
        raise ValueError("other memory lies there")
    return memory


def readers_of(reports: Sequence[Mapping[str, object]]) -> dict[int, StagingReader]:
    """The areas of all workers that report, by rank.

    Args:
        reports: what each said to `rheostat_describe`.

    Raises:
        StagingError: one can't be reached.
    """
    found = [cast(StagingReport | None, report["staging"]) for report in reports]
    return {report["rank"]: StagingReader(report) for report in found if report is not None}
