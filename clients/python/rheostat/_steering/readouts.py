"""Readouts: numbers that are computed from a row x of the stream and a vector v.

A readout is activation(normalise(x, v) + bias). Probes, bands, scales and projections of captures
use readouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from rheostat._errors import Unimplemented, invalid
from rheostat._fields import word
from rheostat._points import Layers
from rheostat._steering.vectors import Vector, finite, finite_or_none, refuse_dose, row_ref
from rheostat_wire.v1 import vector_pb2

Normalise: TypeAlias = Literal["none", "unit", "cosine", "projected_cosine"]
"""How x and v give a number: x.v, x.v / |v|, or x.v / (|x| |v|). "projected_cosine": the cosine of
x and p = tanh((x.v / v.v) v), element by element, for probes, `clamp` and `scale` only."""

Activation: TypeAlias = Literal["identity", "relu", "jump_relu", "tanh"]
"""The function of the normalised number plus bias. "jump_relu": the number itself if it is above
theta, else 0."""

NORMALISATIONS = {
    name: vector_pb2.Normalise.Value(f"NORMALISE_{name.upper()}") for name in get_args(Normalise)
}
ACTIVATIONS = {
    name: vector_pb2.Activation.Value(f"ACTIVATION_{name.upper()}") for name in get_args(Activation)
}
NORMALISE_WORDS: dict[int, Normalise] = {value: name for name, value in NORMALISATIONS.items()}
_ACTIVATION_WORDS: dict[int, Activation] = {value: name for name, value in ACTIVATIONS.items()}


@dataclass(frozen=True, kw_only=True)
class ReadoutSettings:
    """A readout without its vector."""

    bias: float = 0.0
    normalise: Normalise = "none"
    activation: Activation = "identity"
    theta: float | None = None
    """The threshold of "jump_relu"."""

    def to_wire(self, vector: Vector, layers: Layers, path: str) -> vector_pb2.Readout:
        """The message; ``layers`` are those where it reads."""
        refuse_dose(vector, f"{path}.vector")
        if not isinstance(vector, Vector):
            raise invalid(
                f"{path}.vector",
                f"a number is read with a vector, not {type(vector).__name__}: give one, e.g. "
                "rheostat.named(name) or rheostat.inline(array)",
            )
        return vector_pb2.Readout(
            vector=row_ref(vector, layers, f"{path}.vector"),
            bias=finite(self.bias, f"{path}.bias", "bias"),
            normalise=word(self.normalise, NORMALISATIONS, f"{path}.normalise"),
            activation=word(self.activation, ACTIVATIONS, f"{path}.activation"),
            theta=finite_or_none(self.theta, f"{path}.theta", "threshold"),
        )


COORDINATE = ReadoutSettings(normalise="unit")
"""The coordinate x.v / |v| along a vector."""


def read_settings(message: vector_pb2.Readout, path: str) -> ReadoutSettings:
    """The settings of a message. Raises Unimplemented for those that this client lacks."""
    normalise, activation = message.normalise, message.activation
    if not message.HasField("normalise"):
        normalise = vector_pb2.NORMALISE_NONE
    if not message.HasField("activation"):
        activation = vector_pb2.ACTIVATION_IDENTITY
    if normalise not in NORMALISE_WORDS or activation not in _ACTIVATION_WORDS:
        raise Unimplemented(f"{path} of the server reads in a way that this client does not know")
    theta = message.theta if message.HasField("theta") else None
    return ReadoutSettings(
        bias=message.bias,
        normalise=NORMALISE_WORDS[normalise],
        activation=_ACTIVATION_WORDS[activation],
        theta=theta,
    )


@dataclass(frozen=True)
class Readout:
    """The number activation(normalise(x, v) + bias) of a row x; made by `readout`."""

    vector: Vector
    """v: one row for all layers, or one per layer."""
    settings: ReadoutSettings = ReadoutSettings()

    @property
    def label(self) -> str:
        """As "relu(joy + 0.5)"."""
        settings = self.settings
        text = self.vector.label
        if settings.normalise != "none":
            text = f"{settings.normalise} {text}"
        if settings.bias:
            text += f" {settings.bias:+.6g}"
        theta = "" if settings.theta is None else f", {settings.theta:.6g}"
        plain = settings.activation == "identity"
        return text if plain else f"{settings.activation}({text}{theta})"

    def to_wire(self, layers: Layers, path: str) -> vector_pb2.Readout:
        """The message; ``layers`` are those where it reads."""
        return self.settings.to_wire(self.vector, layers, path)


def readout(
    vector: Vector,
    *,
    bias: float = 0.0,
    normalise: Normalise = "none",
    activation: Activation = "identity",
    theta: float | None = None,
) -> Readout:
    """The number activation(normalise(x, v) + bias) of a row x, for `clamp`, `scale` and captures.

    Args:
        vector: v: one row for all layers, [1, width], or one row per layer.
        bias: added to the number.
        normalise: "unit" divides the number by |v|, "cosine" by |x| |v|.
        activation: the function that is applied last.
        theta: the threshold of "jump_relu".
    """
    refuse_dose(vector, "readout.vector")
    if not isinstance(vector, Vector):
        raise invalid(
            "readout.vector",
            "a readout takes a vector, such as rheostat.named(name) or rheostat.inline(array), "
            f"not {type(vector).__name__}",
        )
    settings = ReadoutSettings(bias=bias, normalise=normalise, activation=activation, theta=theta)
    return Readout(vector, settings)
