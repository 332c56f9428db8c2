"""Summaries of a watch's readings: for each column and sample their number, mean and largest.

Invariant: a step costs a few numpy calls, for any number of samples.

Why steps with few rows wait
    With few rows, these calls take far longer than their arithmetic. So the rows of several small
    steps are added together, at the latest when a summary is needed. They must first be sorted by
    sample, which takes about a microsecond for each row. So larger steps are added one by one.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_FIRST_SLOTS = 64

_FEW_ROWS = 16
"""A step with fewer rows waits for others. A larger step takes less time alone: with 64 columns,
128 rows take 22 us alone, and 158 us if they are added together with those of another step."""

_WAITING_ROWS = 256
"""Waiting rows are added once there are this many."""

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


class Summary(NamedTuple):
    """The summary of one sample."""

    readings: Int64
    """[columns]: the number of readings."""
    largest: Float32
    """[columns]; -inf without readings."""
    largest_at: Int64
    """[columns]: the first position of the largest reading."""
    total: npt.NDArray[np.float64]
    """[columns]: the sum of the readings."""


class _Step(NamedTuple):
    """The readings of a step; see `Summaries.add`."""

    slots: Int64
    firsts: Int64
    counts: Int64
    values: Float32


class Summaries:
    """The summaries of all samples that a watch reads. Each has a slot."""

    def __init__(self, columns: int) -> None:
        """No sample has a slot.

        Args:
            columns: the number of columns.
        """
        self._columns = columns
        self._free: list[int] = []
        """Cleared slots."""
        self._released: list[int] = []
        """Slots that still have old readings. They are cleared together once no slot is free."""
        self._whole = np.zeros(0, np.int64)
        """[slots]: number of positions in steps without NaN, where all columns have readings."""
        self._count = np.zeros((0, columns), np.int64)
        """[slots, columns]: number of all other readings."""
        self._largest = np.zeros((0, columns), np.float32)
        self._largest_at = np.zeros((0, columns), np.int64)
        self._total = np.zeros((0, columns), np.float64)
        self._waiting: list[_Step] = []
        """Steps that were not added."""
        self._waiting_rows = 0

    def acquire(self) -> int:
        """Takes a slot without readings."""
        if not self._free:
            if not self._released:
                self._grow()
            self._clear()
        return self._free.pop()

    def release(self, slot: int) -> Summary:
        """Frees a slot; returns its summary."""
        self._add_waiting()
        summary = Summary(
            self._count[slot] + self._whole[slot],
            self._largest[slot].copy(),
            self._largest_at[slot].copy(),
            self._total[slot].copy(),
        )
        self._released.append(slot)
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
        if len(values) >= _FEW_ROWS:
            self._add_waiting()
        self._waiting.append(_Step(slots, firsts, counts, values))
        self._waiting_rows += len(values)
        if len(values) >= _FEW_ROWS or self._waiting_rows >= _WAITING_ROWS:
            self._add_waiting()

    def _add_waiting(self) -> None:
        """Adds the steps that wait."""
        steps, self._waiting = self._waiting, []
        self._waiting_rows = 0
        if not steps:
            return
        slots, firsts, counts, values = steps[0]
        if len(steps) > 1:
            slots, firsts, counts, values = map(np.concatenate, zip(*steps, strict=True))
        elif (rows := int(counts[0])) > 1 and rows <= len(slots) and (counts == rows).all():
            # Whole steps that were sent together are added one by one: four steps of 256 samples
            # take 180 us this way, and 740 us all at once.
            each, ones = values.reshape(len(slots), rows, -1), np.ones_like(counts)
            for row in range(rows):
                self._add_rows(slots, ones, firsts + row, each[:, row])
            return
        positions = firsts
        if len(values) > len(slots):
            positions = np.repeat(firsts - _begins(counts), counts) + np.arange(len(values))
        if len(steps) > 1:
            slots = np.repeat(slots, counts)
            order = np.argsort(slots, kind="stable")
            slots, positions, values = slots[order], positions[order], values[order]
            slots, counts = np.unique(slots, return_counts=True)
        self._add_rows(slots, counts, positions, values)

    def _add_rows(self, slots: Int64, counts: Int64, positions: Int64, values: Float32) -> None:
        """Adds readings.

        Args:
            slots: [n]: the slot of each sample, all different.
            counts: [n]: the number of its rows.
            positions: [sum of counts]: the positions of the rows, ascending in each sample.
            values: [sum of counts, columns]: as in `add`.
        """
        unread = np.isnan(values)
        filled = values
        if unread.any():
            filled = np.where(unread, -np.inf, values).astype(np.float32, copy=False)
            values = np.where(unread, 0, values).astype(np.float32, copy=False)
            self._count[slots] += _sums(~unread, counts, np.int64)
        else:
            self._whole[slots] += counts
        self._total[slots] += _sums(values, counts, np.float64)
        self._add_largest(slots, counts, positions, filled)

    def _add_largest(self, slots: Int64, counts: Int64, positions: Int64, values: Float32) -> None:
        """Updates the largest readings. `values` is -inf where nothing was read."""
        largest = values
        if len(values) > len(slots):
            largest = np.maximum.reduceat(values, _begins(counts))
        before = self._largest.take(slots, axis=0)
        higher = largest > before
        if not higher.any():
            return
        at = positions[:, None]
        if len(values) > len(slots):
            at = positions[_first_of_largest(values, largest, counts)]
        self._largest[slots] = np.where(higher, largest, before)
        self._largest_at[slots] = np.where(higher, at, self._largest_at.take(slots, axis=0))

    def _grow(self) -> None:
        before = len(self._count)
        after = max(_FIRST_SLOTS, 2 * before)
        for name in ("_whole", "_count", "_largest", "_largest_at", "_total"):
            old = getattr(self, name)
            new = np.zeros((after, *old.shape[1:]), old.dtype)
            new[:before] = old
            setattr(self, name, new)
        self._released += range(after - 1, before - 1, -1)

    def _clear(self) -> None:
        """Clears all released slots and makes them free."""
        slots, self._released = self._released, []
        self._whole[slots], self._count[slots] = 0, 0
        self._total[slots], self._largest_at[slots] = 0.0, 0
        self._largest[slots] = -np.inf
        self._free = slots


def _begins(counts: Int64) -> Int64:
    """[n]: the first row of each sample, from their numbers of rows."""
    begins: Int64 = np.cumsum(counts) - counts
    return begins


def _sums(values: npt.NDArray[Any], counts: Int64, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """[n, columns]: the sum of each sample's rows."""
    if len(values) == len(counts):
        return values
    sums: npt.NDArray[Any] = np.add.reduceat(values, _begins(counts), dtype=dtype)
    return sums


def _first_of_largest(values: Float32, largest: Float32, counts: Int64) -> Int64:
    """[n, columns]: the first row of each sample that has its largest."""
    rows = np.arange(len(values), dtype=np.int32)[:, None]
    candidates = np.where(values == np.repeat(largest, counts, axis=0), rows, np.int32(len(values)))
    first: Int64 = np.minimum.reduceat(candidates, _begins(counts))
    return first
