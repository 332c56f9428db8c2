"""Tensors as they travel, read back as float32: every encoding of tensor.proto, byte for byte.

Invariant: checksum, shape and length are checked before a number is made, and no more is
decompressed than the shape asks for. Numbers of every dtype become float32 and are not rounded
further, so what is lost in a lossy encoding is at most what `max_error` says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

import google_crc32c
import lz4.frame
import numpy as np
import numpy.typing as npt

from rheostat._arrays import Element, FloatArray, itemsize, read_element, stored, widened
from rheostat._errors import DataLoss, ServerError
from rheostat_wire.v1 import tensor_pb2

EncodingName: TypeAlias = Literal["raw", "lz4_planes", "full8", "rp8", "topk8"]
"""Names of encodings."""

_Payload: TypeAlias = "bytes | npt.NDArray[np.uint8]"
_Codes = npt.NDArray[np.uint8]
_Doubles = npt.NDArray[np.float64]

_NAMES: dict[tensor_pb2.Encoding.ValueType, EncodingName] = {
    tensor_pb2.ENCODING_RAW: "raw",
    tensor_pb2.ENCODING_LZ4_PLANES: "lz4_planes",
    tensor_pb2.ENCODING_FULL8: "full8",
    tensor_pb2.ENCODING_RP8: "rp8",
    tensor_pb2.ENCODING_TOPK8: "topk8",
}
WIRE_ENCODINGS: dict[str, tensor_pb2.Encoding.ValueType] = {
    name: number for number, name in _NAMES.items()
}
"""Their values on the wire."""

_MAX_RANK = 8
_MAX_ELEMENTS = 2**48
_LZ4_RATIO = 255
"""A byte of an LZ4 frame stands for at most so many."""


@dataclass(frozen=True)
class Encoding:
    """How rows travelled, and what it takes to read more out of them."""

    name: EncodingName = "raw"
    """"raw" and "lz4_planes" are exact; "full8" keeps 8 bits per number, "topk8" those of the
    largest numbers, "rp8" those of a random projection, which is then what the rows are."""
    kept: int | None = None
    """K of "rp8" and "topk8": numbers kept per row."""
    width: int | None = None
    """W of "rp8" and "topk8": numbers per row before the encoding."""
    seed: int | None = None
    """Seed of the projection of "rp8": see `projection_matrix`."""

    @property
    def exact(self) -> bool:
        """Whether every bit is as it was."""
        return self.name in ("raw", "lz4_planes")


RAW = Encoding()
"""Numbers as they are."""


class Decoded(NamedTuple):
    """A tensor's numbers and how far they can be off."""

    values: FloatArray
    """float32 of the tensor's shape."""
    encoding: Encoding
    """How they travelled."""
    max_error: FloatArray | None
    """Largest difference per row, float32 [all of shape but the last]; NaN if a row had numbers
    that were not finite. None: exact."""


class Numbers(Protocol):
    """A tensor's numbers, as `Decoded` has them."""

    @property
    def values(self) -> FloatArray:
        """float32 of the tensor's shape."""

    @property
    def encoding(self) -> Encoding:
        """How they travelled."""

    @property
    def max_error(self) -> FloatArray | None:
        """Largest difference per row."""


def read_tensor(tensor: tensor_pb2.Tensor) -> Decoded:
    """An inline tensor in any encoding.

    Raises ServerError if its parts do not fit together, DataLoss if the checksum is wrong.
    """
    if tensor.WhichOneof("payload") != "inline":
        raise ServerError("the server sent a tensor that is not inline")
    return decoded(tensor, tensor.inline)


def decoded(tensor: tensor_pb2.Tensor, payload: _Payload) -> Decoded:
    """The numbers of a tensor whose payload is at hand, wherever it lay.

    Raises ServerError if its parts do not fit together, DataLoss if the checksum is wrong.
    """
    checked(tensor, payload)
    return _read(tensor, payload)


