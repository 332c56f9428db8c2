"""Conditions that tell two sets of prompts apart: directions, thresholds and how well they do.

Everything is computed in float64. A score is one number that a probe reads of a prompt. A number of
a row is its coordinate along a unit direction, its cosine with it, or the cosine of the row and of
its projection on the direction. `Score` says whether the row is the last or the mean one, or
whether the numbers of all rows are averaged. The mean of coordinates is the coordinate of the mean,
and the mean of cosines that of the mean of the rows' unit vectors. So a prompt's `PooledRows`
suffice for every direction. The mean of projected cosines would need all rows, and is left out.

Held-out prompts are judged by a direction and a threshold that were made without them, because both
fit their own prompts even if the sets do not differ.

Source: the condition vector and its threshold follow Lee et al., "Programming Refusal with
Conditional Activation Steering" (2024). Their number is the projected cosine of the mean row.
"""

from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine import Normalise
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


class Score(Enum):
    """How the rows of a prompt become one number."""

    LAST = auto()
    """The number of the last row."""
    MEAN = auto()
    """The mean of the numbers of all rows."""
    OF_MEAN_ROW = auto()
    """The number of the mean of all rows."""

    def reads(self, normalise: Normalise) -> bool:
        """Whether this number follows from a prompt's `PooledRows`."""
        return self is not Score.MEAN or normalise is not Normalise.PROJECTED_COSINE


class PooledRows(NamedTuple):
    """What is kept of the prompts of a set at a site: [prompts, width] each."""

    last: FloatArray
    """The last rows."""
    mean: FloatArray | None = None
    """The means of the rows. None: no condition reads them."""
    unit_mean: FloatArray | None = None
    """The means of the rows, each divided by its norm."""

    def pooled(self, score: Score) -> Wide:
        """The rows of which directions are made."""
        rows = self.last if score is Score.LAST else self.mean
        assert rows is not None
        return rows.astype(np.float64)

    def scored(self, score: Score, normalise: Normalise) -> Wide:
        """The rows from which `_scores` makes the prompts' scores."""
        if normalise is Normalise.COSINE and score is Score.MEAN:
            assert self.unit_mean is not None
            return self.unit_mean.astype(np.float64)
        rows = self.pooled(score)
        return _units(rows) if normalise is Normalise.COSINE else rows


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

    score: Score
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
        """A larger one is better.

        The held-out F1 judges other thresholds than this one. With few prompts, it can be large for
        a condition that always holds.
        """
        f1 = self.f1 if self.held_out is None else min(self.f1, self.held_out.f1)
        return f1, self.margin


def fits_of(
    positive: PooledRows,
    negative: PooledRows,
    scores: tuple[Score, ...],
    made: tuple[Made, ...],
    given: tuple[FloatArray, ...],
    normalises: tuple[Normalise, ...],
) -> Iterator[Fit]:
    """The conditions at one site, by score, direction and normalisation.

    Args:
        positive: the prompts of which the conditions should hold.
        negative: those of which they should not.
        scores: how the rows of a prompt become one number.
        made: directions that are made of the prompts.
        given: further directions, [width] each; not zero.
        normalises: how a row is read: not NONE.

    Returns:
        Without conditions whose direction is zero, whose prompts all have one score, or whose
        number does not follow from the rows (`Score.reads`).
    """
    for score in scores:
        rows = positive.pooled(score), negative.pooled(score)
        scored = {
            normalise: (positive.scored(score, normalise), negative.scored(score, normalise))
            for normalise in normalises
            if score.reads(normalise)
        }
        for index, make in enumerate([*map(_maker, made), *map(_constant, given)]):
            row = make(*rows).astype(np.float32)
            folds = _folds(rows, make) if row.any() else []
            for normalise in scored if row.any() else ():
                fit = _fit(_Scored(*scored[normalise], normalise), row, folds)
                if fit is not None:
                    yield Fit(score, index, normalise, row, *fit)


_Make = Callable[[Wide, Wide], Wide]
_Sets = tuple[Wide, Wide]


class _Scored(NamedTuple):
    """Rows of which scores are made, and how."""

    positive: Wide
    negative: Wide
    normalise: Normalise

    def along(self, direction: FloatArray | Wide) -> _Sets:
        """The scores of both sets with a direction, [n] each."""
        wide = direction.astype(np.float64)
        unit = wide / np.linalg.norm(wide)
        score = np.matmul if self.signed else _projected_cosines
        return score(self.positive, unit), score(self.negative, unit)

    @property
    def signed(self) -> bool:
        """Whether scores change their sign with the direction's."""
        return self.normalise is not Normalise.PROJECTED_COSINE


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
    scored: _Scored, row: FloatArray, folds: Sequence[_Fold]
) -> tuple[Threshold, float, float, Counts | None] | None:
    """Threshold, F1, margin and held-out counts of a direction; None if all scores are equal."""
    on_p, on_n = scored.along(row)
    threshold = best_threshold(on_p, on_n, signed=scored.signed)
    if threshold is None:
        return None
    f1 = _counts(threshold, on_p, on_n).f1
    return threshold, f1, _margin(threshold, on_p, on_n), _held_out(scored, folds)


def _units(rows: Wide) -> Wide:
    """Rows divided by their norms. A row of zeros stays."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    units: Wide = np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)
    return units


def _projected_cosines(rows: Wide, unit: Wide) -> Wide:
    """[n]: the cosine of each row x and p = tanh((x.u) u); 0 if x or p is zero."""
    projected = np.tanh(np.outer(rows @ unit, unit))
    along = np.einsum("nw,nw->n", rows, projected)
    norms = np.linalg.norm(rows, axis=1) * np.linalg.norm(projected, axis=1)
    cosines: Wide = np.divide(along, norms, out=np.zeros_like(along), where=norms > 0)
    return cosines


def best_threshold(on_p: Wide, on_n: Wide, *, signed: bool = True) -> Threshold | None:
    """The middle of the gap between scores with the largest F1, the widest of equal ones.

    Args:
        on_p: [p]: the scores of prompts of which the condition should hold.
        on_n: [n]: those of the others.
        signed: whether the condition can only hold on the side on which the mean of `on_p` lies.
            Otherwise both sides are tried, and this one counts if they are equal.

    Returns:
        None if all scores are equal, or differ by less than float32 can say.
    """
    below = bool(on_p.mean() < on_n.mean())
    sides = (below,) if signed else (below, not below)
    found = [best for side in sides if (best := _best_on_side(on_p, on_n, below=side))]
    return max(found, key=lambda best: (best.f1, best.gap)).threshold if found else None


class _Best(NamedTuple):
    """The best threshold on a side."""

    f1: float
    gap: float
    threshold: Threshold


def _best_on_side(on_p: Wide, on_n: Wide, *, below: bool) -> _Best | None:
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
    threshold = Threshold(sign * float(middles[best]), below)
    return _Best(float(f1[best]), float(gaps[best]), threshold)


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


def _held_out(scored: _Scored, folds: Sequence[_Fold]) -> Counts | None:
    total = np.zeros(4, np.int64)
    for (held_p, held_n), direction in folds:
        p, n = scored.along(direction)
        threshold = best_threshold(p[~held_p], n[~held_n], signed=scored.signed)
        if threshold is None:
            return None
        total += np.array(_counts(threshold, p[held_p], n[held_n]))
    return Counts(*total.tolist()) if folds else None
