"""The rows of a recording until it is published: a table per capture and site, in bounded memory.

Invariants: the columns of a table are equally long; a block that does not fit what its capture
announced is refused whole. Once more than `buffer_bytes` wait in memory they move to one spool
file, from which they are read back in order.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import numpy as np

from rheostat_engine import Site
from rheostat_server.sinks.disk import write_all
from rheostat_server.sinks.protocol import LABELS, CaptureAbout, Column, RowBlock, SinkError
from rheostat_wire.dtypes import StoredArray

NUMPY: dict[str, np.dtype[np.generic]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "int32": np.dtype("<i4"),
    "uint32": np.dtype("<u4"),
    "uint8": np.dtype("u1"),
}
"""How columns are held, by element type."""

_PIECE = 4 << 20

_OVERHEAD = 512
"""Bytes of memory per block and site besides the rows, about."""


class _Extent(NamedTuple):
    """Where bytes of a column lie in the spool."""

    offset: int
    length: int


class Filled:
    """A column and its values."""

    def __init__(self, column: Column) -> None:
        """An empty one."""
        self.column = column
        self.nbytes = 0
        self._kind = NUMPY[column.dtype]
        self._spooled: list[_Extent] = []
        self._held: list[StoredArray] = []

    def add(self, values: StoredArray) -> None:
        """Appends values [rows, ...]."""
        self._held.append(values)
        self.nbytes += values.nbytes

    def spool(self, file: int, offset: int) -> int:
        """Moves what is in memory to a file; the offset behind it."""
        start = offset
        for piece in self._pieces():
            write_all(file, piece)
            offset += len(piece)
        self._held.clear()
        if offset > start:
            self._spooled.append(_Extent(start, offset - start))
        return offset

    def read(self, file: int | None) -> Iterator[memoryview]:
        """All of its bytes, in order; `file` is the spool."""
        for extent in self._spooled:
            assert file is not None
            end = extent.offset + extent.length
            for first in range(extent.offset, end, _PIECE):
                data = os.pread(file, min(_PIECE, end - first), first)
                if not data:
                    raise SinkError("the spooled rows cannot be read back")
                yield memoryview(data)
        yield from self._pieces()

    def _pieces(self) -> Iterator[memoryview]:
        small: list[StoredArray] = []
        waiting = 0
        for values in self._held:
            small.append(values)
            waiting += values.nbytes
            if waiting >= _PIECE:
                yield _joined(small, self._kind)
                small, waiting = [], 0
        if waiting:
            yield _joined(small, self._kind)


def _joined(parts: Sequence[StoredArray], kind: np.dtype[np.generic]) -> memoryview:
    whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return np.ascontiguousarray(whole, dtype=kind).reshape(-1).view(np.uint8).data


class Table:
    """The rows of one capture at one site."""

    def __init__(self, about: CaptureAbout, site: Site) -> None:
        """An empty one."""
        self.about = about
        self.site = site
        self.rows = 0
        self.columns = tuple(Filled(column) for column in (*about.parts, *LABELS))

    @property
    def name(self) -> str:
        """As "0.resid_post.3": capture, point, layer."""
        return f"{self.about.capture_index}.{self.site.point.value}.{self.site.layer}"


class Tables:
    """All tables of a recording."""

    def __init__(
        self,
        captures: Sequence[CaptureAbout],
        buffer_bytes: int,
        spool: Callable[[], AbstractContextManager[int]],
    ) -> None:
        """Empty tables.

        Args:
            captures: what they hold.
            buffer_bytes: bytes that wait in memory.
            spool: opens the file that they overflow to, which it makes the first time.
        """
        self.all = tuple(Table(about, site) for about in captures for site in about.sites)
        self.spooled = False
        """Whether they have overflowed."""
        self.spool = spool
        """Opens the file."""
        self._captures = {about.capture_index: about for about in captures}
        self._found = {(table.about.capture_index, table.site): table for table in self.all}
        self._limit = buffer_bytes
        self._held = 0
        self._end = 0

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(table.rows for table in self.all)

    def write(self, block: RowBlock) -> None:
        """Appends a block.

        Raises:
            SinkError: it does not fit its capture.
            OSError: the spool cannot be written.
        """
        check_block(block, self._captures)
        count = len(block.positions)
        labels = (
            block.positions,
            block.token_ids,
            np.full(count, block.sample, np.int32),
            np.full(count, block.baseline, np.uint8),
        )
        for number, site in enumerate(block.sites):
            table = self._found[block.capture_index, site]
            parts = (block.parts[part.name][number] for part in table.about.parts)
            for filled, values in zip(table.columns, (*parts, *labels), strict=True):
                filled.add(values)
            table.rows += count
        self._held += block.size + _OVERHEAD * len(block.sites)
        if self._held > self._limit:
            self.overflow()

    @property
    def memory(self) -> int:
        """Bytes that wait in memory, about."""
        return self._held

    def overflow(self) -> None:
        """Moves what waits in memory to the file. Raises OSError."""
        with self.spool() as file:
            self.spooled = True
            os.lseek(file, self._end, os.SEEK_SET)
            for table in self.all:
                for filled in table.columns:
                    self._end = filled.spool(file, self._end)
        self._held = 0

    def close(self) -> None:
        """Frees everything."""
        self.all = ()
        self._found = {}


def check_block(block: RowBlock, captures: "dict[int, CaptureAbout]") -> None:
    """Checks a block against what its capture announced.

    Raises:
        SinkError: it is of an unknown capture or site, or its arrays have other shapes or types.
    """
    about = captures.get(block.capture_index)
    if about is None:
        raise SinkError(f"capture {block.capture_index} was not announced")
    if not set(block.sites) <= set(about.sites):
        raise SinkError(
            f"a block of capture {block.capture_index} has sites that were not announced"
        )
    labelled = (len(block.sites), len(block.positions))
    if len(block.token_ids) != len(block.positions):
        raise SinkError(f"{len(block.positions)} positions have {len(block.token_ids)} tokens")
    if set(block.parts) != {part.name for part in about.parts}:
        raise SinkError(
            f"a block of capture {block.capture_index} holds {', '.join(sorted(block.parts))}"
        )
    for part in about.parts:
        values = block.parts[part.name]
        if values.shape != (*labelled, *part.shape) or values.dtype != NUMPY[part.dtype]:
            raise SinkError(
                f"{part.name} of capture {block.capture_index} are {values.dtype} "
                f"{list(values.shape)}, not {part.dtype} {[*labelled, *part.shape]}"
            )
