"""What each column of a watch has read of each sample: number of readings, mean, largest.

Invariant: a step costs a few numpy calls, for any number of samples.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_FIRST_SLOTS = 64

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


class Summary(NamedTuple):
    """What the columns have read of a sample."""

    readings: Int64
    """[columns]: the number of readings."""
    largest: Float32
    """[columns]; -inf without readings."""
    largest_at: Int64
    """[columns]: the first position of the largest reading."""
    total: npt.NDArray[np.float64]
    """[columns]: the sum of the readings."""


class Summaries:
    """The summaries of all samples that a watch reads. Each has a slot."""

    def __init__(self, columns: int) -> None:
        """No sample has a slot.

        Args:
            columns: the number of columns.
        """
        self._columns = columns
        self._free: list[int] = []
        self._count = np.zeros((0, columns), np.int64)
        self._largest = np.zeros((0, columns), np.float32)
        self._largest_at = np.zeros((0, columns), np.int64)
        self._total = np.zeros((0, columns), np.float64)

    def acquire(self) -> int:
        """Takes a slot, which has read nothing."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._count[slot], self._total[slot], self._largest_at[slot] = 0, 0.0, 0
        self._largest[slot] = -np.inf
        return slot

    def release(self, slot: int) -> Summary:
        """Frees a slot; returns what was read."""
        summary = Summary(
            self._count[slot].copy(),
            self._largest[slot].copy(),
            self._largest_at[slot].copy(),
            self._total[slot].copy(),
        )
        self._free.append(slot)
        return summary

    def add(self, slots: Int64, firsts: Int64, counts: Int64, values: Float32) -> None:
        """Adds the readings of a step.

        Args:
            slots: [n]: the slot of each sample, all different.
            firsts: [n]: its first position.
            counts: [n]: the number of its rows, at least 1.
            values: [sum of counts, columns]: the rows of the samples, one after the other. NaN
                where nothing was read.
        """
        if not len(slots) or not self._columns:
            return
        read = ~np.isnan(values)
        positions = np.repeat(firsts, counts)
        if len(positions) > len(slots):
            begins = np.cumsum(counts) - counts
            positions += np.arange(len(positions)) - np.repeat(begins, counts)
        else:
            begins = np.arange(len(slots))
        filled = np.where(read, values, -np.inf).astype(np.float32, copy=False)
        largest = np.maximum.reduceat(filled, begins)
        at_largest = read & (filled == np.repeat(largest, counts, axis=0))
        places = np.where(at_largest, positions[:, None], np.iinfo(np.int64).max)
        first_place = np.minimum.reduceat(places, begins)
        higher = largest > self._largest[slots]
        self._largest_at[slots] = np.where(higher, first_place, self._largest_at[slots])
        self._largest[slots] = np.where(higher, largest, self._largest[slots])
        self._count[slots] += np.add.reduceat(read.astype(np.int64), begins)
        self._total[slots] += np.add.reduceat(np.where(read, values, 0.0), begins, dtype=np.float64)

    def _grow(self) -> None:
        before = len(self._count)
        after = max(_FIRST_SLOTS, 2 * before)
        for name in ("_count", "_largest", "_largest_at", "_total"):
            old = getattr(self, name)
            new = np.zeros((after, self._columns), old.dtype)
            new[:before] = old
            setattr(self, name, new)
        self._free += range(after - 1, before - 1, -1)
