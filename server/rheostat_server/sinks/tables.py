"""The rows of a recording until it is published: a table per capture and site, in bounded memory.

All columns of a table have equal length. A block that does not fit its capture is refused as a
whole. Once more than `buffer_bytes` wait in memory, they move to one spool file, from which they
are read back in order.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

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
"""The numpy type of each element type; bfloat16 is stored as bits."""

_CHUNK = 4 << 20

_OVERHEAD = 512
"""Approximate bytes of memory per block and site besides the rows."""


class ColumnValues:
    """A column and its values, in memory or in the spool file."""

    def __init__(self, table: str, column: Column) -> None:
        self._table = table
        self.column = column
        self.rows = 0
        self._kind = NUMPY[column.dtype]
        self._spooled: list[range] = []
        """Ranges of bytes in the spool file."""
        self._arrays: list[StoredArray] = []

    def add(self, values: StoredArray) -> None:
        """Appends values [rows, ...]."""
        self._arrays.append(values)
        self.rows += len(values)

    @property
    def name(self) -> str:
        """As "0.resid_post.3.positions": the name of its table, and its own."""
        return f"{self._table}.{self.column.name}"

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return self.rows * math.prod(self.column.shape) * self._kind.itemsize

    def spool(self, file: int, offset: int) -> int:
        """Moves the values in memory to a file; returns the offset after them."""
        start = offset
        for chunk in self._chunks():
            write_all(file, chunk)
            offset += len(chunk)
        self._arrays.clear()
        if offset > start:
            self._spooled.append(range(start, offset))
        return offset

    def read(self, file: int | None) -> Iterator[memoryview]:
        """All bytes in order; `file` is the spool file."""
        for spooled in self._spooled:
            assert file is not None
            for first in range(spooled.start, spooled.stop, _CHUNK):
                data = os.pread(file, min(_CHUNK, spooled.stop - first), first)
                if not data:
                    raise SinkError("the spooled rows cannot be read back")
                yield memoryview(data)
        yield from self._chunks()

    def _chunks(self) -> Iterator[memoryview]:
        small: list[StoredArray] = []
        waiting = 0
        for values in self._arrays:
            small.append(values)
            waiting += values.nbytes
            if waiting >= _CHUNK:
                yield _concatenate(small, self._kind)
                small, waiting = [], 0
        if waiting:
            yield _concatenate(small, self._kind)


def _concatenate(parts: Sequence[StoredArray], kind: np.dtype[np.generic]) -> memoryview:
    array = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return np.ascontiguousarray(array, dtype=kind).reshape(-1).view(np.uint8).data


class Table:
    """The rows of one capture at one site."""

    def __init__(self, about: CaptureAbout, site: Site) -> None:
        self.about = about
        self.site = site
        self.name = f"{about.capture_index}.{site.point.value}.{site.layer}"
        """As "0.resid_post.3": capture, point, layer."""
        self.rows = 0
        self.columns = tuple(ColumnValues(self.name, column) for column in (*about.parts, *LABELS))


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
            captures: what they will hold.
            buffer_bytes: bytes of rows in memory above which these move to the spool file.
            spool: opens the spool file, which the first call creates.
        """
        self.all = tuple(Table(about, site) for about in captures for site in about.sites)
        self.spool = spool
        self._captures = {about.capture_index: about for about in captures}
        self._by_site = {(table.about.capture_index, table.site): table for table in self.all}
        self._limit = buffer_bytes
        self.memory = 0
        """Approximate bytes in memory."""
        self._end = 0

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
            table = self._by_site[block.capture_index, site]
            parts = (block.parts[part.name][number] for part in table.about.parts)
            for column, values in zip(table.columns, (*parts, *labels), strict=True):
                column.add(values)
            table.rows += count
        self.memory += block.size + _OVERHEAD * len(block.sites)
        if self.memory > self._limit:
            self.overflow()

    def overflow(self) -> None:
        """Moves all rows from memory to the spool file. Raises OSError."""
        with self.spool() as file:
            os.lseek(file, self._end, os.SEEK_SET)
            for table in self.all:
                for column in table.columns:
                    self._end = column.spool(file, self._end)
        self.memory = 0

    def close(self) -> None:
        """Frees the rows in memory."""
        self.all = ()
        self._by_site = {}


def check_block(block: RowBlock, captures: "dict[int, CaptureAbout]") -> None:
    """Checks a block against its capture.

    Raises:
        SinkError: its capture or a site is unknown, or its arrays have other shapes or types.
    """
    about = captures.get(block.capture_index)
    if about is None:
        raise SinkError(f"capture {block.capture_index} was not announced")
    if not set(block.sites) <= set(about.sites):
        raise SinkError(
            f"a block of capture {block.capture_index} has sites that were not announced"
        )
    extents = (len(block.sites), len(block.positions))
    if len(block.token_ids) != len(block.positions):
        raise SinkError(f"{len(block.positions)} positions have {len(block.token_ids)} tokens")
    if set(block.parts) != {part.name for part in about.parts}:
        raise SinkError(
            f"a block of capture {block.capture_index} holds {', '.join(sorted(block.parts))}"
        )
    for part in about.parts:
        values = block.parts[part.name]
        if values.shape != (*extents, *part.shape) or values.dtype != NUMPY[part.dtype]:
            raise SinkError(
                f"{part.name} of capture {block.capture_index} are {values.dtype} "
                f"{list(values.shape)}, not {part.dtype} {[*extents, *part.shape]}"
            )
