"""The numbers of a sweep: grades of cells, of the unchanged prompts, and what batching alone does.

Every value is first averaged over a pair's noises, then made a recovered part if the grade says so,
then averaged over the pairs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_server.errors import NoContrast
from rheostat_server.sweeps.grades import Grade
from rheostat_wire.v1 import sweep_pb2

Values = npt.NDArray[np.float64]

Metrics = Sequence[float]
"""[grades]: the numbers of one prompt."""

_LEAST_CONTRAST = 1e-6
"""Difference of a metric, beside noise, from which on a part of it can be recovered."""


class PairScale(NamedTuple):
    """The metrics of a pair's unchanged prompts."""

    clean: Values
    """[grades]"""
    corrupt: Values
    """[grades]; NaN without a corrupt prompt."""
    base: Values
    """[grades]: of the prompt that cells are run in."""
    center: Values
    """[grades]: the mean of the first baselines, from which the others deviate."""
    repeats: list[Values]
    """Values of the baselines so far."""

    def largest(self) -> Values:
        """[grades]: largest deviation of a baseline."""
        deviations: Values = np.abs(np.array(self.repeats) - self.center).max(axis=0)
        return deviations

    def std(self) -> Values:
        """[grades]: standard deviation of the baselines."""
        if len(self.repeats) == 1:
            return np.zeros_like(self.base)
        std: Values = np.std(self.repeats, axis=0, ddof=1)
        return std


def pair_scale(
    repeats: list[Values],
    others: Sequence[Values],
    source: Values | None,
    *,
    into_clean: bool,
) -> PairScale:
    """The scale of a pair.

    Args:
        repeats: values of the first baselines; further ones may be appended.
        others: values of the prompt with each of the further noises.
        source: values of the prompt that rows come from; None if they are zeros or means.
        into_clean: whether cells are run in the clean prompt.
    """
    center = np.mean(repeats, axis=0)
    base = np.mean([center, *others], axis=0)
    if source is None:
        source = np.full_like(base, np.nan)
    clean, corrupt = (base, source) if into_clean else (source, base)
    return PairScale(clean, corrupt, base, center, repeats)


def check_contrast(scales: Sequence[PairScale], grades: Sequence[Grade]) -> None:
    """Checks that recovered parts have a meaning.

    Raises:
        NoContrast: the clean and the corrupt prompt of a pair grade alike.
    """
    for index, scale in enumerate(scales):
        largest = scale.largest()
        for number, grade in enumerate(grades):
            contrast = abs(scale.clean[number] - scale.corrupt[number])
            least = max(_LEAST_CONTRAST, largest[number])
            if grade.recovered and not contrast > least:
                raise NoContrast(
                    f"{grade.name} of the clean prompt is {scale.clean[number]:.6g}, of the "
                    f"corrupt one {scale.corrupt[number]:.6g}: they differ by no more than "
                    "repeated runs of one prompt, so nothing can be recovered",
                    field=f"pairs[{index}]",
                )


