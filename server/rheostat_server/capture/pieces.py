"""Rows that wait, in pieces as the engine sent them, and the meter in which they count.

Invariant: what waits counts in its meter, and what has left holds no memory. Positions mostly
follow one another; then nothing goes over them.
"""

from collections.abc import Iterable
from functools import reduce
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rheostat_server.capture.budget import Meter
from rheostat_wire.dtypes import StoredArray

Positions = npt.NDArray[np.int32]

_NO_POSITIONS: Positions = np.empty(0, np.int32)
_NO_ROWS: StoredArray = np.empty((0, 0, 0), np.float32)


class Queue(Protocol):
    """Where pieces wait, of some sites at the same positions."""

    def drop(self, size: int, *, newest: bool) -> tuple[int, int]:
        """Loses the highest positions, or the lowest; the first of them, and how many rows."""


class Piece:
    """Rows of some sites that wait, until they are taken or given up."""

    __slots__ = ("_first", "_whole", "data", "made", "meter", "positions", "queue", "sites")

    def __init__(
        self,
        sites: tuple[int, ...],
        positions: Positions,
        data: StoredArray,
        meter: Meter,
        queue: Queue,
        *,
        made: bool = False,
    ) -> None:
        """Rows that count in a meter.

        Args:
            sites: indices of the sites.
            positions: ascending, [n].
            data: [sites, n, width].
            meter: counts them while they wait.
            queue: in which they wait, with the rows of other sites at the same positions.
            made: whether they are in their form.
        """
        self.sites = sites
        self.positions = positions
        self.data = data
        self.made = made
        self.meter = meter
        self.queue = queue
        self._first = _first_of_run(positions)
        self._whole = len(positions)
        """Positions that the memory of `data` is of."""
        meter.add(data.nbytes, self.rows, 1)

    def __len__(self) -> int:
        """Positions that still wait."""
        return len(self.positions)

    @property
    def position_bytes(self) -> int:
        """Bytes of the rows at a position."""
        sites, _, width = self.data.shape
        return int(sites * width * self.data.itemsize)

    @property
    def rows(self) -> int:
        """Rows that still wait, of all sites."""
        return len(self.positions) * len(self.sites)

    def below(self, frontier: int) -> int:
        """How many positions wait below one."""
        if self._first is None:
            return int(np.searchsorted(self.positions, frontier))
        return max(0, min(frontier - self._first, len(self.positions)))

    def take(self, frontier: int) -> tuple[Positions, StoredArray]:
        """The positions below one and their rows, which wait no more."""
        cut = self.below(frontier)
        taken = self.positions[:cut], self.data[:, :cut]
        if cut:
            self._keep(slice(cut, None), cut)
        return taken

    def ends_by(self, frontier: int) -> bool:
        """Whether all positions that wait lie below one, and follow one another."""
        return self._first is not None and self._first + len(self.positions) <= frontier

    def take_all(self) -> tuple[Positions, StoredArray]:
        """All positions and their rows, which wait no more. The caller counts that in the meter."""
        taken = self.positions, self.data
        self._empty()
        return taken

    def give_up(self) -> None:
        """Loses what still waits."""
        if len(self.positions):
            self._keep(slice(0, 0), len(self.positions))

    def lose(self, start: int, end: int) -> int:
        """Loses the rows at positions in [start, end); how many rows."""
        first, past = (int(self.positions.searchsorted(one)) for one in (start, end))
        count = past - first
        if not count:
            return 0
        if not first:
            self._keep(slice(past, None), count)
        elif past == len(self.positions):
            self._keep(slice(0, first), count)
        else:
            self._keep(np.r_[0:first, past : len(self.positions)], count)
        if 2 * len(self.positions) < self._whole:
            # A slice keeps the memory of what it was cut from. Copying once most of that is lost
            # costs no more than the rows did that came.
            self.positions, self.data = self.positions.copy(), self.data.copy()
            self._whole = len(self.positions)
        return count * len(self.sites)

    def _keep(self, kept: "slice | npt.NDArray[np.intp]", gone: int) -> None:
        """Keeps some of the positions; so many do not wait any more."""
        last = gone == len(self.positions)
        self.meter.add(-gone * self.position_bytes, -gone * len(self.sites), -last)
        if last:
            self._empty()
        else:
            self.positions, self.data = self.positions[kept], self.data[:, kept]
            self._first = _first_of_run(self.positions)

    def _empty(self) -> None:
        """Holds nothing any more, not even memory: a slice would keep all of it."""
        self._first = None
        self.positions, self.data = _NO_POSITIONS, _NO_ROWS


def common(parts: Iterable[Positions]) -> Positions:
    """The positions that all have; usually all have the same."""
    first, *others = parts
    if all(_equal(part, first) for part in others):
        return first
    return reduce(np.intersect1d, others, first)


def _first_of_run(positions: Positions) -> int | None:
    """The first of ascending positions that follow one another; None where they do not."""
    if not len(positions):
        return None
    first = int(positions[0])
    return first if int(positions[-1]) - first == len(positions) - 1 else None


def _equal(some: Positions, others: Positions) -> bool:
    """Whether ascending positions are the same, quicker where they follow one another."""
    if some is others:
        return True
    if len(some) != len(others):
        return False
    first = _first_of_run(some)
    if first is None or first != _first_of_run(others):
        return np.array_equal(some, others)
    return True
