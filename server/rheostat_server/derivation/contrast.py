"""The direction between two sets of rows, and how well it separates them. Pure arithmetic.

Everything is computed in float64. The separation is cross-validated: rows are projected on a
direction that was computed without them. Otherwise, a direction in a wide stream fits its own rows
even if the sets do not differ. Two sets of n rows of isotropic noise would seem to be
sqrt(2 * width / n) standard deviations apart.

Sources: the difference of means is that of Rimsky et al., "Steering Llama 2 via Contrastive
Activation Addition" (2023); the principal component of pairwise differences that of Zou et al.,
"Representation Engineering" (2023); the separation is Cohen's d with the pooled standard deviation
(Cohen, "Statistical Power Analysis for the Behavioral Sciences", 1988).
"""

from enum import Enum, auto
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_wire.dtypes import FloatArray

_Wide = npt.NDArray[np.float64]

_FOLDS = 10
"""The most folds of the cross-validation."""

_LARGEST = 1e9
"""Larger separations come from rounding errors, because the rows of each set are equal."""


class Method(Enum):
    """How a direction is computed from rows."""

    DIFFERENCE_OF_MEANS = auto()
    """mean(p) - mean(n)."""
    PRINCIPAL_COMPONENT = auto()
    """Unit direction of the largest sum of squares of p[i] - n[i]; zero if all of them are."""


class Direction(NamedTuple):
    """A direction and its statistics."""

    row: FloatArray
    """[width]."""
    norm: float
    """L2 norm of `row`."""
    explained: float
    """Fraction, 0 to 1, of the differences' sum of squares along it; 0 if there are none."""
    separation: float | None
    """Cohen's d of held-out rows; None if it is not defined."""


def contrast(
    positive: FloatArray,  # [p, width]
    negative: FloatArray,  # [n, width]; p rows for PRINCIPAL_COMPONENT
    method: Method,
) -> Direction:
    """The direction from `negative` to `positive`, each of one row or more."""
    p, n = positive.astype(np.float64), negative.astype(np.float64)
    exact = _direction(p, n, method)
    row = exact.astype(np.float32)
    norm = float(np.linalg.norm(row.astype(np.float64)))
    length = float(np.linalg.norm(exact))
    if length == 0:
        return Direction(row, norm, 0.0, None)
    unit = exact / length
    if method is Method.DIFFERENCE_OF_MEANS:
        explained = _explained_of_all_pairs(p, n, unit)
    else:
        explained = min(1.0, _squares((p - n) @ unit) / _squares(p - n))
    return Direction(row, norm, explained, _separation(p, n, method))


def _direction(p: _Wide, n: _Wide, method: Method) -> _Wide:
    difference: _Wide = p.mean(axis=0) - n.mean(axis=0)
    if method is Method.DIFFERENCE_OF_MEANS:
        return difference
    return first_principal_component(p - n, difference)


def first_principal_component(
    differences: _Wide,  # [n, width]
    mean: _Wide,  # [width]
) -> _Wide:
    """The first right singular vector, through the smaller of the two Gram matrices."""
    count, width = differences.shape
    component: _Wide
    if count <= width:
        _, vectors = np.linalg.eigh(differences @ differences.T)
        component = differences.T @ vectors[:, -1]
    else:
        _, vectors = np.linalg.eigh(differences.T @ differences)
        component = vectors[:, -1] if differences.any() else np.zeros(width)
    length = np.linalg.norm(component)
    if length == 0:
        return component
    component /= length
    towards = float(mean @ component) or float(component[np.argmax(np.abs(component))])
    return component if towards > 0 else -component


def _explained_of_all_pairs(p: _Wide, n: _Wide, unit: _Wide) -> float:
    """The fraction of p[i] - n[j] over all i and j along `unit`, without making the pairs.

    Their sum of squares is |n| S(p) + |p| S(n) + |p| |n| |mean(p) - mean(n)|^2, with S a set's sum
    of squares about its mean.
    """
    p_mean, n_mean = p.mean(axis=0), n.mean(axis=0)
    within_p, within_n, between = p - p_mean, n - n_mean, p_mean - n_mean
    along = len(n) * _squares(within_p @ unit) + len(p) * _squares(within_n @ unit)
    along += len(p) * len(n) * float(between @ unit) ** 2
    total = len(n) * _squares(within_p) + len(p) * _squares(within_n)
    total += len(p) * len(n) * _squares(between)
    return min(1.0, along / total)


def _separation(p: _Wide, n: _Wide, method: Method) -> float | None:
    """Cohen's d of the rows' scores; see `DerivedRow.separation` in steering_service.proto."""
    folds = min(_FOLDS, len(p), len(n))
    if folds < 2:
        return None
    on_p, on_n = np.empty(len(p)), np.empty(len(n))
    for fold in range(folds):
        held_p, held_n = (np.arange(len(rows)) % folds == fold for rows in (p, n))
        rest_p, rest_n = p[~held_p], n[~held_n]
        row = _direction(rest_p, rest_n, method)
        length = np.linalg.norm(row)
        if length == 0:
            return None
        middle = (rest_p.mean(axis=0) + rest_n.mean(axis=0)) / 2
        on_p[held_p] = (p[held_p] - middle) @ row / length
        on_n[held_n] = (n[held_n] - middle) @ row / length
    distance = float(on_p.mean() - on_n.mean())
    within = _squares(on_p - on_p.mean()) + _squares(on_n - on_n.mean())
    deviation = float(np.sqrt(within / (len(p) + len(n) - 2)))
    if deviation * _LARGEST <= abs(distance):
        return None
    return distance / deviation


def _squares(values: _Wide) -> float:
    return float(np.vdot(values, values))
