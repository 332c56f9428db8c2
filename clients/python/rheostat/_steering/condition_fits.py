"""Conditions that the server fitted to two sets of prompts, with the table of all that it tried."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias, get_args

from rheostat._errors import ServerError
from rheostat._fields import is_probe_name
from rheostat._notebook import passage, text_table
from rheostat._points import Site, read_point
from rheostat._steering.gates import Condition, Pool, Probe, ProbeRows
from rheostat._steering.read_gates import POOL_WORDS, known, read_condition, read_probe, read_rows
from rheostat._steering.readouts import NORMALISE_WORDS, Normalise
from rheostat._steering.transfers import Progress
from rheostat._steering.vectors import Vector, VectorSource
from rheostat_wire.v1 import steering_service_pb2

FitDirection: TypeAlias = Literal["difference_of_means", "principal_component"]
"""Directions that are computed from the prompts; see ``engine.conditions.fit``."""

FIT_DIRECTIONS: dict[str, steering_service_pb2.FitDirection.ValueType] = {
    "difference_of_means": steering_service_pb2.FIT_DIRECTION_DIFFERENCE_OF_MEANS,
    "principal_component": steering_service_pb2.FIT_DIRECTION_PRINCIPAL_COMPONENT,
}
_DIRECTIONS: dict[int, FitDirection] = {
    FIT_DIRECTIONS[name]: name for name in get_args(FitDirection)
}
_SHOWN = 10
"""Rows of the table that are printed."""
_LARGEST_MARGIN = 1e9
"""The server sends it, positive or negative, if the scores within each set are equal, for instance
with one prompt in each set. The margin is then not defined."""
_CHANCE = 0.5
"""Fraction of prompts that a random guess judges correctly."""
_ROUNDING = 1e-6
"""Fractions that differ by at most this much count as equal. The rounding of the server's float32
fractions is smaller, and one prompt of 2048 changes a fraction by more."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConditionFit:
    """A condition that was tried, and how well it separates the sets."""

    site: Site
    """Where it reads."""
    pool: Pool
    """Whether the reading of the last token counts, or the mean of all readings. "last" if `rows`
    is "prompt_mean", because there is one reading."""
    direction: FitDirection | int
    """How the direction was computed, or an index in `ConditionFits.vectors`."""
    normalise: Normalise
    """Whether the coordinate along the direction is read, the cosine, or the projected cosine."""
    threshold: float
    """The midpoint of a gap between the scores of two prompts."""
    below: bool
    """Whether the condition holds below the threshold, not above."""
    f1: float
    """F1, 0 to 1, for the prompts that made the condition."""
    margin: float
    """Distance of the sets in standard deviations; above 0 if the threshold separates all prompts.
    """
    held_out_f1: float | None
    """F1 of a cross-validation with up to ten parts. None if it is not defined, for instance with
    one prompt in a set."""
    held_out_accuracy: float | None
    """Fraction of held-out prompts that are judged correctly."""
    rows: ProbeRows = "each"
    """Whether the probe reads the row of each token, or the mean row of the prompt."""


@dataclass(frozen=True)
class ConditionFits(VectorSource):
    """The best condition of a fit, and all that were tried. ``print`` shows the best of them."""

    condition: Condition
    """The best condition, decided at the prompt's end. Use it as in
    ``steering.when(rheostat.gate(found.condition, hold="rest"))``."""
    vector: Vector
    """The stored vector of its probe."""
    fits: tuple[ConditionFit, ...]
    """All that were tried, by site, rows, pool, direction and normalisation."""
    best: ConditionFit
    """The fit of `condition`: the largest F1, of the prompts that made it or held out, whichever is
    smaller; of several, the largest margin."""
    vectors: tuple[Vector, ...]
    """The vectors that were given as directions."""
    tells_apart: bool | None
    """Whether the best condition judges held-out prompts better than a condition that always or
    never holds: by accuracy, or by F1 if it judges most prompts right. False, too, if its F1 of the
    prompts that made it is not above that of a condition that always holds. None if no prompt was
    held out, for instance because a set has one prompt.

    True proves little if the prompts are few: the best of many conditions is then better by chance.
    Judge it on prompts that the fit has not seen."""

    @property
    def probe(self) -> Probe:
        """The probe of the condition, to make other conditions of it."""
        return self.condition.probe

    def __str__(self) -> str:
        head = ["site", "pool", "direction", "read", "holds", "F1", "held out", "margin", ""]
        ordered = sorted(self.fits, key=_rank, reverse=True)[:_SHOWN]
        table = text_table([head, *map(self._line, ordered)])
        more = len(self.fits) - len(ordered)
        return f"{table}\nand {more} more" if more else table

    def _line(self, fit: ConditionFit) -> list[str]:
        made = fit.direction
        return [
            str(fit.site),
            "mean row" if fit.rows == "prompt_mean" else fit.pool,
            self.vectors[made].label if isinstance(made, int) else made,
            fit.normalise,
            f"{'<' if fit.below else '>'} {fit.threshold:.4g}",
            f"{fit.f1:.3f}",
            "-" if fit.held_out_f1 is None else f"{fit.held_out_f1:.3f}",
            "-" if abs(fit.margin) >= _LARGEST_MARGIN else f"{fit.margin:.2f}",
            "best" if fit is self.best else "",
        ]

    def _repr_html_(self) -> str:
        return passage(str(self))


