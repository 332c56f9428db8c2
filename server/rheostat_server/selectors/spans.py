"""Sets of positions as spans: half-open [start, end), ascending, disjoint, not touching.

So equal sets are equal tuples. A prompt may have a hundred thousand spans, so functions that
iterate over all of them use numpy.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine import OPEN_END, Spans

Positions = npt.NDArray[np.integer]

_START, _END = itemgetter(0), itemgetter(1)

_FEW = 32
"""Up to this many spans, plain Python is faster than numpy."""


class Edges(NamedTuple):
    """The starts and ends of spans."""

    starts: npt.NDArray[np.int64]
    """[spans]."""
    ends: npt.NDArray[np.int64]
    """[spans]: one past the last position."""

    @property
    def spans(self) -> Spans:
        """The edges as spans."""
        return tuple(zip(self.starts.tolist(), self.ends.tolist(), strict=True))


def edges(spans: Sequence[tuple[int, int]]) -> Edges:
    """The edges of spans."""
    flat = np.fromiter(chain.from_iterable(spans), np.int64, 2 * len(spans))
    return Edges(flat[::2], flat[1::2])


def united(spans: Iterable[tuple[int, int]]) -> Spans:
    """The union of spans in any order. Empty spans are removed."""
    nonempty = [span for span in spans if span[0] < span[1]]
    if len(nonempty) > _FEW:
        return _united(edges(nonempty)).spans
    merged: list[tuple[int, int]] = []
    for start, end in sorted(nonempty):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


def joined(spans: Spans, others: Sequence[tuple[int, int]]) -> Spans:
    """The union of spans with others, which may be in any order."""
    if not others:
        return spans
    before = bisect_left(spans, min(map(_START, others)), key=_END)
    return spans[:before] + united([*spans[before:], *others])


def subtracted(spans: Spans, holes: Spans) -> Spans:
    """The spans without the holes."""
    if not spans or not holes:
        return spans
    around = (0, *(edge for hole in holes for edge in hole), OPEN_END)
    kept = edges(tuple(zip(around[::2], around[1::2], strict=True)))
    return _common(edges(spans), kept).spans


def clipped(spans: Spans, start: int, end: int) -> Spans:
    """The part of the spans in [start, end)."""
    if len(spans) == 1:  # mostly
        ((low, high),) = spans
        low, high = max(low, start), min(high, end)
        return ((low, high),) if low < high else ()
    first = bisect_right(spans, start, key=_END)
    past = bisect_left(spans, end, key=_START)
    if first >= past or start >= end:
        return ()
    part = spans[first:past]
    (low, _), (_, high) = part[0], part[-1]
    if low >= start and high <= end:
        return part
    if len(part) == 1:
        return ((max(low, start), min(high, end)),)
    head, tail = (max(low, start), part[0][1]), (part[-1][0], min(high, end))
    return (head, *part[1:-1], tail)


def runs(positions: Positions) -> Spans:
    """The spans of ascending, unique positions."""
    if not len(positions):
        return ()
    start, end = int(positions[0]), int(positions[-1]) + 1
    if end - start == len(positions):
        return ((start, end),)
    breaks = np.flatnonzero(np.diff(positions) != 1)
    first = positions[np.concatenate(([0], breaks + 1))]
    last = positions[np.concatenate((breaks, [len(positions) - 1]))]
    return tuple(zip(first.tolist(), (last + 1).tolist(), strict=True))


def length(spans: Spans) -> int:
    """The number of positions of spans."""
    return sum(end - start for start, end in spans)


def _united(some: Edges) -> Edges:
    order = np.argsort(some.starts, kind="stable")
    starts, reached = some.starts[order], np.maximum.accumulate(some.ends[order])
    gaps = np.flatnonzero(starts[1:] > reached[:-1])
    return Edges(
        starts[np.concatenate(([0], gaps + 1))],
        reached[np.concatenate((gaps, [len(starts) - 1]))],
    )


def _common(left: Edges, right: Edges) -> Edges:
    """The intersection; empty spans of `right` vanish."""
    first = np.searchsorted(right.ends, left.starts, side="right")
    past = np.searchsorted(right.starts, left.ends, side="left")
    overlaps = np.maximum(past - first, 0)  # spans of `right` that each span of `left` meets
    own = np.repeat(np.arange(len(overlaps)), overlaps)
    other = np.arange(len(own)) + np.repeat(first - (np.cumsum(overlaps) - overlaps), overlaps)
    starts = np.maximum(left.starts[own], right.starts[other])
    ends = np.minimum(left.ends[own], right.ends[other])
    nonempty = starts < ends
    return Edges(starts[nonempty], ends[nonempty])
