"""Checks readouts: only scalar products are served.

Ops take unit vectors; projections take any vectors. The protos also define biases, cosines and
activations. Each of them is refused with its field path and an alternative.
"""

from typing import NamedTuple

from rheostat_server import validation
from rheostat_server.errors import InvalidValue, MissingField, NotSupported
from rheostat_server.validation import field_path
from rheostat_wire.v1 import vector_pb2


class ReadoutRules(NamedTuple):
    """The readouts that are served in one kind of message, and advice for the others."""

    normalise: vector_pb2.Normalise.ValueType
    """The normalisation that is served."""
    other: str
    """Advice for another normalisation."""
    bias: str
    """Advice for a bias."""
    activation: str
    """Advice for an activation."""


OF_OPS = ReadoutRules(
    vector_pb2.NORMALISE_UNIT,
    "set NORMALISE_UNIT, and give numbers in units of the stream",
    "give min and max less the bias",
    "leave it out",
)
"""Bands and scales."""

OF_PROJECTIONS = ReadoutRules(
    vector_pb2.NORMALISE_NONE,
    "leave it out, and store vectors of norm 1 for NORMALISE_UNIT",
    "leave it out, and add it to the captured numbers",
    "leave it out, and apply it to the captured numbers",
)
"""Projections of captured rows."""


class ReadoutSettings(NamedTuple):
    """Everything of a readout but its vector."""

    normalise: vector_pb2.Normalise.ValueType
    activation: vector_pb2.Activation.ValueType
    bias: float
    theta: float
    """The threshold of ACTIVATION_JUMP_RELU."""


def readout_settings(readout: vector_pb2.Readout, path: str) -> ReadoutSettings:
    """The settings of a readout. Its vector is not checked.

    Raises:
        UnknownEnum: an enum is zero or unknown.
        NonFinite: a number is not finite.
        MissingField, InvalidValue: theta does not match the activation.
    """
    normalise, activation = vector_pb2.NORMALISE_NONE, vector_pb2.ACTIVATION_IDENTITY
    if readout.HasField("normalise"):
        normalise = readout.normalise
        validation.known_enum(
            normalise, vector_pb2.Normalise.values(), field_path(path, "normalise")
        )
    if readout.HasField("activation"):
        activation = readout.activation
        validation.known_enum(
            activation, vector_pb2.Activation.values(), field_path(path, "activation")
        )
    if readout.HasField("bias"):
        validation.finite(readout.bias, field_path(path, "bias"))
    _check_theta(readout, activation, path)
    return ReadoutSettings(normalise, activation, readout.bias, readout.theta)


def check_readout(readout: vector_pb2.Readout, rules: ReadoutRules, path: str) -> None:
    """Refuses a readout that is not served. Its vector is not checked.

    Raises:
        InvalidArgument: as `readout_settings`.
        NotSupported: a field has a value that is not served.
    """
    settings = readout_settings(readout, path)
    if settings.normalise != rules.normalise:
        raise NotSupported(
            f"{vector_pb2.Normalise.Name(settings.normalise)} is not served here yet: "
            f"{rules.other}",
            field=field_path(path, "normalise"),
        )
    if settings.activation != vector_pb2.ACTIVATION_IDENTITY:
        raise NotSupported(
            f"{vector_pb2.Activation.Name(settings.activation)} is not served yet: "
            f"{rules.activation}",
            field=field_path(path, "activation"),
        )
    if settings.bias:
        raise NotSupported(
            f"a bias is not served yet: {rules.bias}", field=field_path(path, "bias")
        )


def _check_theta(
    readout: vector_pb2.Readout, activation: vector_pb2.Activation.ValueType, path: str
) -> None:
    field = field_path(path, "theta")
    if activation == vector_pb2.ACTIVATION_JUMP_RELU:
        if not readout.HasField("theta"):
            raise MissingField("ACTIVATION_JUMP_RELU needs a threshold", field=field)
        validation.finite(readout.theta, field)
    elif readout.HasField("theta"):
        raise InvalidValue("only ACTIVATION_JUMP_RELU has a threshold", field=field)
