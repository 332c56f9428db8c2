"""Capture classes: the distinct sets of sites that are captured, counted by users, recycled.

Invariant: class 0 captures nothing. A class, with the forms that it holds, lives as long as
somebody uses it, so that what clients choose can't make the table grow beyond what is in use.
Sets come and go many at a time: the table costs a few calls for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine.core.forms import Forms

Int16 = npt.NDArray[np.int16]


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

    def __init__(self, numbers: npt.NDArray[np.int64], forms: Forms) -> None:
        """Class 0 alone.

        Args:
            numbers: [sites]: the site at each place of the table's rows.
            forms: those in which rows leave.
        """
        self._forms = forms
        self._numbers = numbers
        sites = len(numbers)
        self.table = ClassTable(
            np.full((1, sites), -1, np.int32),
            np.zeros((1, sites), np.int32),
            np.zeros((1, 1), np.int32),
        )
        self._entries: dict[bytes, _Entry] = {}
        self._contents: dict[int, bytes] = {}
        self._free: list[int] = []
        self._sites: dict[tuple[int, int], list[int]] = {}
        """Of classes that were asked for: the sites of a form; see `sites_of`."""

    def __len__(self) -> int:
        """Classes in use, class 0 not counted."""
        return len(self._entries)

    def acquire(self, sets: Int16) -> list[int]:
        """A class for each set; the empty one is class 0.

        Args:
            sets: [n, sites]: 0 where a site is not captured, else 1 and the number of the form in
                which its rows leave.
        """
        numbers: list[int] = []
        fresh: list[int] = []
        empty = bytes(sets.shape[1] * sets.itemsize)
        for index, one in enumerate(sets):
            content = one.tobytes()
            if content == empty:
                numbers.append(0)
                continue
            entry = self._entries.get(content)
            if entry is None:
                entry = self._entries[content] = _Entry(self._place(), 0)
                self._contents[entry.number] = content
                fresh.append(index)
            entry.users += 1
            numbers.append(entry.number)
        if fresh:
            self._write([numbers[index] for index in fresh], sets[fresh])
        return numbers

    def release(self, numbers: Sequence[int]) -> None:
        """Gives classes back."""
        gone = []
        for number in numbers:
            if number == 0:
                continue
            content = self._contents[number]
            entry = self._entries[content]
            entry.users -= 1
            if not entry.users:
                del self._contents[number], self._entries[content]
                gone.append(number)
        if not gone:
            return
        self._free += gone
        counts = self.table.counts
        for form, times in enumerate((counts[gone] > 0).sum(axis=0).tolist()):
            self._forms.release(form, times)
            for number in gone:
                self._sites.pop((number, form), None)
        counts[gone] = 0
        self._shrink()

    def sites_of(self, number: int, form: int) -> list[int]:
        """The numbers of the sites of a class whose rows leave in a form, ascending."""
        found = self._sites.get((number, form))
        if found is None:
            ranks, forms, _ = self.table
            wanted = (ranks[number] >= 0) & (forms[number] == form)
            found = self._sites[number, form] = self._numbers[wanted].tolist()
        return found

    def _write(self, numbers: Sequence[int], sets: Int16) -> None:
        """Writes sets that have no entry in the table."""
        most = int(sets.max())
        missing = most - self.table.counts.shape[1]
        if missing > 0:
            counts = np.pad(self.table.counts, ((0, 0), (0, missing)))
            self.table = self.table._replace(counts=counts)
        ranks, forms, counts = self.table
        ranks[numbers], counts[numbers] = -1, 0
        forms[numbers] = np.maximum(sets - 1, 0)
        for form in np.unique(sets[sets > 0]).tolist():
            held = sets == form
            rank = np.cumsum(held, axis=1, dtype=np.int32) - 1
            ranks[numbers] = np.where(held, rank, ranks[numbers])
            counts[numbers, form - 1] = held.sum(axis=1)
            self._forms.hold(form - 1, int(held.any(axis=1).sum()))

    def _shrink(self) -> None:
        """Forgets the columns of forms that no class has any more."""
        used = np.flatnonzero(self.table.counts.any(axis=0))
        most = 1 + int(used[-1]) if len(used) else 1
        if most < self.table.counts.shape[1]:
            self.table = self.table._replace(counts=self.table.counts[:, :most].copy())

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
