"""Quantization of rows to 8-bit codes: FULL8 and TOPK8 of tensor.proto, and the codes of RP8.

A code stands for the number `offset + scale * code`. Each row has its own scale and offset, both
float32. A row with an infinity or a NaN gets scale and offset NaN and codes 0, so that it decodes
to NaN.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rheostat_wire.dtypes import FloatArray

CodeArray: TypeAlias = npt.NDArray[np.uint8]
"""8-bit codes, or bytes."""
Payload: TypeAlias = bytes | npt.NDArray[np.uint8]
"""A tensor's bytes."""

_Doubles: TypeAlias = npt.NDArray[np.float64]

_CHUNK = 1 << 15
"""Numbers that are quantized at a time, so that their float64 copies fit the cache of a core."""
_LARGEST_CODE = 255


class QuantizedRows(NamedTuple):
    """Rows of codes with their scales and offsets."""

    scales: FloatArray
    """[n]."""
    offsets: FloatArray
    """[n]."""
    codes: CodeArray
    """[n, numbers]."""


def quantize(rows: FloatArray) -> QuantizedRows:
    """Quantizes each row over its own range; rows are [n, numbers] with at least one number."""
    low, high = rows.min(axis=1), rows.max(axis=1)
    with np.errstate(invalid="ignore"):
        scales = _scales(high.astype(np.float64) - low)
    finite = np.isfinite(scales)
    offsets = np.where(finite, low + np.float32(0), np.float32(np.nan))  # -0 becomes 0
    codes = np.empty(rows.shape, np.uint8)
    divisors = np.where(scales > 0, scales, 1).astype(np.float64)
    for chunk in _chunks(rows):
        steps = rows[chunk].astype(np.float64)
        with np.errstate(invalid="ignore"):
            steps -= offsets[chunk, None]
        steps /= divisors[chunk, None]
        np.rint(steps, out=steps)
        steps[~finite[chunk]] = 0
        codes[chunk] = np.minimum(steps, _LARGEST_CODE, out=steps)
    return QuantizedRows(scales, offsets, codes)


def _scales(ranges: _Doubles) -> FloatArray:
    """The largest float32 scale for which 255 * scale does not exceed the range of a row.

    A larger scale could make a decoded number infinite. If scales are denormal, 255 * scale may end
    more than half a scale below the range. The next larger float32 is then used.
    """
    ranges = np.where(np.isfinite(ranges), ranges, np.nan)
    scales = (ranges / _LARGEST_CODE).astype(np.float32)
    above = scales > ranges / _LARGEST_CODE
    scales = np.where(above, np.nextafter(scales, np.float32(0)), scales)
    short = scales.astype(np.float64) * (_LARGEST_CODE + 0.5) < ranges
    return np.where(short, np.nextafter(scales, np.float32(np.inf)), scales)


