"""Tensors of requests and of captured rows: little-endian bytes with a dtype and a shape.

The length of a raw payload is checked against dtype and shape before the bytes are read. numpy has
no bfloat16, so its bits are stored in uint16.
"""

import math
from collections.abc import Sequence
from enum import Enum

import google_crc32c
import numpy as np

from rheostat_server.errors import InvalidValue, MissingField, TensorPayload
from rheostat_server.limits import TENSOR_RANK
from rheostat_server.validation import field_path, known_enum
from rheostat_wire import byte_planes
from rheostat_wire.dtypes import (
    FROM_WIRE,
    STORAGE,
    TO_WIRE,
    DtypeName,
    FloatArray,
    StoredArray,
    narrow,
)
from rheostat_wire.dtypes import widen as widen_stored
from rheostat_wire.v1 import tensor_pb2


class FloatType(Enum):
    """A float type of rows and vectors. The value is its name in digests and in the engine."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"

    @property
    def dtype(self) -> DtypeName:
        """Its name, as a string."""
        return self.value

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return STORAGE[self.dtype].itemsize

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The numpy type that stores an element; uint16 for bfloat16."""
        return STORAGE[self.dtype]

    @property
    def wire(self) -> tensor_pb2.Dtype.ValueType:
        """Its value of the enum on the wire."""
        return TO_WIRE[self.dtype]

    @property
    def finite_max(self) -> float:
        """The largest finite number."""
        bits, exponent = _BITS[self]
        return (2 - 2.0**-bits) * 2.0**exponent

    @property
    def largest(self) -> float:
        """Magnitudes below this stay finite when rounded to this type."""
        bits, exponent = _BITS[self]
        # The largest finite number and half of its last place: from there on, rounding gives
        # infinity.
        return (2 - 2.0 ** -(bits + 1)) * 2.0**exponent


_BITS = {FloatType.FLOAT32: (23, 127), FloatType.FLOAT16: (10, 15), FloatType.BFLOAT16: (7, 127)}
"""Bits of the fraction, and the largest exponent, of each type."""


LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
"""The largest finite number of a float field."""


def float32(value: float) -> float:
    """Rounds a number for a float field, which must not exceed the largest finite float32."""
    value = float(value)
    return value if -LARGEST_FLOAT32 <= value <= LARGEST_FLOAT32 else LARGEST_FLOAT32


def float_type(dtype: int, path: str) -> FloatType:
    """The float type of a value of the enum on the wire.

    Raises:
        UnknownEnum: the enum has no such value.
        InvalidValue: rows and vectors cannot have this type.
    """
    known_enum(dtype, tensor_pb2.Dtype.values(), path)
    name = FROM_WIRE.get(tensor_pb2.Dtype.ValueType(dtype))
    if name is None:
        raise InvalidValue("must be float32, float16 or bfloat16", field=path)
    return FloatType(name)


def checked_payload(tensor: tensor_pb2.Tensor, path: str, *, kind: FloatType) -> bytes:
    """Returns the bytes of a request's tensor, decompressed, after checks.

    Raises:
        MissingField: there is no payload.
        InvalidValue: requests must not have this rank, encoding or kind of payload.
        TensorPayload: the length or the checksum is wrong, or the payload is no LZ4 frame of
            that length.
    """
    if len(tensor.shape) > TENSOR_RANK:
        raise InvalidValue(
            f"{len(tensor.shape)} extents; at most {TENSOR_RANK} are allowed",
            field=field_path(path, "shape"),
        )
    _check_encoding(tensor, path)
    payload = tensor.WhichOneof("payload")
    if payload is None:
        raise MissingField("a payload is required", field=field_path(path, "inline"))
    if payload != "inline":
        raise InvalidValue("a request's tensors are inline", field=field_path(path, payload))
    expected = math.prod(tensor.shape) * kind.itemsize
    raw = tensor.encoding == tensor_pb2.ENCODING_RAW
    if raw and len(tensor.inline) != expected:
        raise TensorPayload(
            f"the tensor has {len(tensor.inline)} bytes; its dtype and shape need {expected}",
            field=field_path(path, "inline"),
        )
    if tensor.HasField("crc32c") and google_crc32c.value(tensor.inline) != tensor.crc32c:
        raise TensorPayload("the bytes do not have this checksum", field=field_path(path, "crc32c"))
    if raw:
        return tensor.inline
    try:
        return byte_planes.decompress(tensor.inline, expected, kind.itemsize)
    except ValueError as error:
        raise TensorPayload(str(error), field=field_path(path, "inline")) from error


def _check_encoding(tensor: tensor_pb2.Tensor, path: str) -> None:
    field = field_path(path, "encoding")
    known_enum(tensor.encoding, tensor_pb2.Encoding.values(), field)
    if tensor.encoding not in (tensor_pb2.ENCODING_RAW, tensor_pb2.ENCODING_LZ4_PLANES):
        raise InvalidValue("send ENCODING_RAW or ENCODING_LZ4_PLANES", field=field)


def widen(data: bytes, kind: FloatType) -> FloatArray:
    """Widens elements to float32, exactly; [elements]."""
    return widened(np.frombuffer(data, dtype=kind.numpy), kind)


def converted(rows: StoredArray, *, row_type: FloatType, wanted: FloatType) -> StoredArray:
    """Converts rows from type `row_type` to `wanted`. If both are equal, the bits do not change.

    Narrowing rounds to nearest, ties to even.

    Args:
        rows: [..., width]; float32, float16, or uint16 with the bits of bfloat16.
        row_type: their type.
        wanted: the type of the result.
    """
    if row_type is wanted:
        return np.ascontiguousarray(rows, dtype=row_type.numpy)
    return narrow(widened(rows, row_type), wanted.dtype)


def stack_rows(parts: Sequence[StoredArray]) -> StoredArray:
    """Joins the rows of several sites, each [positions, width], to [sites, positions, width]."""
    return parts[0][None] if len(parts) == 1 else np.stack(parts)


def widened(raw: StoredArray, kind: FloatType) -> FloatArray:
    """Widens rows to float32, exactly."""
    return widen_stored(raw, kind.dtype)
