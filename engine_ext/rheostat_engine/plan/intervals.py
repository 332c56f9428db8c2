"""Cuts positions into intervals, each covered by the same spans.

Invariant: an interval costs two integers. Intervals covered by the same spans share one set of
members: twenty thousand intervals that alternate between two sets cost two sets.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine.plan.acts import OPEN_END, Spans

Int32 = npt.NDArray[np.int32]


class PlanTooLarge(ValueError):
    """A plan has too many intervals, or costs too much."""


class Intervals(NamedTuple):
    """All positions from 0 on. Adjacent intervals have different members."""

    starts: Int32
    """[p]: first position of each interval, ascending from 0."""
    sets: Int32
    """[p]: the members of each interval, as an index into `members`."""
    members: tuple[tuple[int, ...], ...]
    """The distinct sets of members; each has ascending indices."""

    @property
    def ends(self) -> Int32:
        """[p]: one past the last position of each interval."""
        return np.append(self.starts[1:], np.int32(OPEN_END))

    def first_position(self, wanted: Sequence[bool]) -> int:
        """The lowest position with a wanted set of members; `OPEN_END` if there is none.

        Args:
            wanted: for each of `members`, whether it is wanted.
        """
        where = np.flatnonzero(np.array(wanted)[self.sets])
        return int(self.starts[where[0]]) if len(where) else OPEN_END


def cut_intervals(
    spans: Sequence[Spans],
    *,
    cost_of: Callable[[tuple[int, ...]], int] = len,
    max_cost: int | None = None,
    max_intervals: int | None = None,
) -> Intervals:
    """Cuts the positions where membership changes.

    Args:
        spans: the spans of each member.
        cost_of: returns the cost of a set of members. Each distinct set counts once.
        max_cost: the largest cost of all sets.
        max_intervals: the most intervals.

    Raises:
        PlanTooLarge: a limit is exceeded. The check stops as soon as it is.
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
    if max_intervals is not None and len(starts) > max_intervals:
        raise PlanTooLarge(
            f"There are {len(starts)} intervals; at most {max_intervals} are allowed"
        )
    numbers: dict[int, int] = {}
    members: list[tuple[int, ...]] = []
    sets: list[int] = []
    active = spent = 0
    for start in starts:
        active ^= toggles[start]
        number = numbers.setdefault(active, len(numbers))
        if number == len(members):
            members.append(_bits(active))
            spent += cost_of(members[-1])
            if max_cost is not None and spent > max_cost:
                raise PlanTooLarge(f"It costs over {max_cost}, which is the most that is allowed")
        sets.append(number)
    return Intervals(np.array(starts, np.int32), np.array(sets, np.int32), tuple(members))


def _bits(mask: int) -> tuple[int, ...]:
    """The indices of the set bits, ascending."""
    numbers = []
    while mask:
        lowest = mask & -mask
        numbers.append(lowest.bit_length() - 1)
        mask ^= lowest
    return tuple(numbers)
