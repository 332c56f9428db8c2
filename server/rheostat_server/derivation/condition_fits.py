"""Conditions that tell two sets of prompts apart: directions, thresholds and how well they do.

Everything is computed in float64. A score is what a probe reads of a prompt, pooled: a coordinate
along a unit direction, or a cosine, of the last row or averaged over the rows. The mean of
coordinates is the coordinate of the mean, and the mean of cosines that of the mean of the rows'
unit vectors. So a prompt's `PooledRows` suffice for every direction.

Held-out prompts are judged by a direction and a threshold that were made without them, because both
fit their own prompts even if the sets do not differ.

Source: the condition vector and its threshold follow Lee et al., "Programming Refusal with
Conditional Activation Steering" (2024).
"""

from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine import Normalise, Pool
from rheostat_server.derivation.contrast import first_principal_component
from rheostat_wire.dtypes import FloatArray

Wide = npt.NDArray[np.float64]

_FOLDS = 10
"""The most folds of the cross-validation."""

_LARGEST = 1e9
"""Larger margins come from rounding errors, because the scores of each set are equal."""


class Made(Enum):
    """How a direction is made of pooled rows p and n."""

    DIFFERENCE_OF_MEANS = auto()
    """mean(p) - mean(n)."""
    PRINCIPAL_COMPONENT = auto()
    """The first principal component of all rows about the middle of the two means."""


class PooledRows(NamedTuple):
    """What is kept of the prompts of a set at a site: [prompts, width] each."""

    last: FloatArray
    """The last rows."""
    mean: FloatArray | None = None
    """The means of the rows. None: no condition pools them."""
    unit_mean: FloatArray | None = None
    """The means of the rows, each divided by its norm."""

    def pooled(self, pool: Pool) -> Wide:
        """The rows of which directions are made."""
        rows = self.last if pool is Pool.LAST else self.mean
        assert rows is not None
        return rows.astype(np.float64)

    def scored(self, pool: Pool, normalise: Normalise) -> Wide:
        """The rows whose coordinate along a unit direction is a prompt's score."""
        if normalise is not Normalise.COSINE:
            return self.pooled(pool)
        if pool is Pool.LAST:
            rows = self.last.astype(np.float64)
            norms = np.linalg.norm(rows, axis=1, keepdims=True)
            units: Wide = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)
            return units
        assert self.unit_mean is not None
        return self.unit_mean.astype(np.float64)


class Threshold(NamedTuple):
    """A bound, and the side on which a condition holds."""

    bound: float
    below: bool

    def holds(self, scores: Wide) -> npt.NDArray[np.bool_]:
        """[n]: whether the condition holds of prompts with these scores."""
        return scores < self.bound if self.below else scores > self.bound


class Counts(NamedTuple):
    """How many prompts a condition judges, and how."""

    true_positive: int
    false_positive: int
    false_negative: int
    true_negative: int

    @property
    def f1(self) -> float:
        """2 tp / (2 tp + fp + fn)."""
        wrong = self.false_positive + self.false_negative
        return 2 * self.true_positive / (2 * self.true_positive + wrong)

    @property
    def accuracy(self) -> float:
        """The fraction that is judged right."""
        return (self.true_positive + self.true_negative) / sum(self)


class Fit(NamedTuple):
    """A condition at a site, and how well it tells the prompts apart."""

    pool: Pool
    direction: int
    """Index among the directions that were made, followed by those that were given."""
    normalise: Normalise
    row: FloatArray
    """[width]: the direction, of norm 1 if it was made."""
    threshold: Threshold
    f1: float
    margin: float
    held_out: Counts | None
    """None: not defined."""

    @property
    def rank(self) -> tuple[float, float]:
        """A larger one is better."""
        return (self.f1 if self.held_out is None else self.held_out.f1), self.margin


def fits_of(
    positive: PooledRows,
    negative: PooledRows,
    pools: tuple[Pool, ...],
    made: tuple[Made, ...],
    given: tuple[FloatArray, ...],
    normalises: tuple[Normalise, ...],
) -> Iterator[Fit]:
    """The conditions at one site, by pool, direction and normalisation.

    Args:
        positive: the prompts of which the conditions should hold.
        negative: those of which they should not.
        pools: how a prompt's readings become one.
        made: directions that are made of the prompts.
        given: further directions, [width] each; not zero.
        normalises: how a row is read: UNIT or COSINE.

    Returns:
        Without conditions whose direction is zero, or whose prompts all have one score.
    """
    for pool in pools:
        rows = positive.pooled(pool), negative.pooled(pool)
        scored = {
            normalise: (positive.scored(pool, normalise), negative.scored(pool, normalise))
            for normalise in normalises
        }
        for index, make in enumerate([*map(_maker, made), *map(_constant, given)]):
            row = make(*rows).astype(np.float32)
            folds = _folds(rows, make) if row.any() else []
            for normalise in normalises if row.any() else ():
                fit = _fit(scored[normalise], row, folds)
                if fit is not None:
                    yield Fit(pool, index, normalise, row, *fit)


