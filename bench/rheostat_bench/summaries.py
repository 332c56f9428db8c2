"""What repeated measurements of some arms come to, beside those of the first arm.

Invariant: arms are pooled over the starts, and every repeat counts alike; the starts' own medians
serve only to say how far apart they are.
"""

import math
import statistics
from collections.abc import Iterable, Sequence

Times = dict[str, dict[str, list[list[float]]]]
"""Milliseconds by arm, batch size, start and repeat."""

Table = dict[str, dict[str, dict[str, float]]]
"""Figures by arm and batch size."""

Figures = dict[str, dict[str, float]]
"""Figures by arm."""


def empty(arms: Iterable[str], batches: Sequence[int], starts: int) -> Times:
    """Room for the times of these arms."""
    return {arm: {str(batch): [[] for _ in range(starts)] for batch in batches} for arm in arms}


def summary(times: Times) -> Table:
    """Median over all starts, least and most, and the ratio of the median to the first arm's."""
    table: Table = {}
    reference = next(iter(times.values()))
    for arm, by_batch in times.items():
        for batch, starts in by_batch.items():
            values = pooled(starts)
            median = statistics.median(values)
            medians = [statistics.median(start) for start in starts]
            table.setdefault(arm, {})[batch] = {
                "median_ms": median,
                "min_ms": min(values),
                "max_ms": max(values),
                "to_stock": median / statistics.median(pooled(reference[batch])),
                "between_starts": max(medians) / min(medians),
            }
    return table


def pooled(starts: Sequence[Sequence[float]]) -> list[float]:
    """The repeats of all starts."""
    return [value for start in starts for value in start]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The quartiles of some measurements, between which half of them lie; linear interpolation."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share of all values does not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