class Scores:
    """The values of all cells."""

    def __init__(self, known: Values, grades: Sequence[Grade]) -> None:
        """No cell is scored.

        Args:
            known: [cells]: the first grade of cells that an earlier call has scored; NaN for all
                others.
            grades: the grades.
        """
        self.values = np.full((len(known), len(grades)), np.nan)
        """[cells, grades]: of the cells that are scored here."""
        self._known = known
        none = np.empty(len(grades))
        self.base = none
        """[grades]: the grades of the unchanged prompts that cells are run in."""
        self.noise_limit = none
        """[grades]: the largest deviation of a baseline so far, averaged over the pairs."""
        self._recovered = np.array([grade.recovered for grade in grades])
        self._scales: Sequence[PairScale] = ()
        self._largest = none
        """[pairs, grades]: the largest deviation of a baseline so far."""
        self._zero = self._unit = none
        """[pairs, grades]: a grade is `(metric - zero) / unit`."""
        self._first_pair_scale: tuple[Metrics, Metrics] = (), ()
        """`_zero` and `_unit` of the first pair, as lists, for sweeps of one pair."""
        self._noise_lists: tuple[Metrics, Metrics] = (), ()
        """`base` and `noise_limit`, as lists."""

    def set_scales(self, scales: Sequence[PairScale]) -> None:
        """Sets the values of the unchanged prompts. No cell can be scored before."""
        self._scales = scales
        clean = np.array([scale.clean for scale in scales])
        corrupt = np.array([scale.corrupt for scale in scales])
        self._zero = np.where(self._recovered, corrupt, 0.0)
        self._unit = np.where(self._recovered, clean - corrupt, 1.0)
        self._first_pair_scale = self._zero[0].tolist(), self._unit[0].tolist()
        self.base = self._graded(np.array([scale.base for scale in scales])).mean(axis=0)
        self._largest = np.array([scale.largest() for scale in scales])
        self._set_noise_limit()

    def add_baseline(self, pair: int, values: Values) -> None:
        """Takes a further baseline of a pair: values [grades]. It can only widen the noise."""
        scale = self._scales[pair]
        scale.repeats.append(values)
        self._largest[pair] = np.maximum(self._largest[pair], np.abs(values - scale.center))
        self._set_noise_limit()

    def _set_noise_limit(self) -> None:
        self.noise_limit = (self._largest / np.abs(self._unit)).mean(axis=0)
        self._noise_lists = self.base.tolist(), self.noise_limit.tolist()

    def noises(self) -> list[sweep_pb2.Noise]:
        """What batching alone does to each grade."""
        stds = np.array([scale.std() for scale in self._scales]) / self._unit
        std = np.sqrt(np.square(stds).sum(axis=0)) / len(stds)
        count = sum(len(scale.repeats) for scale in self._scales)
        return [
            sweep_pb2.Noise(mean=mean, std=spread, max=largest, sample_count=count)
            for mean, spread, largest in zip(
                self.base.tolist(), std.tolist(), self.noise_limit.tolist(), strict=True
            )
        ]

    def unchanged(self, grade: int) -> tuple[float, float]:
        """The clean and the corrupt prompts' mean metric of a grade; NaN if there is none."""
        return (
            float(np.mean([scale.clean[grade] for scale in self._scales])),
            float(np.mean([scale.corrupt[grade] for scale in self._scales])),
        )

    def score(
        self,
        index: int,
        metrics: Sequence[Metrics],
        message: sweep_pb2.SweepCell,
        *,
        pair_values: bool,
    ) -> None:
        """Scores a cell, and puts the scores into its message.

        Args:
            index: the cell.
            metrics: [pairs][grades], averaged over each pair's noises.
            message: receives the values, their standard errors and `below_noise`.
            pair_values: whether it also receives the values of every pair.
        """
        if len(metrics) == 1:
            # For a few numbers, a single call of numpy takes as long as this loop.
            mean = each = [
                (metric - zero) / unit
                for metric, zero, unit in zip(metrics[0], *self._first_pair_scale, strict=True)
            ]
            error = [0.0] * len(mean)
        else:
            graded = self._graded(np.array(metrics))
            mean, each = graded.mean(axis=0).tolist(), graded.ravel().tolist()
            error = (graded.std(axis=0, ddof=1) / np.sqrt(len(graded))).tolist()
        self.values[index] = mean
        message.values.extend(mean)
        message.standard_errors.extend(error)
        if pair_values:
            message.pair_values.extend(each)
        message.below_noise = all(
            abs(value - base) <= limit
            for value, base, limit in zip(mean, *self._noise_lists, strict=True)
        )

    def effects(self) -> Values:
        """[cells]: how far the first grade lies from that of the unchanged prompts."""
        scored = self.values[:, 0]
        values = np.where(np.isnan(scored), self._known, scored)
        distances: Values = np.abs(values - self.base[0])
        return distances

    def _graded(self, metrics: Values) -> Values:
        """The grades of metrics, both [pairs, grades]."""
        grades: Values = (metrics - self._zero) / self._unit
        return grades
