"""The grades of a sweep: what each cell is judged by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

from rheostat._errors import invalid
from rheostat._fields import builds_message, flag, utf8_text, word
from rheostat._points import Point, layers_of, points_of, site_set
from rheostat._selectors import SelectorLike, selector_of, to_wire
from rheostat._steering.gates import POOLS, Pool
from rheostat._steering.readouts import Activation, Normalise, ReadoutSettings
from rheostat._steering.vectors import Vector
from rheostat._sweeps.pairs import Pair
from rheostat_wire.v1 import gate_pb2, sweep_pb2

Metric: TypeAlias = Literal["logprob", "probability", "logit_difference", "rank", "kl"]
"""A number of a cell: ln p(answer); p(answer); logit(answer) - logit(foil); the rank of the
answer's first token, from 1; or KL(clean || cell) of the distributions of the next token, in nats.
"""

_METRICS = {name: sweep_pb2.Metric.Value(f"METRIC_{name.upper()}") for name in get_args(Metric)}


@dataclass(frozen=True)
class ProbeGrade:
    """The reading of a probe as a grade: activation(x . vector + bias) of a row x of the stream.

    For example, a feature of a sparse autoencoder, or a linear classifier.
    """

    name: str
    """The name of the grade in the result."""
    vector: Vector
    """The direction, such as ``rheostat.named("gloom")``. With several rows, that of the layer."""
    point: Point
    layer: int
    where: SelectorLike = None
    """Tokens of the prompt that is run. By default the last one; with another ``pool`` all."""
    pool: Pool = "last"
    """How the readings of several tokens become one number."""
    bias: float = 0.0
    normalise: Normalise = "none"
    """"unit" divides by the vector's length, "cosine" by the row's too."""
    activation: Activation = "identity"
    theta: float | None = None
    """Threshold of "jump_relu"."""
    recovered: bool = False
    """Whether it is given as (cell - corrupt) / (clean - corrupt)."""


GradeLike: TypeAlias = str | ProbeGrade
"""The name of a metric, also as "recovered logprob", or a probe."""


class NamedGrade(NamedTuple):
    """A grade, as the result names it."""

    name: str
    message: sweep_pb2.Grade

    @property
    def contrasts(self) -> bool:
        """Whether it is the difference of an answer and its foil."""
        return self.message.token.metric == sweep_pb2.METRIC_LOGIT_DIFFERENCE


@builds_message
def named_grades(
    grades: GradeLike | Iterable[GradeLike] | None, pairs: Sequence[Pair]
) -> list[NamedGrade]:
    """The grades of a sweep of some pairs; None: the default.

    Raises InvalidRequest if there is none, if one is unknown, if two have the same name, or if only
    some pairs have a foil and none is named.
    """
    if grades is None:
        grades = _default(pairs)
    several = [grades] if isinstance(grades, str | ProbeGrade) else list(grades)
    if not several:
        raise invalid("grades", "at least one grade is required", "REASON_MISSING_FIELD")
    found: list[NamedGrade] = []
    for number, grade in enumerate(several):
        path = f"grades[{number}]"
        if isinstance(grade, ProbeGrade):
            name = utf8_text(grade.name, f"{path}.name", "a name")
            message = _probe_to_wire(grade, path)
            name = "recovered " * message.recovered + name
        else:
            name, message = grade, _metric_to_wire(grade, path)
        if any(name == other.name for other in found):
            raise invalid(path, f"two grades have the name {name!r}")
        found.append(NamedGrade(name, message))
    return found


def _default(pairs: Sequence[Pair]) -> Metric:
    """The grade that uses all that the pairs give, so that a foil is never ignored."""
    without = [number for number, pair in enumerate(pairs) if pair.foil is None]
    if len(without) == len(pairs):
        return "logprob"
    if without:
        raise invalid(
            f"pairs[{without[0]}].foil",
            f"{len(pairs) - len(without)} of {len(pairs)} pairs have a foil: give each pair one, "
            'to grade the logit difference, or write grades="logprob", which reads no foil',
            "REASON_MISSING_FIELD",
        )
    return "logit_difference"


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
    layers = layers_of(grade.layer)
    readout = ReadoutSettings(
        bias=grade.bias,
        normalise=grade.normalise,
        activation=grade.activation,
        theta=grade.theta,
    )
    message = gate_pb2.Probe(
        name=grade.name,
        sites=site_set(points_of(grade.point), layers),
        where=to_wire(selector_of(grade.where)),
        read=readout.to_wire(grade.vector, layers, path),
    )
    return sweep_pb2.Grade(
        probe=sweep_pb2.ProbeGrade(probe=message, pool=word(grade.pool, POOLS, f"{path}.pool")),
        recovered=flag(grade.recovered, f"{path}.recovered", "recovered"),
    )
