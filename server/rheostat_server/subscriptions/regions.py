"""Disjoint regions of one stretch of memory, taken first fit.

Invariants: regions never overlap. A region stays taken until it is given back. It is then joined
with the free memory beside it. The lowest gap that is large enough is taken, so that memory beyond
the highest region that was ever taken is never touched.
"""

from bisect import bisect

_ALIGNMENT = 4096
"""Regions begin at multiples of a page."""


class Regions:
    """Which parts of [start, end) are taken."""

    def __init__(self, start: int, end: int) -> None:
        """Everything is free. `start` and `end` are multiples of a page."""
        self._gaps = [(start, end)]
        self._taken: dict[int, int] = {}

    @property
    def idle(self) -> bool:
        """Whether no region is taken."""
        return not self._taken

    def take(self, size: int) -> int | None:
        """Takes a region of `size` bytes, at least 1. Returns its start; None if none fits."""
        whole = -(-size // _ALIGNMENT) * _ALIGNMENT
        for index, (start, end) in enumerate(self._gaps):
            if whole <= end - start:
                self._taken[start] = start + whole
                self._gaps[index : index + 1] = [(start + whole, end)] * (whole < end - start)
                return start
        return None

    def give_back(self, start: int) -> None:
        """Frees the region that begins at `start`.

        Raises:
            KeyError: no region begins there.
        """
        end = self._taken.pop(start)
        index = bisect(self._gaps, (start, end))
        first = last = index
        if index and self._gaps[index - 1][1] == start:
            first, start = index - 1, self._gaps[index - 1][0]
        if index < len(self._gaps) and self._gaps[index][0] == end:
            last, end = index + 1, self._gaps[index][1]
        self._gaps[first:last] = [(start, end)]
