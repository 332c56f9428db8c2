"""Waiting rows, in batches as the engine sent them.

Invariant: waiting rows count in their byte counter, and rows that have left hold no memory.
Positions mostly follow one another. Then no code iterates over them.
"""

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rheostat_server.delivery.byte_budget import ByteCounter
from rheostat_wire.dtypes import StoredArray

Positions = npt.NDArray[np.int32]

_NO_POSITIONS: Positions = np.empty(0, np.int32)
_NO_ROWS: StoredArray = np.empty((0, 0, 0), np.float32)


class Queue(Protocol):
    """The batches of some sites at the same positions."""

    def drop(self, size: int, *, newest: bool) -> tuple[int, int]:
        """Drops the highest positions, or the lowest. Returns the first of them, and the rows."""


_BATCH_PARTS = 64
_BATCH_BYTES = 256 << 10
"""Parts and bytes up to which a batch takes later rows too."""

_LARGE_PART = 64 << 10
"""Rows of so many bytes are a batch of their own."""

_PARTS_PER_BATCH = 4
"""Parts that take as much memory beside their rows as a batch."""


class RowBatch:
    """Waiting rows of some sites at the same positions, until they are taken or dropped.

    Rows at the next positions are added to the batch, because a generated token has one row. They
    are concatenated when they are taken.
    """

    __slots__ = (
        "_first",
        "_parts",
        "_positions",
        "_whole",
        "byte_counter",
        "count",
        "counted",
        "encoded",
        "queue",
        "sites",
    )

    def __init__(
        self,
        sites: tuple[int, ...],
        positions: Positions,
        data: StoredArray,
        byte_counter: ByteCounter,
        queue: Queue,
        *,
        encoded: bool = False,
    ) -> None:
        """Counts the rows.

        Args:
            sites: indices of the sites.
            positions: ascending, [n].
            data: [sites, n, width].
            byte_counter: counts them while they wait.
            queue: drops rows of all sites at the same positions.
            encoded: whether the device has encoded them.
        """
        self.sites = sites
        self.encoded = encoded
        self.byte_counter = byte_counter
        self.queue = queue
        self.count = len(positions)
        """Positions that still wait."""
        self.counted = 1
        """Batches as which `byte_counter` counts it."""
        self._positions: Positions | None = positions
        """None if they follow one another from `_first` on."""
        self._parts = [data]
        self._first = _first_of_run(positions)
        self._whole = self.count
        """Positions whose rows are in memory, including dropped ones."""
        byte_counter.add(data.nbytes, self.rows, 1)

    @property
    def positions(self) -> Positions:
        """Positions that still wait, ascending."""
        if self._positions is None:
            first = self._first or 0
            self._positions = np.arange(first, first + self.count, dtype=np.int32)
        return self._positions

    @property
    def data(self) -> StoredArray:
        """Their rows, [sites, n, width]."""
        if len(self._parts) > 1:
            self._parts = [concatenated(self._parts)]
        return self._parts[0]

    @property
    def first(self) -> int:
        """The first waiting position. The batch must have one."""
        return int(self.positions[0]) if self._first is None else self._first

    @property
    def last(self) -> int:
        """The last waiting position. The batch must have one."""
        return int(self.positions[-1]) if self._first is None else self._first + self.count - 1

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        part = self._parts[0]
        return int(part.shape[2]) * part.itemsize

    @property
    def position_bytes(self) -> int:
        """Bytes of the rows at a position."""
        return len(self.sites) * self.row_bytes

    @property
    def rows(self) -> int:
        """Rows that still wait, of all sites."""
        return self.count * len(self.sites)

    def takes(self, first: int, last: int, count: int, size: int) -> bool:
        """Whether rows of the same sites are to be added to this batch.

        Args:
            first: their first position.
            last: their last position.
            count: how many positions they are of.
            size: their bytes.
        """
        return (
            self._first is not None
            and self._first + self.count == first
            and last - first == count - 1
            and size < _LARGE_PART
            and len(self._parts) < _BATCH_PARTS
            and self.count * self.position_bytes + size <= _BATCH_BYTES
        )

    def add(self, data: StoredArray) -> None:
        """Adds the rows of the positions that follow, [sites, n, width]; see `takes`."""
        count = data.shape[1]
        self._parts.append(data)
        self._positions = None
        self.count += count
        self._whole += count
        batches = len(self._parts) % _PARTS_PER_BATCH == 0
        self.counted += batches
        self.byte_counter.add(data.nbytes, count * len(self.sites), batches)

    def below(self, frontier: int) -> int:
        """Number of waiting positions below `frontier`."""
        if self._first is None:
            return int(np.searchsorted(self.positions, frontier))
        return max(0, min(frontier - self._first, self.count))

    def take(self, frontier: int) -> tuple[Positions, list[StoredArray]]:
        """Removes and returns the positions below `frontier`, and their rows in parts."""
        cut = self.below(frontier)
        if cut == self.count:
            taken = self.positions, self._parts
        else:
            taken = self.positions[:cut], [self.data[:, :cut]]
        if cut:
            self._keep(slice(cut, None), cut)
        return taken

    def give_up(self) -> None:
        """Drops all waiting rows."""
        if self.count:
            self._keep(slice(0, 0), self.count)

    def lose(self, start: int, end: int) -> int:
        """Drops the rows at positions in [start, end). Returns their number."""
        first, past = (int(self.positions.searchsorted(edge)) for edge in (start, end))
        count = past - first
        if not count:
            return 0
        if not first:
            self._keep(slice(past, None), count)
        elif past == self.count:
            self._keep(slice(0, first), count)
        else:
            self._keep(np.r_[0:first, past : self.count], count)
        if 2 * self.count < self._whole:
            # A slice keeps the whole array in memory. Copying it once most of it is lost costs no
            # more than the rows did when they came.
            self._positions, self._parts = self.positions.copy(), [self.data.copy()]
            self._whole = self.count
        return count * len(self.sites)

    def _keep(self, kept: "slice | npt.NDArray[np.intp]", gone: int) -> None:
        """Keeps some of the positions; `gone` is the number of the others."""
        last = gone == self.count
        left = 0 if last else min(self.counted, 1 + (self.count - gone) // _PARTS_PER_BATCH)
        self.byte_counter.add(
            -gone * self.position_bytes, -gone * len(self.sites), left - self.counted
        )
        self.counted = left
        if last:
            self._empty()
        else:
            positions, data = self.positions[kept], self.data[:, kept]
            self._positions, self._parts = positions, [data]
            self.count = len(positions)
            self._first = _first_of_run(positions)

    def _empty(self) -> None:
        """Releases the memory, all of which a slice would keep."""
        self._first = None
        self._positions, self._parts = _NO_POSITIONS, [_NO_ROWS]
        self.count = 0


def concatenated(parts: Sequence[StoredArray]) -> StoredArray:
    """Rows [sites, n, width] of some sites at all positions of several parts.

    Rows of one site are joined as bytes, which can become a message without another copy.
    """
    if len(parts) == 1:
        return parts[0]
    sites, _, width = parts[0].shape
    if sites > 1:
        return np.concatenate(parts, axis=1)
    joined = b"".join([np.ascontiguousarray(part).data for part in parts])
    return np.frombuffer(joined, parts[0].dtype).reshape(1, -1, width)


def common(parts: Iterable[Positions]) -> Positions:
    """The positions that all parts have; usually all have the same."""
    first, *others = parts
    if all(_equal(part, first) for part in others):
        return first
    return reduce(np.intersect1d, others, first)


def _first_of_run(positions: Positions) -> int | None:
    """The first of ascending positions; None if they do not follow one another."""
    if not len(positions):
        return None
    first = int(positions[0])
    return first if int(positions[-1]) - first == len(positions) - 1 else None


def _equal(some: Positions, others: Positions) -> bool:
    """Whether ascending positions are the same; quicker if they follow one another."""
    if some is others:
        return True
    if len(some) != len(others):
        return False
    first = _first_of_run(some)
    if first is None or first != _first_of_run(others):
        return np.array_equal(some, others)
    return True
