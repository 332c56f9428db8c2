"""Decodes tensors of every encoding of tensor.proto to float32.

Checksum, shape and length are checked before any number is decoded, and no more bytes are
decompressed than the shape needs. Numbers of every dtype become float32 and are not rounded again,
so that `max_error` bounds the error of a lossy encoding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import google_crc32c
import numpy as np
import numpy.typing as npt

from rheostat._arrays import Element, read_element, stored, widened
from rheostat._errors import DataLoss, ServerError
from rheostat_wire import byte_planes
from rheostat_wire.dtypes import STORAGE, FloatArray
from rheostat_wire.quantization import Payload, decode_full8, decode_topk8
from rheostat_wire.v1 import tensor_pb2

EncodingName: TypeAlias = Literal["raw", "lz4_planes", "full8", "rp8", "topk8"]

_NAMES: dict[tensor_pb2.Encoding.ValueType, EncodingName] = {
    tensor_pb2.Encoding.Value(f"ENCODING_{name.upper()}"): name for name in get_args(EncodingName)
}
WIRE_ENCODINGS: dict[str, tensor_pb2.Encoding.ValueType] = {
    name: number for number, name in _NAMES.items()
}
"""The enum value of each encoding."""

_MAX_RANK = 8
_MAX_ELEMENTS = 2**48


@dataclass(frozen=True)
class Encoding:
    """The encoding in which rows were sent, with its parameters."""

    name: EncodingName = "raw"
    """"raw" and "lz4_planes" are exact. "full8" keeps 8 bits per number. "topk8" keeps 8 bits of
    each of the largest numbers, "rp8" 8 bits per number of a random projection of the row."""
    kept: int | None = None
    """K of "rp8" and "topk8": numbers kept per row."""
    width: int | None = None
    """W of "rp8" and "topk8": numbers per row before the encoding."""
    seed: int | None = None
    """Seed of the projection of "rp8": see `projection_matrix`."""

    @property
    def exact(self) -> bool:
        """Whether every bit is kept."""
        return self.name in ("raw", "lz4_planes")


RAW = Encoding()


class Decoded(NamedTuple):
    """The numbers of a tensor, with a bound on their error."""

    values: FloatArray
    """float32 of the tensor's shape."""
    encoding: Encoding
    """The encoding in which they were sent."""
    max_error: FloatArray | None
    """The largest error of each row, float32 [all of shape but the last]; NaN if the row was not
    finite. None: the numbers are exact."""


def read_tensor(tensor: tensor_pb2.Tensor) -> Decoded:
    """Decodes an inline tensor. Raises as `decoded`."""
    if tensor.WhichOneof("payload") != "inline":
        raise ServerError("the server sent a tensor that is not inline")
    return decoded(tensor, tensor.inline)


def decoded(tensor: tensor_pb2.Tensor, payload: Payload) -> Decoded:
    """Decodes a tensor from its payload.

    Raises ServerError if shape, encoding and length do not match, DataLoss if the checksum is
    wrong.
    """
    check_crc(tensor, payload)
    return _read(tensor, payload)


def decoded_in_place(tensor: tensor_pb2.Tensor, payload: Payload) -> Decoded:
    """Decodes as `decoded` does, and checks the payload afterwards.

    Another process may write to the payload meanwhile, so a check before reading proves nothing.
    """
    try:
        numbers = _read(tensor, payload)
    except ServerError:
        check_crc(tensor, payload)
        raise
    check_crc(tensor, payload)
    return numbers


def check_crc(tensor: tensor_pb2.Tensor, payload: Payload) -> None:
    """Raises DataLoss if the checksum is wrong."""
    if tensor.HasField("crc32c") and google_crc32c.value(payload) != tensor.crc32c:
        raise DataLoss(
            f"a tensor of {read_element(tensor.dtype)} {list(tensor.shape)} came damaged: its "
            "CRC-32C differs"
        )


def payload_size(tensor: tensor_pb2.Tensor) -> int:
    """The bytes of a tensor's elements. The payload is not accessed, because that copies it."""
    return math.prod(tensor.shape) * STORAGE[read_element(tensor.dtype)].itemsize


def elements(tensor: tensor_pb2.Tensor, payload: Payload) -> npt.NDArray[np.generic] | None:
    """A read-only view of a raw tensor's elements; None for other encodings.

    Raises ServerError if shape and length do not match.
    """
    element, shape = read_element(tensor.dtype), _shape(tensor)
    if tensor.encoding != tensor_pb2.ENCODING_RAW:
        return None
    array = stored(_sized(payload, payload_size(tensor), tensor), element, shape)
    array.flags.writeable = False
    return array


def _shape(tensor: tensor_pb2.Tensor) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    extents = 1
    for extent in shape:
        extents *= max(extent, 1)
    if len(shape) > _MAX_RANK or extents > _MAX_ELEMENTS:
        raise ServerError(f"no tensor has the shape {list(shape)}")
    return shape


def _read(tensor: tensor_pb2.Tensor, payload: Payload) -> Decoded:
    element = read_element(tensor.dtype)
    name = _NAMES.get(tensor.encoding)
    if name is None:
        raise ServerError(f"the server sent encoding {tensor.encoding}, which needs a newer client")
    shape = _shape(tensor)
    if name == "raw" or name == "lz4_planes":
        size = payload_size(tensor)
        raw = name == "raw"
        data = _sized(payload, size, tensor) if raw else _unpacked(payload, size, element)
        encoding = RAW if raw else Encoding(name)
        return Decoded(widened(data, element, shape), encoding, None)
    if not shape:
        raise ServerError(f"{name} holds rows, not a single number")
    encoding = _quantization(tensor, name, shape[-1])
    if name == "topk8":
        size = math.prod(shape[:-1]) * (8 + 5 * (encoding.kept or 0))
        try:
            values, error = decode_topk8(_sized(payload, size, tensor), shape, encoding.kept or 0)
        except ValueError as damage:
            raise ServerError(str(damage)) from damage
    else:
        size = math.prod(shape[:-1]) * (8 + shape[-1])
        values, error = decode_full8(_sized(payload, size, tensor), shape)
    return Decoded(values, encoding, error)


def _sized(payload: Payload, size: int, tensor: tensor_pb2.Tensor) -> Payload:
    if len(payload) != size:
        shape = list(tensor.shape)
        raise ServerError(
            f"a tensor of {read_element(tensor.dtype)} {shape} has {len(payload)} bytes, not {size}"
        )
    return payload


def _unpacked(payload: Payload, size: int, element: Element) -> bytes:
    """Decompresses byte planes in an LZ4 frame, which must hold exactly ``size`` bytes."""
    try:
        return byte_planes.decompress(payload, size, STORAGE[element].itemsize)
    except ValueError as error:
        raise ServerError(f"a tensor in lz4_planes is {error}") from error


def _quantization(tensor: tensor_pb2.Tensor, name: EncodingName, last: int) -> Encoding:
    if name == "full8":
        return Encoding(name)
    message = tensor.quantization
    seed = message.seed if message.HasField("seed") else None
    fits = message.width == last if name == "topk8" else message.kept == last and seed is not None
    if not (fits and 1 <= message.kept <= message.width):
        described = "no seed" if seed is None else f"seed {seed}"
        raise ServerError(
            f"rows of {last} numbers are no {name} of kept {message.kept}, width {message.width}, "
            f"{described}"
        )
    return Encoding(name, message.kept, message.width, seed if name == "rp8" else None)
