"""The distinct sets of captured sites, with reference counts.

Invariants: site set 0 is empty. A site set and its encodings exist while the set has users, so
clients can't make the table grow beyond the sets in use. Adding or removing many site sets costs a
few numpy calls for all of them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine.worker.state.id_allocators import Exhausted, RefCountedIds, Taken
from rheostat_engine.worker.transport.row_encodings import RowEncodings

Int16 = npt.NDArray[np.int16]


class SiteSetTable(NamedTuple):
    """The sites of each site set."""

    ranks: npt.NDArray[np.int32]
    """[site sets, sites]: rank of a site among those of the set with its encoding; -1: none."""
    encodings: npt.NDArray[np.int32]
    """[site sets, sites]: number of the encoding."""
    counts: npt.NDArray[np.int32]
    """[site sets, encodings]: sites in each encoding."""


class SiteSets:
    """Numbers for sets of sites."""

    def __init__(self, numbers: npt.NDArray[np.int64], encodings: RowEncodings) -> None:
        """`numbers`, [slots], is the site index of each slot."""
        self._encodings = encodings
        self._numbers = numbers
        sites = len(numbers)
        self.table = SiteSetTable(
            np.full((1, sites), -1, np.int32),
            np.zeros((1, sites), np.int32),
            np.zeros((1, 1), np.int32),
        )
        self._ids: RefCountedIds[bytes] = RefCountedIds(0, "site set")
        self._contents: dict[int, bytes] = {}
        self._sites: dict[tuple[int, int], list[int]] = {}
        """Cached results of `sites_of`."""

    def __len__(self) -> int:
        return len(self._ids)

    def acquire(self, sets: Int16) -> list[int]:
        """Adds a use of each set; returns their numbers, 0 for an empty set.

        Args:
            sets: [n, sites]: 0 if a site is not captured, else 1 + the number of its encoding.
        """
        numbers: list[int] = []
        fresh: list[int] = []
        empty = bytes(sets.shape[1] * sets.itemsize)
        for index, site_set in enumerate(sets):
            content = site_set.tobytes()
            if content == empty:
                numbers.append(0)
                continue
            taken = self._take(content)
            if taken.fresh:
                self._contents[taken.number] = content
                fresh.append(index)
            numbers.append(taken.number)
        if fresh:
            self._write([numbers[index] for index in fresh], sets[fresh])
        return numbers

    def release(self, numbers: Sequence[int]) -> None:
        """Ends one use of each site set."""
        given = [self._ids.give(self._contents[number]) for number in numbers if number]
        unused = [number for number in given if number]
        if not unused:
            return
        for number in unused:
            del self._contents[number]
        counts = self.table.counts
        for encoding, times in enumerate((counts[unused] > 0).sum(axis=0).tolist()):
            self._encodings.release(encoding, times)
            for number in unused:
                self._sites.pop((number, encoding), None)
        counts[unused] = 0
        self._shrink()

    def sites_of(self, number: int, encoding: int) -> list[int]:
        """The indices of a site set's sites with an encoding, ascending."""
        sites = self._sites.get((number, encoding))
        if sites is None:
            ranks, encodings, _ = self.table
            wanted = (ranks[number] >= 0) & (encodings[number] == encoding)
            sites = self._sites[number, encoding] = self._numbers[wanted].tolist()
        return sites

    def _write(self, numbers: Sequence[int], sets: Int16) -> None:
        """Writes new sets to the table."""
        last = int(sets.max())
        missing = last - self.table.counts.shape[1]
        if missing > 0:
            counts = np.pad(self.table.counts, ((0, 0), (0, missing)))
            self.table = self.table._replace(counts=counts)
        ranks, encodings, counts = self.table
        ranks[numbers], counts[numbers] = -1, 0
        encodings[numbers] = np.maximum(sets - 1, 0)
        for encoding in np.unique(sets[sets > 0]).tolist():
            captured = sets == encoding
            rank = np.cumsum(captured, axis=1, dtype=np.int32) - 1
            ranks[numbers] = np.where(captured, rank, ranks[numbers])
            counts[numbers, encoding - 1] = captured.sum(axis=1)
            self._encodings.add_uses(encoding - 1, int(captured.any(axis=1).sum()))

    def _shrink(self) -> None:
        """Removes the columns of encodings that no site set uses."""
        used = np.flatnonzero(self.table.counts.any(axis=0))
        last = 1 + int(used[-1]) if len(used) else 1
        if last < self.table.counts.shape[1]:
            self.table = self.table._replace(counts=self.table.counts[:, :last].copy())

    def _take(self, content: bytes) -> Taken:
        """Adds a use of a site set; doubles the table if every number is in use."""
        try:
            return self._ids.take(content)
        except Exhausted:
            count = len(self.table.ranks)
            ranks, encodings, counts = (
                np.pad(column, ((0, count), (0, 0)), constant_values=value)
                for column, value in zip(self.table, (-1, 0, 0), strict=True)
            )
            self.table = SiteSetTable(ranks, encodings, counts)
            self._ids.grow(2 * count - 1)
            return self._ids.take(content)
