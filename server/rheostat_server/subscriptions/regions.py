"""Disjoint regions of one stretch of memory, taken first fit.

Invariants: regions never overlap, and each stays until it is given back; what is given back can be
taken again, joined with the free room beside it. The lowest room that suffices is taken, so that
memory beyond what is needed at a time is never touched.
"""

from bisect import bisect

_ALIGNMENT = 4096
"""Regions begin at multiples of it, a page."""


class Regions:
    """Which parts of [start, end) are taken."""

    def __init__(self, start: int, end: int) -> None:
        """All of it is free; both are multiples of a page."""
        self._start = start
        self._gaps = [(start, end)]
        self._taken: dict[int, int] = {}

    @property
    def idle(self) -> bool:
        """Whether none is taken."""
        return not self._taken

    def take(self, size: int) -> int | None:
        """Where a region of so many bytes begins, at least 1; None where there is no room."""
        whole = -(-size // _ALIGNMENT) * _ALIGNMENT
        for index, (start, end) in enumerate(self._gaps):
            if whole <= end - start:
                self._taken[start] = start + whole
                self._gaps[index : index + 1] = [(start + whole, end)] * (whole < end - start)
                return start
        return None

    def give_back(self, start: int) -> None:
        """Frees the region that begins there.

        Raises:
            KeyError: none does.
        """
        end = self._taken.pop(start)
        index = bisect(self._gaps, (start, end))
        first = last = index
        if index and self._gaps[index - 1][1] == start:
            first, start = index - 1, self._gaps[index - 1][0]
        if index < len(self._gaps) and self._gaps[index][0] == end:
            last, end = index + 1, self._gaps[index][1]
        self._gaps[first:last] = [(start, end)]