def _rank(fit: ConditionFit) -> tuple[float, float]:
    return (fit.f1 if fit.held_out_f1 is None else min(fit.f1, fit.held_out_f1)), fit.margin


class PromptCounts(NamedTuple):
    """How many prompts the two sets of a fit have."""

    positive: int
    negative: int

    @property
    def f1(self) -> float:
        """F1 of a condition that always holds."""
        return 2 * self.positive / (2 * self.positive + self.negative)

    @property
    def accuracy(self) -> float:
        """Accuracy of a condition that always holds or never holds, whichever is higher."""
        return max(self) / sum(self)


class ConditionFitsAccumulator:
    """Turns `FitConditionsResponse` messages into `ConditionFits`.

    It logs a warning if the best condition does not tell the sets apart.
    """

    def __init__(
        self,
        name: str | None,
        vectors: Sequence[Vector],
        counts: PromptCounts,
        progress: Progress | None,
    ) -> None:
        self._name = name
        self._vectors = tuple(vectors)
        self._counts = counts
        self._progress = progress
        self._fitted: steering_service_pb2.FittedConditions | None = None

    def add(self, message: steering_service_pb2.FitConditionsResponse) -> list[None]:
        """Take the next event."""
        match message.WhichOneof("event"):
            case "progress" if self._progress is not None:
                progress = message.progress
                self._progress(progress.done_prompt_count, progress.total_prompt_count)
            case "fitted":
                self._fitted = message.fitted
        return []

    def result(self) -> ConditionFits:
        """The conditions, once the stream has ended with OK."""
        if self._fitted is None or not self._fitted.best < len(self._fitted.fits):
            raise ServerError("the server ended a fit without its conditions")
        fitted = self._fitted
        fits = tuple(self._read_fit(fit) for fit in fitted.fits)
        best = fits[fitted.best]
        probe = read_probe(fitted.probe, "probe", name=None)
        name = self._name
        if name is None and isinstance(best.direction, int):
            name = self._vectors[best.direction].name
        # The vector acts where it was read.
        vector = replace(probe.vector, name=name, points=probe.points, layers=probe.layers)
        # Names of vectors may have characters that names of probes may not have, such as "/".
        probe_name = self._name if is_probe_name(self._name) else None
        probe = replace(probe, vector=vector, given_name=probe_name)
        condition = read_condition(fitted.condition, probe, "condition")
        tells_apart = _tells_apart(best, self._counts)
        if tells_apart is False:
            _warn_no_better_than_chance(best, self._counts)
        return ConditionFits(condition, vector, fits, best, self._vectors, tells_apart)

    def _read_fit(self, message: steering_service_pb2.ConditionFit) -> ConditionFit:
        direction: FitDirection | int = message.vector_index
        if message.WhichOneof("direction") == "made":
            direction = known(_DIRECTIONS, message.made, "direction")
        elif message.vector_index >= len(self._vectors):
            raise ServerError("the server names a direction that was not given")
        return ConditionFit(
            Site(read_point(message.site.point), message.site.layer),
            known(POOL_WORDS, message.pool, "pool"),
            direction,
            known(NORMALISE_WORDS, message.normalise, "normalisation"),
            message.threshold,
            message.below,
            message.f1,
            message.margin,
            message.held_out_f1 if message.HasField("held_out_f1") else None,
            message.held_out_accuracy if message.HasField("held_out_accuracy") else None,
            read_rows(message.rows, "rows"),
        )


def _tells_apart(fit: ConditionFit, counts: PromptCounts) -> bool | None:
    if fit.held_out_f1 is None or fit.held_out_accuracy is None:
        return None
    if fit.f1 <= counts.f1 + _ROUNDING:
        return False
    return fit.held_out_accuracy > counts.accuracy + _ROUNDING or (
        fit.held_out_f1 > counts.f1 + _ROUNDING and fit.held_out_accuracy > _CHANCE + _ROUNDING
    )


def _warn_no_better_than_chance(fit: ConditionFit, counts: PromptCounts) -> None:
    if fit.f1 <= counts.f1 + _ROUNDING:
        _LOG.warning(
            "the best condition does not tell the two sets apart: its F1 of %.3f is not above that "
            "of one that always holds, %.3f",
            fit.f1,
            counts.f1,
        )
        return
    _LOG.warning(
        "the best condition does not tell the two sets apart: it judges %.0f %% of the held-out "
        "prompts right, and one that always or never holds judges %.0f %%",
        100 * (fit.held_out_accuracy or 0),
        100 * counts.accuracy,
    )
