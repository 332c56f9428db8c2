"""Conditions that the server fitted to two sets of prompts, with the table of all that it tried."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from rheostat._errors import ServerError
from rheostat._notebook import passage
from rheostat._points import Site, read_point
from rheostat._steering.gates import POOLS, Condition, Pool, Probe
from rheostat._steering.read_gates import known, read_condition, read_probe
from rheostat._steering.readouts import NORMALISATIONS, Normalise
from rheostat._steering.transfers import Progress
from rheostat._steering.vectors import Vector
from rheostat_wire.v1 import steering_service_pb2

FitDirection: TypeAlias = Literal["difference_of_means", "principal_component"]
"""Directions that are made of the prompts; see ``engine.conditions.fit``."""

FIT_DIRECTIONS: dict[str, steering_service_pb2.FitDirection.ValueType] = {
    "difference_of_means": steering_service_pb2.FIT_DIRECTION_DIFFERENCE_OF_MEANS,
    "principal_component": steering_service_pb2.FIT_DIRECTION_PRINCIPAL_COMPONENT,
}
_POOLS: dict[int, Pool] = {POOLS["last"]: "last", POOLS["mean"]: "mean"}
_NORMALISES: dict[int, Normalise] = {
    NORMALISATIONS["unit"]: "unit",
    NORMALISATIONS["cosine"]: "cosine",
}
_DIRECTIONS: dict[int, FitDirection] = {
    FIT_DIRECTIONS[name]: name for name in get_args(FitDirection)
}
_SHOWN = 10
"""Rows of the table that are printed."""


@dataclass(frozen=True)
class ConditionFit:
    """A condition that was tried, and how well it tells the sets apart."""

    site: Site
    """Where it reads."""
    pool: Pool
    """Whether the last token counts, or the mean of all."""
    direction: FitDirection | int
    """How the direction was made, or the index among the given vectors."""
    normalise: Normalise
    """Whether the coordinate along the direction is read, or the cosine."""
    threshold: float
    """In the middle of a gap between two prompts."""
    below: bool
    """Whether the condition holds below the threshold, not above."""
    f1: float
    """F1, 0 to 1, of the prompts that made the condition."""
    margin: float
    """Distance of the sets in standard deviations; above 0 if the threshold tells all prompts
    apart."""
    held_out_f1: float | None
    """F1 of prompts that were held out of ten parts in turn. None if it is not defined, as with one
    prompt in a set."""
    held_out_accuracy: float | None
    """Fraction of the held-out prompts that are judged right."""


@dataclass(frozen=True)
class ConditionFits:
    """The fitted condition, and all that were tried. ``print`` shows the best of them."""

    condition: Condition
    """The best, decided at the prompt's end: ``steering.when(rheostat.gate(found.condition,
    hold="rest"))``."""
    vector: Vector
    """The stored vector that it reads with."""
    fits: tuple[ConditionFit, ...]
    """By site, pool, direction and normalisation."""
    best: ConditionFit
    """The one of `condition`: that of the largest held-out F1, then of the widest margin."""

    @property
    def probe(self) -> Probe:
        """The probe of the condition, for conditions of one's own."""
        return self.condition.probe

    def __str__(self) -> str:
        head = ["site", "pool", "direction", "read", "holds", "F1", "held out", "margin", ""]
        ordered = sorted(self.fits, key=_rank, reverse=True)[:_SHOWN]
        lines = [head, *(self._line(fit) for fit in ordered)]
        sizes = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = "\n".join(
            "  ".join(cell.ljust(size) for cell, size in zip(line, sizes, strict=True)).rstrip()
            for line in lines
        )
        more = len(self.fits) - len(ordered)
        return f"{table}\nand {more} more" if more else table

    def _line(self, fit: ConditionFit) -> list[str]:
        made = isinstance(fit.direction, int)
        return [
            str(fit.site),
            fit.pool,
            f"vector {fit.direction}" if made else str(fit.direction),
            fit.normalise,
            f"{'<' if fit.below else '>'} {fit.threshold:.4g}",
            f"{fit.f1:.3f}",
            "-" if fit.held_out_f1 is None else f"{fit.held_out_f1:.3f}",
            f"{fit.margin:.2f}",
            "best" if fit is self.best else "",
        ]

    def _repr_html_(self) -> str:
        return passage(str(self))


def _rank(fit: ConditionFit) -> tuple[float, float]:
    return (fit.f1 if fit.held_out_f1 is None else fit.held_out_f1), fit.margin


class ConditionFitsAccumulator:
    """Turns `FitConditionsResponse` messages into `ConditionFits`."""

    def __init__(self, name: str | None, progress: Progress | None) -> None:
        self._name = name
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
        fits = tuple(map(_read_fit, fitted.fits))
        probe = read_probe(fitted.probe, "probe", name=None)
        # The vector acts where it was read, and has the name under which it was stored.
        vector = replace(probe.vector, name=self._name, points=probe.points, layers=probe.layers)
        probe = replace(probe, vector=vector)
        condition = read_condition(fitted.condition, probe, "condition")
        return ConditionFits(condition, vector, fits, fits[fitted.best])


def _read_fit(message: steering_service_pb2.ConditionFit) -> ConditionFit:
    direction: FitDirection | int = message.vector_index
    if message.WhichOneof("direction") == "made":
        direction = known(_DIRECTIONS, message.made, "direction")
    return ConditionFit(
        Site(read_point(message.site.point), message.site.layer),
        known(_POOLS, message.pool, "pool"),
        direction,
        known(_NORMALISES, message.normalise, "normalisation"),
        message.threshold,
        message.below,
        message.f1,
        message.margin,
        message.held_out_f1 if message.HasField("held_out_f1") else None,
        message.held_out_accuracy if message.HasField("held_out_accuracy") else None,
    )