def _chunks(rows: FloatArray) -> Iterator[slice]:
    step = max(1, _CHUNK // rows.shape[1])
    return (slice(start, start + step) for start in range(0, len(rows), step))


def encode_full8(rows: FloatArray) -> bytes:
    """Encodes rows [n, W]: n scales, n offsets, n * W codes."""
    quantized = quantize(rows)
    return _floats(quantized.scales) + _floats(quantized.offsets) + quantized.codes.tobytes()


def encode_topk8(rows: FloatArray, kept: int) -> bytes:
    """Encodes rows [n, W]: n scales, n offsets, n * K indices, n * K codes.

    Of equal magnitudes the lower index is kept. NaN and infinities count as larger than any number.
    """
    indices = largest_indices(rows, kept)
    quantized = quantize(np.take_along_axis(rows, indices, axis=1))
    head = _floats(quantized.scales) + _floats(quantized.offsets)
    return head + indices.astype("<u4").tobytes() + quantized.codes.tobytes()


def largest_indices(rows: FloatArray, kept: int) -> npt.NDArray[np.intp]:
    """Indices of each row's K elements of largest magnitude, ascending, [n, K]."""
    count, width = rows.shape
    magnitudes = np.ascontiguousarray(rows).view(np.uint32) & np.uint32(0x7FFFFFFF)
    least = np.partition(magnitudes, width - kept, axis=1)[:, width - kept, None]
    above, equal = magnitudes > least, magnitudes == least
    places = kept - above.sum(axis=1, keepdims=True)
    taken = above | (equal & (equal.cumsum(axis=1) <= places))
    return np.nonzero(taken)[1].reshape(count, kept)


def parts_of_row(kept: int = 0) -> list[int]:
    """Byte offsets of the parts of a coded row: scale, offset, K indices for TOPK8, codes."""
    return [0, 4, 8, 8 + 4 * kept] if kept else [0, 4, 8]


def join_rows(rows: CodeArray, kept: int = 0) -> bytes:
    """Makes the payload of coded rows [n, bytes], whose layout `parts_of_row` defines.

    `kept` is K for TOPK8, and 0 for FULL8 and RP8, whose rows have no indices.
    """
    edges = [*parts_of_row(kept), rows.shape[1]]
    return b"".join(rows[:, start:end].tobytes() for start, end in pairwise(edges))


def split_rows(payload: bytes, count: int, kept: int = 0) -> CodeArray:
    """Splits a payload into coded rows, [count, bytes]; the inverse of `join_rows`."""
    starts = [count * edge for edge in parts_of_row(kept)]
    parts = pairwise([*starts, len(payload)])
    columns = [np.frombuffer(payload[a:b], np.uint8).reshape(count, -1) for a, b in parts]
    return np.concatenate(columns, axis=1)


def decode_full8(payload: Payload, shape: tuple[int, ...]) -> tuple[FloatArray, FloatArray]:
    """Decodes a payload to numbers of `shape`, and bounds the error of each row, `shape[:-1]`."""
    count = math.prod(shape[:-1])
    scales, offsets = _ranges(payload, count)
    codes = np.frombuffer(payload, np.uint8, offset=8 * count).reshape(count, shape[-1])
    values = _numbers(scales, offsets, codes)
    return values.reshape(shape), _error(scales, offsets).reshape(shape[:-1])


def decode_topk8(
    payload: Payload, shape: tuple[int, ...], kept: int
) -> tuple[FloatArray, FloatArray]:
    """Decodes as `decode_full8` does. Numbers that were not kept are 0; the bound includes them.

    Raises:
        ValueError: the indices of a row do not ascend, or one is not below the width.
    """
    count, width = math.prod(shape[:-1]), shape[-1]
    scales, offsets = _ranges(payload, count)
    indices = np.frombuffer(payload, "<u4", count * kept, 8 * count).reshape(count, kept)
    if (indices[:, 1:] <= indices[:, :-1]).any() or (indices[:, -1:] >= width).any():
        raise ValueError(f"indices of topk8 do not ascend below {width}")
    codes = np.frombuffer(payload, np.uint8, offset=(8 + 4 * kept) * count).reshape(count, kept)
    numbers = _numbers(scales, offsets, codes)
    values = np.zeros((count, width), np.float32)
    np.put_along_axis(values, indices.astype(np.intp), numbers, axis=1)
    error = _error(scales, offsets)
    if kept < width:  # a number that was not kept is at most as large as the smallest kept number
        error = _upwards(np.abs(numbers).min(axis=1).astype(np.float64) + error)
    return values.reshape(shape), error.reshape(shape[:-1])


def _ranges(payload: Payload, count: int) -> tuple[_Doubles, _Doubles]:
    both = np.frombuffer(payload, "<f4", 2 * count).astype(np.float64)
    return both[:count], both[count:]


def _numbers(scales: _Doubles, offsets: _Doubles, codes: CodeArray) -> FloatArray:
    """Computes offset + scale * code, [rows, numbers], rounded once to float32."""
    numbers = codes.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        numbers *= scales[:, None]
        numbers += offsets[:, None]
        return numbers.astype(np.float32)


def _error(scales: _Doubles, offsets: _Doubles) -> FloatArray:
    """A bound on the error of each row's numbers, [rows].

    Quantization adds at most half a scale. Rounding to float32 adds at most half of the last place
    of the row's largest number. The original is a float32 too, so rounding at most doubles the
    distance to it: the bound is never more than a scale.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scales = np.abs(scales)
        reach = np.maximum(np.abs(offsets), np.abs(offsets + _LARGEST_CODE * scales))
        _, exponents = np.frexp(reach)
        rounding = np.ldexp(1.0, np.maximum(exponents, -125) - 25)
        return _upwards(np.minimum(scales / 2 + rounding, scales))


def _upwards(bounds: _Doubles) -> FloatArray:
    """Rounds bounds up to float32; 0 stays 0."""
    with np.errstate(over="ignore", invalid="ignore"):
        above = np.nextafter(bounds.astype(np.float32), np.float32(np.inf))
    return np.where(bounds == 0, np.float32(0), above)


def _floats(values: FloatArray) -> bytes:
    return values.astype("<f4").tobytes()
