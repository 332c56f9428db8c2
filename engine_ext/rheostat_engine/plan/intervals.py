"""Positions cut into intervals, in each of which the same spans hold.

Invariant: an interval costs two integers. Intervals in which the same spans hold share one set of
members, so that twenty thousand intervals that alternate between two sets cost two sets.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine.plan.acts import OPEN_END, Spans

Int32 = npt.NDArray[np.int32]


class PlanTooLarge(ValueError):
    """A plan has more intervals than a plan may have, or costs more."""


class Intervals(NamedTuple):
    """All positions from 0 on. Neighbouring intervals have different members."""

    starts: Int32
    """[p]: first position of each interval, ascending from 0."""
    sets: Int32
    """[p]: the members of each interval, as an index into `members`."""
    members: tuple[tuple[int, ...], ...]
    """The different sets of spans that hold together, each as ascending indices."""

    @property
    def ends(self) -> Int32:
        """[p]: one past the last position of each interval."""
        return np.append(self.starts[1:], np.int32(OPEN_END))


def cut(
    spans: Sequence[Spans],
    *,
    price: Callable[[tuple[int, ...]], int] = len,
    budget: int | None = None,
    most: int | None = None,
) -> Intervals:
    """Cuts the positions where membership changes.

    Args:
        spans: the spans of each member, which is named by its index.
        price: returns the cost of a set of members. Each different set costs once.
        budget: the most that all sets may cost.
        most: the most intervals.

    Raises:
        PlanTooLarge: a limit is exceeded. The check costs no more than `budget` and `most`.
    """
    toggles: defaultdict[int, int] = defaultdict(int)
    for index, pairs in enumerate(spans):
        bit = 1 << index
        for start, end in pairs:
            toggles[start] ^= bit
            toggles[end] ^= bit
    toggles.pop(OPEN_END, None)
    toggles.setdefault(0, 0)
    starts = sorted(start for start, bits in toggles.items() if bits or not start)
    if most is not None and len(starts) > most:
        raise PlanTooLarge(f"There are {len(starts)} intervals; at most {most} are allowed")
    numbers: dict[int, int] = {}
    members: list[tuple[int, ...]] = []
    sets: list[int] = []
    active = spent = 0
    for start in starts:
        active ^= toggles[start]
        number = numbers.setdefault(active, len(numbers))
        if number == len(members):
            members.append(_bits(active))
            spent += price(members[-1])
            if budget is not None and spent > budget:
                raise PlanTooLarge(f"It costs over {budget}, which is the most that is allowed")
        sets.append(number)
    return Intervals(np.array(starts, np.int32), np.array(sets, np.int32), tuple(members))


def _bits(mask: int) -> tuple[int, ...]:
    """The numbers of the bits that are set, ascending."""
    numbers = []
    while mask:
        lowest = mask & -mask
        numbers.append(lowest.bit_length() - 1)
        mask ^= lowest
    return tuple(numbers)
