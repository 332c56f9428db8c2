"""Rows that wait, in pieces as the engine sent them, and the meter in which they count.

Invariant: what waits counts in its meter, and what has left holds no memory. Positions mostly
follow one another; then nothing goes over them.
"""

from collections.abc import Sequence
from functools import reduce

import numpy as np
import numpy.typing as npt

from rheostat_server.tensors import RawArray

Positions = npt.NDArray[np.int32]


class Meter:
    """What waits, of everything that counts in it."""

    def __init__(self) -> None:
        """Nothing waits."""
        self.bytes = 0
        self.rows = 0


class Piece:
    """Rows of some sites that wait, until they are taken or given up."""

    __slots__ = ("_first", "data", "made", "meter", "positions", "sites")

    def __init__(
        self,
        sites: tuple[int, ...],
        positions: Positions,
        data: RawArray,
        meter: Meter,
        *,
        made: bool = False,
    ) -> None:
        """Rows that count in a meter.

        Args:
            sites: indices of the sites.
            positions: ascending, [n].
            data: [sites, n, width].
            meter: counts them while they wait.
            made: whether they are in their form.
        """
        self.sites = sites
        self.positions = positions
        self.data = data
        self.made = made
        self.meter = meter
        self._first = _first_of_run(positions)
        meter.bytes += data.nbytes
        meter.rows += self.rows

    def __len__(self) -> int:
        """Positions that still wait."""
        return len(self.positions)

    @property
    def rows(self) -> int:
        """Rows that still wait, of all sites."""
        return len(self.positions) * len(self.sites)

    def below(self, frontier: int) -> int:
        """How many positions wait below one."""
        if self._first is None:
            return int(np.searchsorted(self.positions, frontier))
        return max(0, min(frontier - self._first, len(self.positions)))

    def take(self, frontier: int) -> tuple[Positions, RawArray]:
        """The positions below one and their rows, which wait no more."""
        cut = self.below(frontier)
        taken = self.positions[:cut], self.data[:, :cut]
        self.meter.bytes -= taken[1].nbytes
        self.meter.rows -= cut * len(self.sites)
        if cut == len(self.positions):
            self._empty()
        else:
            self.positions, self.data = self.positions[cut:], self.data[:, cut:]
            if self._first is not None:
                self._first += cut
        return taken

    def give_up(self) -> None:
        """Loses what still waits."""
        self.meter.bytes -= self.data.nbytes
        self.meter.rows -= self.rows
        self._empty()

    def _empty(self) -> None:
        """Holds nothing any more, not even memory: a slice would keep all of it."""
        self._first = None
        self.positions = np.empty(0, self.positions.dtype)
        self.data = np.empty((len(self.sites), 0, self.data.shape[2]), self.data.dtype)


def common(parts: Sequence[Positions]) -> Positions:
    """The positions that all have; usually all have the same."""
    if all(_equal(part, parts[0]) for part in parts[1:]):
        return parts[0]
    return reduce(np.intersect1d, parts)


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