_Make = Callable[[Wide, Wide], Wide]
_Sets = tuple[Wide, Wide]


def _maker(made: Made) -> _Make:
    def make(p: Wide, n: Wide) -> Wide:
        difference: Wide = p.mean(axis=0) - n.mean(axis=0)
        direction = difference
        if made is Made.PRINCIPAL_COMPONENT:
            middle = (p.mean(axis=0) + n.mean(axis=0)) / 2
            direction = first_principal_component(np.concatenate([p, n]) - middle, difference)
        norm = np.linalg.norm(direction)
        return direction / norm if norm > 0 else direction

    return make


def _constant(row: FloatArray) -> _Make:
    return lambda p, n: row.astype(np.float64)


class _Fold(NamedTuple):
    """Prompts that are held out, and the direction that is made of all others."""

    held: tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]
    """Of each set, [n]."""
    direction: Wide


def _folds(rows: _Sets, make: _Make) -> list[_Fold]:
    """The parts of the prompts; none if a set cannot be cut, or a direction is zero."""
    count = min(_FOLDS, *map(len, rows))
    folds = []
    for fold in range(count if count > 1 else 0):
        p, n = (np.arange(len(set_rows)) % count == fold for set_rows in rows)
        folds.append(_Fold((p, n), make(rows[0][~p], rows[1][~n])))
    return folds if all(fold.direction.any() for fold in folds) else []


def _fit(
    scored: _Sets, row: FloatArray, folds: Sequence[_Fold]
) -> tuple[Threshold, float, float, Counts | None] | None:
    """Threshold, F1, margin and held-out counts of a direction; None if all scores are equal."""
    on_p, on_n = (_scores(set_rows, row) for set_rows in scored)
    threshold = best_threshold(on_p, on_n)
    if threshold is None:
        return None
    f1 = _counts(threshold, on_p, on_n).f1
    return threshold, f1, _margin(threshold, on_p, on_n), _held_out(scored, folds)


def _scores(rows: Wide, direction: FloatArray | Wide) -> Wide:
    wide = direction.astype(np.float64)
    return rows @ (wide / np.linalg.norm(wide))


def best_threshold(on_p: Wide, on_n: Wide) -> Threshold | None:
    """The middle of the gap between scores with the largest F1, the widest of equal ones.

    None if all scores are equal, or differ by less than float32 can say.
    """
    below = bool(on_p.mean() < on_n.mean())
    sign = -1.0 if below else 1.0
    scores = np.concatenate([on_p, on_n]) * sign
    positive = np.arange(len(scores)) < len(on_p)
    order = np.argsort(scores, kind="stable")
    scores, positive = scores[order], positive[order]
    middles = ((scores[1:] + scores[:-1]) / 2).astype(np.float32)
    gaps = np.where((scores[:-1] < middles) & (middles < scores[1:]), np.diff(scores), 0.0)
    missed = np.cumsum(positive)[:-1]
    hits = len(on_p) - missed
    above = len(scores) - np.arange(1, len(scores))
    f1 = np.where(gaps > 0, 2 * hits / (above + len(on_p)), -1.0)
    if len(f1) == 0 or f1.max() < 0:
        return None
    best = max(np.flatnonzero(f1 == f1.max()), key=lambda at: float(gaps[at]))
    return Threshold(sign * float(middles[best]), below)


def _counts(threshold: Threshold, on_p: Wide, on_n: Wide) -> Counts:
    tp, fp = (int(threshold.holds(scores).sum()) for scores in (on_p, on_n))
    return Counts(tp, fp, len(on_p) - tp, len(on_n) - fp)


def _margin(threshold: Threshold, on_p: Wide, on_n: Wide) -> float:
    distance = float(on_p.min() - on_n.max())
    if threshold.below:
        distance = float(on_n.min() - on_p.max())
    squares = ((on_p - on_p.mean()) ** 2).sum() + ((on_n - on_n.mean()) ** 2).sum()
    deviation = float(np.sqrt(squares / max(1, len(on_p) + len(on_n) - 2)))
    if deviation * _LARGEST <= abs(distance):
        return float(np.copysign(_LARGEST, distance))
    return distance / deviation


def _held_out(scored: _Sets, folds: Sequence[_Fold]) -> Counts | None:
    total = np.zeros(4, np.int64)
    for (held_p, held_n), direction in folds:
        p, n = (_scores(set_rows, direction) for set_rows in scored)
        threshold = best_threshold(p[~held_p], n[~held_n])
        if threshold is None:
            return None
        total += np.array(_counts(threshold, p[held_p], n[held_n]))
    return Counts(*total.tolist()) if folds else None
