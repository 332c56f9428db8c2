"""Checks readouts: numbers that are read of a row of the stream with a vector.

Probes, bands, scales and projections share them. A step along a direction cannot bring a cosine or
a hyperbolic tangent into a band, so bands and scales that read these say what they write.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from rheostat_engine import Activation, Normalise, Readout
from rheostat_server import validation
from rheostat_server.errors import InvalidValue, MissingField, NotSupported
from rheostat_server.validation import field_path
from rheostat_server.vectors.store import Vector
from rheostat_wire.v1 import vector_pb2

_Float = TypeVar("_Float", np.float32, np.float64)

_NORMALISE = {
    vector_pb2.NORMALISE_NONE: Normalise.NONE,
    vector_pb2.NORMALISE_UNIT: Normalise.UNIT,
    vector_pb2.NORMALISE_COSINE: Normalise.COSINE,
    vector_pb2.NORMALISE_PROJECTED_COSINE: Normalise.PROJECTED_COSINE,
}
_ACTIVATION = {
    vector_pb2.ACTIVATION_IDENTITY: Activation.IDENTITY,
    vector_pb2.ACTIVATION_RELU: Activation.RELU,
    vector_pb2.ACTIVATION_JUMP_RELU: Activation.JUMP_RELU,
    vector_pb2.ACTIVATION_TANH: Activation.TANH,
}

LEAST_NORM, LARGEST_NORM = 1e-18, 1e18
"""Norms of vectors in whose units numbers are read or written. Scalar products with the largest
rows of the stream then stay finite in float32, and so do the inverse norms."""


def resolve_readout(readout: vector_pb2.Readout, path: str) -> Readout:
    """A readout without its vector, which is not checked.

    Raises:
        UnknownEnum: an enum is zero or unknown.
        NonFinite: a number is not finite.
        MissingField, InvalidValue: theta does not match the activation.
    """
    normalise, activation = vector_pb2.NORMALISE_NONE, vector_pb2.ACTIVATION_IDENTITY
    if readout.HasField("normalise"):
        normalise = readout.normalise
        validation.known_enum(normalise, _NORMALISE, field_path(path, "normalise"))
    if readout.HasField("activation"):
        activation = readout.activation
        validation.known_enum(activation, _ACTIVATION, field_path(path, "activation"))
    bias = validation.optional_number(readout, "bias", path, 0.0)
    _check_theta(readout, activation, path)
    return Readout(_NORMALISE[normalise], _ACTIVATION[activation], bias, readout.theta)


def read_numbers(
    readout: Readout,
    products: npt.NDArray[_Float],  # [n]: x.v, of x.u if v is normalised
    norms: npt.NDArray[_Float],  # [n]: |x|
) -> npt.NDArray[_Float]:
    """The numbers, [n], that a readout makes of rows, in the type of the products."""
    z = products
    if readout.normalise is Normalise.COSINE:
        z = np.divide(z, norms, out=np.zeros_like(z), where=norms > 0)
    z = z + z.dtype.type(readout.bias)
    match readout.activation:
        case Activation.RELU:
            z = np.maximum(z, 0)
        case Activation.JUMP_RELU:
            z = np.where(z <= z.dtype.type(readout.theta), 0, z)
        case Activation.TANH:
            z = np.tanh(z)
    return z


def resolve_product(readout: vector_pb2.Readout, path: str) -> Readout:
    """Resolves a readout for callers that compute numbers only from products x.v and norms |x|.

    Raises:
        NotSupported: the readout needs more than these.
    """
    settings = resolve_readout(readout, path)
    if settings.normalise is Normalise.PROJECTED_COSINE:
        raise NotSupported(
            "NORMALISE_PROJECTED_COSINE is served only in probes, bands and scales",
            field=field_path(path, "normalise"),
        )
    return settings


def check_pulled(readout: Readout, path: str, *, writes: bool) -> None:
    """Checks that a band or a scale can move x so that what is read changes.

    Args:
        readout: what is read.
        path: of the message that has it.
        writes: whether the message says along which vector x moves.

    Raises:
        MissingField: it must say that, and does not.
    """
    if writes:
        return
    problem = ""
    if readout.normalise in (Normalise.COSINE, Normalise.PROJECTED_COSINE):
        problem = f"NORMALISE_{readout.normalise.name}"
    elif readout.activation is Activation.TANH:
        problem = "ACTIVATION_TANH"
    if problem:
        raise MissingField(
            f"no step along the vector brings what {problem} reads to a number: give the vector "
            "that is written",
            field=field_path(path, "write"),
        )


def check_norm(vector: Vector, row: int, path: str) -> None:
    """Checks the norm of a row in whose units a number is read or written.

    Raises:
        InvalidValue: it is so small or large that float32 cannot hold the numbers.
    """
    if not LEAST_NORM <= vector.norms[row] <= LARGEST_NORM:
        raise InvalidValue(
            f"row {row} has the norm {vector.norms[row]:g}; {LEAST_NORM:g} to {LARGEST_NORM:g} are "
            "allowed",
            field=path,
        )


def _check_theta(
    readout: vector_pb2.Readout, activation: vector_pb2.Activation.ValueType, path: str
) -> None:
    field = field_path(path, "theta")
    if activation == vector_pb2.ACTIVATION_JUMP_RELU:
        if not readout.HasField("theta"):
            raise MissingField("ACTIVATION_JUMP_RELU needs its threshold, theta", field=field)
        validation.finite(readout.theta, field)
    elif readout.HasField("theta"):
        raise InvalidValue("only ACTIVATION_JUMP_RELU has a threshold", field=field)