def decoded_in_place(tensor: tensor_pb2.Tensor, payload: _Payload) -> Decoded:
    """As `decoded`, of a payload that others may write to: it is checked after it was read."""
    try:
        found = _read(tensor, payload)
    except ServerError:
        checked(tensor, payload)
        raise
    checked(tensor, payload)
    return found


def checked(tensor: tensor_pb2.Tensor, payload: _Payload) -> None:
    """Raises DataLoss if the checksum is wrong."""
    if tensor.HasField("crc32c") and google_crc32c.value(payload) != tensor.crc32c:
        raise DataLoss(
            f"a tensor of {read_element(tensor.dtype)} {list(tensor.shape)} came damaged: its "
            "CRC-32C differs"
        )


def payload_size(tensor: tensor_pb2.Tensor) -> int:
    """Bytes that a raw tensor's payload must have; asking for the payload would copy it."""
    element = read_element(tensor.dtype)
    return math.prod(tensor.shape) * itemsize(element)


def elements(tensor: tensor_pb2.Tensor, payload: _Payload) -> npt.NDArray[np.generic] | None:
    """The elements of a raw tensor where they lie, read-only; None for other encodings.

    Raises ServerError if its parts do not fit together.
    """
    element, shape = read_element(tensor.dtype), _shape(tensor)
    if tensor.encoding != tensor_pb2.ENCODING_RAW:
        return None
    found = stored(_sized(payload, payload_size(tensor), tensor), element, shape)
    found.flags.writeable = False
    return found


def _shape(tensor: tensor_pb2.Tensor) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    extents = math.prod(max(extent, 1) for extent in shape)
    if len(shape) > _MAX_RANK or extents > _MAX_ELEMENTS:
        raise ServerError(f"no tensor has the shape {list(shape)}")
    return shape


def _read(tensor: tensor_pb2.Tensor, payload: _Payload) -> Decoded:
    element = read_element(tensor.dtype)
    name = _NAMES.get(tensor.encoding)
    if name is None:
        raise ServerError(f"the server sent encoding {tensor.encoding}, which is not known")
    shape = _shape(tensor)
    if name == "raw" or name == "lz4_planes":
        size = math.prod(shape) * itemsize(element)
        raw = name == "raw"
        data = _sized(payload, size, tensor) if raw else _unpacked(payload, size, element)
        return Decoded(widened(data, element, shape), Encoding(name), None)
    if not shape:
        raise ServerError(f"{name} holds rows, not a single number")
    encoding = _quantization(tensor, name, shape[-1])
    if name == "topk8":
        size = math.prod(shape[:-1]) * (8 + 5 * (encoding.kept or 0))
        values, error = _topk8(_sized(payload, size, tensor), shape, encoding.kept or 0)
    else:
        size = math.prod(shape[:-1]) * (8 + shape[-1])
        values, error = _full8(_sized(payload, size, tensor), shape)
    return Decoded(values, encoding, error)


def _sized(payload: _Payload, size: int, tensor: tensor_pb2.Tensor) -> _Payload:
    if len(payload) != size:
        shape = list(tensor.shape)
        raise ServerError(
            f"a tensor of {read_element(tensor.dtype)} {shape} has {len(payload)} bytes, not {size}"
        )
    return payload


def _unpacked(payload: _Payload, size: int, element: Element) -> bytes:
    """The elements of byte planes in an LZ4 frame, which must hold exactly ``size`` bytes."""
    planes = b""
    if size <= _LZ4_RATIO * len(payload):
        try:
            frame = lz4.frame.LZ4FrameDecompressor()
            # One byte of room more lets the frame come to its end, or show that it is too long.
            planes = frame.decompress(payload, max_length=size + 1)
        except (RuntimeError, EOFError) as error:
            raise ServerError(f"a tensor in lz4_planes is no LZ4 frame: {error}") from error
        if not frame.eof or frame.unused_data:
            raise ServerError(f"a tensor in lz4_planes is no single LZ4 frame of {size} bytes")
    if len(planes) != size:
        raise ServerError(f"a tensor in lz4_planes of {size} bytes is a frame of another length")
    count = itemsize(element)
    parts = np.frombuffer(planes, np.uint8).reshape(count, -1)
    unsigned = np.dtype(f"<u{count}")
    joined = parts[0].astype(unsigned)
    for number in range(1, count):
        joined |= parts[number].astype(unsigned) << unsigned.type(8 * number)
    return bytes(joined.data)


