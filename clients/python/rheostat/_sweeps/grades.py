"""The grades of a sweep: what each cell is judged by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, TypeVar, get_args

from rheostat._errors import invalid
from rheostat._fields import builds_message, utf8_text
from rheostat._points import Point, layers_of, points_of, site_set
from rheostat._selectors import SelectorLike, selector_of, to_wire
from rheostat._steering.vectors import Vector, finite, refuse_dose, row_ref
from rheostat_wire.v1 import gate_pb2, sweep_pb2, vector_pb2

Metric: TypeAlias = Literal["logprob", "probability", "logit_difference", "rank", "kl"]
"""What a cell is graded by: ln p(answer); p(answer); logit(answer) - logit(foil); the rank of the
answer's first token, from 1; or KL(clean || cell) of the distributions of the next token, in nats.
"""

_METRICS = {name: sweep_pb2.Metric.Value(f"METRIC_{name.upper()}") for name in get_args(Metric)}
_POOLS = {
    "last": gate_pb2.POOL_LAST,
    "mean": gate_pb2.POOL_MEAN,
    "max": gate_pb2.POOL_MAX,
}
_NORMALISATIONS = {
    "none": vector_pb2.NORMALISE_NONE,
    "unit": vector_pb2.NORMALISE_UNIT,
    "cosine": vector_pb2.NORMALISE_COSINE,
}
_ACTIVATIONS = {
    "identity": vector_pb2.ACTIVATION_IDENTITY,
    "relu": vector_pb2.ACTIVATION_RELU,
    "jump_relu": vector_pb2.ACTIVATION_JUMP_RELU,
    "tanh": vector_pb2.ACTIVATION_TANH,
}

Number = TypeVar("Number", bound=int)


@dataclass(frozen=True)
class ProbeGrade:
    """Grades a cell by what a probe reads: activation(x . vector + bias) of a row x of the stream.

    A feature of a sparse autoencoder is read so, and a linear classifier.
    """

    name: str
    """The name of the grade in the result."""
    vector: Vector
    """The direction, such as ``rheostat.named("gloom")``. With several rows, that of the layer."""
    point: Point
    layer: int
    where: SelectorLike = None
    """Tokens of the prompt that is run. By default the last one; with another ``pool`` all."""
    pool: Literal["last", "mean", "max"] = "last"
    """Which of the tokens' numbers counts."""
    bias: float = 0.0
    normalise: Literal["none", "unit", "cosine"] = "none"
    """"unit" divides by the vector's length, "cosine" by the row's too."""
    activation: Literal["identity", "relu", "jump_relu", "tanh"] = "identity"
    theta: float | None = None
    """Threshold of "jump_relu"."""
    recovered: bool = False
    """Whether it is given as a part of the difference between the clean and the corrupt prompt."""


GradeLike: TypeAlias = str | ProbeGrade
"""The name of a metric, also as "recovered logprob", or a probe."""


class NamedGrade(NamedTuple):
    """A grade, as the result names it."""

    name: str
    message: sweep_pb2.Grade


@builds_message
def named_grades(grades: GradeLike | Iterable[GradeLike]) -> list[NamedGrade]:
    """The grades of a sweep.

    Raises InvalidRequest if there is none, if one is unknown, or if two have the same name.
    """
    several = [grades] if isinstance(grades, str | ProbeGrade) else list(grades)
    if not several:
        raise invalid("grades", "at least one grade is required", "REASON_MISSING_FIELD")
    found: list[NamedGrade] = []
    for number, grade in enumerate(several):
        path = f"grades[{number}]"
        named = (
            NamedGrade(
                "recovered " * grade.recovered + utf8_text(grade.name, f"{path}.name", "a name"),
                _probe_to_wire(grade, path),
            )
            if isinstance(grade, ProbeGrade)
            else NamedGrade(grade, _metric_to_wire(grade, path))
        )
        if any(named.name == other.name for other in found):
            raise invalid(path, f"two grades have the name {named.name!r}")
        found.append(named)
    return found


def word(given: object, words: Mapping[str, Number], path: str) -> Number:
    """The enum's value that a word means."""
    if not isinstance(given, str) or given not in words:
        raise invalid(
            path, f"is {' or '.join(map(repr, words))}, not {given!r}", "REASON_UNKNOWN_ENUM"
        )
    return words[given]


def _metric_to_wire(name: object, path: str) -> sweep_pb2.Grade:
    recovered = isinstance(name, str) and name.startswith("recovered ")
    metric = name.removeprefix("recovered ") if isinstance(name, str) else ""
    if metric not in _METRICS:
        options = ", ".join(_METRICS)
        raise invalid(
            path,
            f'a grade is one of {options}, also as "recovered logit_difference", or a '
            f"rheostat.ProbeGrade; not {name!r}",
            "REASON_UNKNOWN_ENUM",
        )
    token = sweep_pb2.TokenGrade(metric=_METRICS[metric])
    return sweep_pb2.Grade(token=token, recovered=recovered)


def _probe_to_wire(grade: ProbeGrade, path: str) -> sweep_pb2.Grade:
    refuse_dose(grade.vector, f"{path}.vector")
    if not isinstance(grade.vector, Vector):
        raise invalid(
            f"{path}.vector",
            f"a probe reads with a vector, not {type(grade.vector).__name__}: give one, e.g. "
            "rheostat.named(name) or rheostat.inline(array)",
        )
    layers = layers_of(grade.layer)
    message = gate_pb2.Probe(
        name=grade.name,
        sites=site_set(points_of(grade.point), layers),
        where=to_wire(selector_of(grade.where)),
        read=vector_pb2.Readout(
            vector=row_ref(grade.vector, layers, f"{path}.vector"),
            bias=finite(grade.bias, f"{path}.bias", "a bias"),
            normalise=word(grade.normalise, _NORMALISATIONS, f"{path}.normalise"),
            activation=word(grade.activation, _ACTIVATIONS, f"{path}.activation"),
        ),
    )
    if grade.theta is not None:
        message.read.theta = finite(grade.theta, f"{path}.theta", "a threshold")
    return sweep_pb2.Grade(
        probe=sweep_pb2.ProbeGrade(probe=message, pool=word(grade.pool, _POOLS, f"{path}.pool")),
        recovered=bool(grade.recovered),
    )
