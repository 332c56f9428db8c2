"""Capture classes: the distinct sets of sites that are captured, counted by users, recycled.

Invariant: class 0 captures nothing. A class lives as long as somebody uses it, so that what clients
choose can't make the table grow beyond what is in use.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass
class _Entry:
    number: int
    users: int


class CaptureClasses:
    """Numbers for sets of sites."""

    def __init__(self, sites: int) -> None:
        """Class 0 alone, for a model with `sites` sites."""
        self.ranks: npt.NDArray[np.int32] = np.full((1, sites), -1, np.int32)
        """[classes, sites]: place of a site among those of a class, -1: not in it."""
        self._entries: dict[frozenset[int], _Entry] = {}
        self._sets: dict[int, frozenset[int]] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        """Classes in use, class 0 not counted."""
        return len(self._entries)

    def acquire(self, sets: Sequence[frozenset[int]]) -> list[int]:
        """A class for each set; the empty one is class 0."""
        return [self._acquire(one) for one in sets]

    def release(self, numbers: Iterable[int]) -> None:
        """Gives classes back."""
        for number in numbers:
            if number == 0:
                continue
            entry = self._entries[self._sets[number]]
            entry.users -= 1
            if not entry.users:
                del self._entries[self._sets.pop(number)]
                self._free.append(number)

    def _acquire(self, sites: frozenset[int]) -> int:
        if not sites:
            return 0
        entry = self._entries.get(sites)
        if entry is None:
            entry = _Entry(self._place(), 0)
            self._entries[sites] = entry
            self._sets[entry.number] = sites
            self.ranks[entry.number] = -1
            self.ranks[entry.number, sorted(sites)] = np.arange(len(sites))
        entry.users += 1
        return entry.number

    def _place(self) -> int:
        if not self._free:
            count = len(self.ranks)
            self.ranks = np.pad(self.ranks, ((0, count), (0, 0)), constant_values=-1)
            self._free = list(range(2 * count - 1, count - 1, -1))
        return self._free.pop()