def _quantization(tensor: tensor_pb2.Tensor, name: EncodingName, last: int) -> Encoding:
    said = tensor.quantization
    if name == "full8":
        return Encoding(name)
    if name == "rp8":
        if not (said.kept == last and 1 <= said.kept <= said.width and said.HasField("seed")):
            raise ServerError(f"rows of {last} numbers are no rp8 of {_described(said)}")
        return Encoding(name, said.kept, said.width, said.seed)
    if not (said.width == last and 1 <= said.kept <= said.width):
        raise ServerError(f"rows of {last} numbers are no topk8 of {_described(said)}")
    return Encoding(name, said.kept, said.width)


def _described(said: tensor_pb2.Quantization) -> str:
    seed = f"seed {said.seed}" if said.HasField("seed") else "no seed"
    return f"kept {said.kept}, width {said.width}, {seed}"


def _full8(payload: _Payload, shape: tuple[int, ...]) -> tuple[FloatArray, FloatArray]:
    count = math.prod(shape[:-1])
    scales, offsets = _ranges(payload, count)
    codes = np.frombuffer(payload, np.uint8, offset=8 * count).reshape(count, shape[-1])
    values = _numbers(scales, offsets, codes)
    return values.reshape(shape), _error(scales, offsets).reshape(shape[:-1])


def _topk8(payload: _Payload, shape: tuple[int, ...], kept: int) -> tuple[FloatArray, FloatArray]:
    count, width = math.prod(shape[:-1]), shape[-1]
    scales, offsets = _ranges(payload, count)
    indices = np.frombuffer(payload, "<u4", count * kept, 8 * count).reshape(count, kept)
    if (indices[:, 1:] <= indices[:, :-1]).any() or (indices[:, -1:] >= width).any():
        raise ServerError(f"indices of topk8 do not ascend below {width}")
    codes = np.frombuffer(payload, np.uint8, offset=(8 + 4 * kept) * count).reshape(count, kept)
    numbers = _numbers(scales, offsets, codes)
    values = np.zeros((count, width), np.float32)
    np.put_along_axis(values, indices.astype(np.intp), numbers, axis=1)
    error = _error(scales, offsets)
    if kept < width:  # what is missing is no larger than the smallest that is there
        error = _upwards(np.abs(numbers).min(axis=1).astype(np.float64) + error)
    return values.reshape(shape), error.reshape(shape[:-1])


def _ranges(payload: _Payload, count: int) -> tuple[_Doubles, _Doubles]:
    """Scales and offsets, [count] each."""
    both = np.frombuffer(payload, "<f4", 2 * count).astype(np.float64)
    return both[:count], both[count:]


def _numbers(scales: _Doubles, offsets: _Doubles, codes: _Codes) -> FloatArray:
    """offset + scale * code, [rows, numbers], rounded once."""
    numbers = codes.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers *= scales[:, None]
        numbers += offsets[:, None]
        return numbers.astype(np.float32)


def _error(scales: _Doubles, offsets: _Doubles) -> FloatArray:
    """Largest error of a row's numbers, [rows].

    Half a scale, and half of the last place of the row's largest number for the rounding to
    float32. The original is a float32 too, so rounding at most doubles the distance to it.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scales = np.abs(scales)
        reach = np.maximum(np.abs(offsets), np.abs(offsets + 255 * scales))
        _, exponents = np.frexp(reach)
        rounding = np.ldexp(1.0, np.maximum(exponents, -125) - 25)
        return _upwards(np.minimum(scales / 2 + rounding, scales))


def _upwards(bounds: _Doubles) -> FloatArray:
    """As float32, and not below; 0 stays 0."""
    with np.errstate(over="ignore", invalid="ignore"):
        above = np.nextafter(bounds.astype(np.float32), np.float32(np.inf))
    return np.where(bounds == 0, np.float32(0), above)
