"""Positions cut into pieces: between two cuts the same of some spans hold.

Invariant: a piece costs two integers. What holds in it is told once for all pieces in which the
same holds, so that twenty thousand pieces that alternate between two sets cost two sets.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine.acts import OPEN_END, Spans

Int32 = npt.NDArray[np.int32]


class TooMuch(ValueError):
    """More pieces, or more in them, than a plan may have."""


class Pieces(NamedTuple):
    """All positions from 0 on, in pieces. Neighbouring pieces differ in what holds."""

    starts: Int32
    """[p]: first position of each piece, ascending from 0."""
    sets: Int32
    """[p]: what holds in it, as an index into `members`."""
    members: tuple[tuple[int, ...], ...]
    """The different sets of spans that hold together, each ascending."""

    @property
    def ends(self) -> Int32:
        """[p]: one past the last position of each piece."""
        return np.append(self.starts[1:], np.int32(OPEN_END))


def cut(
    spans: Sequence[Spans],
    *,
    price: Callable[[tuple[int, ...]], int] = len,
    budget: int | None = None,
    most: int | None = None,
) -> Pieces:
    """Cuts the positions where membership changes.

    Args:
        spans: those that may hold, told apart by their index.
        price: what a set of members costs, each different set once.
        budget: the most that all sets may cost.
        most: the most pieces.

    Raises:
        TooMuch: there is more than that. Finding out costs no more than `budget` and `most`.
    """
    toggles: defaultdict[int, int] = defaultdict(int)
    for index, one in enumerate(spans):
        bit = 1 << index
        for start, end in one:
            toggles[start] ^= bit
            toggles[end] ^= bit
    toggles.pop(OPEN_END, None)
    toggles.setdefault(0, 0)
    starts = sorted(start for start, bits in toggles.items() if bits or not start)
    if most is not None and len(starts) > most:
        raise TooMuch(f"There are {len(starts)} pieces; at most {most} are allowed")
    numbers: dict[int, int] = {}
    members: list[tuple[int, ...]] = []
    sets: list[int] = []
    held = spent = 0
    for start in starts:
        held ^= toggles[start]
        number = numbers.setdefault(held, len(numbers))
        if number == len(members):
            members.append(_bits(held))
            spent += price(members[-1])
            if budget is not None and spent > budget:
                raise TooMuch(f"It costs over {budget}, which is the most that is allowed")
        sets.append(number)
    return Pieces(np.array(starts, np.int32), np.array(sets, np.int32), tuple(members))


def _bits(held: int) -> tuple[int, ...]:
    """The numbers of the bits that are set, ascending."""
    found = []
    while held:
        lowest = held & -held
        found.append(lowest.bit_length() - 1)
        held ^= lowest
    return tuple(found)
