"""Capture classes: the distinct sets of sites that are captured, counted by users, recycled.

Invariant: class 0 captures nothing. A class, with the forms that it holds, lives as long as
somebody uses it, so that what clients choose can't make the table grow beyond what is in use.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine.core.forms import Forms

Sites = frozenset[tuple[int, int]]
"""Sites, each with the number of the form in which its rows leave; see `Forms`."""


class ClassTable(NamedTuple):
    """What each class captures."""

    ranks: npt.NDArray[np.int32]
    """[classes, sites]: place of a site among those of the class in its form, -1: not in it."""
    forms: npt.NDArray[np.int32]
    """[classes, sites]: form of its rows."""
    counts: npt.NDArray[np.int32]
    """[classes, forms]: sites in each form."""


@dataclass
class _Entry:
    number: int
    users: int


class CaptureClasses:
    """Numbers for sets of sites."""

    def __init__(self, sites: int, forms: Forms) -> None:
        """Class 0 alone, for a model with `sites` sites, whose rows have forms of these."""
        self._forms = forms
        self.table = ClassTable(
            np.full((1, sites), -1, np.int32),
            np.zeros((1, sites), np.int32),
            np.zeros((1, 1), np.int32),
        )
        self._entries: dict[Sites, _Entry] = {}
        self._sets: dict[int, Sites] = {}
        self._free: list[int] = []

    def __len__(self) -> int:
        """Classes in use, class 0 not counted."""
        return len(self._entries)

    def acquire(self, sets: Sequence[Sites]) -> list[int]:
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
                sites = self._sets.pop(number)
                del self._entries[sites]
                self._free.append(number)
                for form in {form for _, form in sites}:
                    self._forms.release(form)
                self._shrink()

    def _acquire(self, sites: Sites) -> int:
        if not sites:
            return 0
        entry = self._entries.get(sites)
        if entry is None:
            entry = _Entry(self._place(), 0)
            self._entries[sites] = entry
            self._sets[entry.number] = sites
            self._write(entry.number, sites)
            for form in {form for _, form in sites}:
                self._forms.hold(form)
        entry.users += 1
        return entry.number

    def _write(self, number: int, sites: Sites) -> None:
        missing = max(form for _, form in sites) + 1 - self.table.counts.shape[1]
        if missing > 0:
            counts = np.pad(self.table.counts, ((0, 0), (0, missing)))
            self.table = self.table._replace(counts=counts)
        ranks, forms, counts = (column[number] for column in self.table)
        ranks[:] = -1
        forms[:] = counts[:] = 0
        for site, form in sorted(sites):
            ranks[site], forms[site] = counts[form], form
            counts[form] += 1

    def _shrink(self) -> None:
        """Forgets the columns of forms that no class has any more."""
        most = max((form for sites in self._entries for _, form in sites), default=0)
        if most + 1 < self.table.counts.shape[1]:
            self.table = self.table._replace(counts=self.table.counts[:, : most + 1].copy())

    def _place(self) -> int:
        if not self._free:
            ranks, forms, counts = self.table
            count = len(ranks)
            self.table = ClassTable(
                np.pad(ranks, ((0, count), (0, 0)), constant_values=-1),
                np.pad(forms, ((0, count), (0, 0))),
                np.pad(counts, ((0, count), (0, 0))),
            )
            self._free = list(range(2 * count - 1, count - 1, -1))
        return self._free.pop()
