"""Captured rows in the encodings of tensor.proto, byte for byte, with their checksum.

Invariant: the exact encodings keep every bit; in the others `offset + scale * code` is within half
a scale of the number, scale and offset being the float32 numbers that travel. A row with a number
that is not finite gets scale and offset NaN and codes 0, so that its reader sees NaN.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple, Protocol

import google_crc32c
import numpy as np
import numpy.typing as npt

from rheostat_server import planes
from rheostat_server.tensors import (
    FloatArray,
    FloatType,
    RawArray,
    converted,
    encode_rows,
    widened,
)
from rheostat_wire.v1 import tensor_pb2

CodeArray = npt.NDArray[np.uint8]

_MATRICES = 4
"""Matrices of RP8 that are kept; the largest of a model of width 4096 has 64 MiB."""

_AT_ONCE = 1 << 15
"""Numbers that are turned into codes at once: their float64 copies fit a core's cache."""


class RowEncoder(Protocol):
    """Turns rows [..., W] into a tensor."""

    def __call__(self, rows: RawArray, *, held: FloatType, wanted: FloatType) -> tensor_pb2.Tensor:
        """The tensor of rows that are held in one type and wanted in another."""


@dataclass(frozen=True, slots=True)
class Form:
    """How a capture's rows travel."""

    encoding: tensor_pb2.Encoding.ValueType = tensor_pb2.ENCODING_RAW
    """Which encoding."""
    kept: int = 0
    """K of RP8 and TOPK8."""
    seed: int = 0
    """Seed of RP8."""

    def encode(self, rows: RawArray, *, held: FloatType, wanted: FloatType) -> tensor_pb2.Tensor:
        """The tensor of rows [..., W] that are held in one type and wanted in another."""
        encoder = row_encoder(self.encoding, width=rows.shape[-1], kept=self.kept, seed=self.seed)
        return encoder(rows, held=held, wanted=wanted)

    @property
    def coded(self) -> bool:
        """Whether numbers travel as codes."""
        return self.encoding in _CODED

    def codes(self, rows: FloatArray) -> CodeArray:
        """Rows [n, W] in one of the coded encodings, each by itself, as the engine makes them."""
        if self.encoding == tensor_pb2.ENCODING_TOPK8:
            payload, edges = topk8(rows, self.kept), _edges(self.kept)
        else:
            if self.encoding == tensor_pb2.ENCODING_RP8:
                with np.errstate(over="ignore", invalid="ignore"):
                    rows = rows @ _cached_matrix(self.kept, rows.shape[1], self.seed).T
            payload, edges = full8(rows), _edges()
        starts = [len(rows) * edge for edge in edges]
        parts = pairwise([*starts, len(payload)])
        columns = [np.frombuffer(payload[a:b], np.uint8).reshape(len(rows), -1) for a, b in parts]
        return np.concatenate(columns, axis=1)

    def tensor_of_codes(self, rows: CodeArray, width: int, wanted: FloatType) -> tensor_pb2.Tensor:
        """The tensor of rows [..., bytes] that are coded each by itself, W numbers before that."""
        kept = self.kept if self.encoding == tensor_pb2.ENCODING_TOPK8 else 0
        payload = laid_out(rows.reshape(-1, rows.shape[-1]), kept)
        return self.tensor(payload, (*rows.shape[:-1], width), wanted)

    def tensor(
        self, payload: bytes, shape: tuple[int, ...], wanted: FloatType
    ) -> tensor_pb2.Tensor:
        """The tensor of rows [..., W] that are coded in a payload."""
        *labels, width = shape
        projects = self.encoding == tensor_pb2.ENCODING_RP8
        last = self.kept if projects else width
        sent = _tensor(self.encoding, wanted, (*labels, last), payload)
        if self.kept:
            said = tensor_pb2.Quantization(kept=self.kept, width=width)
            if projects:
                said.seed = self.seed
            sent.quantization.CopyFrom(said)
        return sent

    def row_bytes(self, width: int, kind: FloatType) -> int:
        """Bytes of payload of a row, at most."""
        if self.encoding == tensor_pb2.ENCODING_FULL8:
            return 8 + width
        if self.encoding == tensor_pb2.ENCODING_RP8:
            return 8 + self.kept
        if self.encoding == tensor_pb2.ENCODING_TOPK8:
            return 8 + 5 * self.kept
        if self.encoding == tensor_pb2.ENCODING_LZ4_PLANES:
            return planes.most(width * kind.itemsize)
        return width * kind.itemsize

    def work(self, width: int) -> int:
        """Bytes that encoding goes over beside the rows; see `offload`."""
        return 4 * self.kept * width if self.encoding == tensor_pb2.ENCODING_RP8 else 0


AS_THEY_ARE = Form()
"""ENCODING_RAW."""

_CODED = (tensor_pb2.ENCODING_FULL8, tensor_pb2.ENCODING_RP8, tensor_pb2.ENCODING_TOPK8)


class Codes(NamedTuple):
    """Rows of 8-bit codes: a number is about `offset + scale * code`."""

    scales: FloatArray
    """[n]."""
    offsets: FloatArray
    """[n]."""
    codes: CodeArray
    """[n, numbers]."""


def row_encoder(
    encoding: tensor_pb2.Encoding.ValueType, *, width: int, kept: int = 0, seed: int = 0
) -> RowEncoder:
    """What encodes the rows of a capture.

    Args:
        encoding: a known one.
        width: W of the rows.
        kept: K of RP8 and TOPK8, 1 to W.
        seed: of RP8.
    """
    if encoding == tensor_pb2.ENCODING_RAW:
        return encode_rows
    if encoding == tensor_pb2.ENCODING_LZ4_PLANES:
        return _lz4_planes
    if encoding == tensor_pb2.ENCODING_FULL8:
        return _full8
    if encoding == tensor_pb2.ENCODING_RP8:
        return partial(_rp8, _cached_matrix(kept, width, seed), seed)
    return partial(_topk8, kept)


def quantised(rows: FloatArray) -> Codes:
    """Codes over each row's own range. Shape [n, numbers], at least one number."""
    low, high = rows.min(axis=1), rows.max(axis=1)
    with np.errstate(invalid="ignore"):
        scales = _scales(high.astype(np.float64) - low)
    finite = np.isfinite(scales)
    offsets = np.where(finite, low + np.float32(0), np.float32(np.nan))  # -0 becomes 0
    codes = np.empty(rows.shape, np.uint8)
    divisors = np.where(scales > 0, scales, 1).astype(np.float64)
    for part in _parts(rows):
        steps = rows[part].astype(np.float64)
        with np.errstate(invalid="ignore"):
            steps -= offsets[part, None]
        steps /= divisors[part, None]
        np.rint(steps, out=steps)
        steps[~finite[part]] = 0
        codes[part] = np.minimum(steps, 255, out=steps)
    return Codes(scales, offsets, codes)


def _scales(ranges: npt.NDArray[np.float64]) -> FloatArray:
    """The largest float32 whose 255th multiple is not above the range, so that none overflows.

    Among denormal numbers that may not reach the range's end to half a scale; then the next one.
    """
    ranges = np.where(np.isfinite(ranges), ranges, np.nan)
    scales = (ranges / 255).astype(np.float32)
    scales = np.where(scales > ranges / 255, np.nextafter(scales, np.float32(0)), scales)
    short = scales.astype(np.float64) * 255.5 < ranges
    return np.where(short, np.nextafter(scales, np.float32(np.inf)), scales)


def _parts(rows: FloatArray) -> Iterator[slice]:
    step = max(1, _AT_ONCE // rows.shape[1])
    return (slice(start, start + step) for start in range(0, len(rows), step))


def full8(rows: FloatArray) -> bytes:
    """n scales, n offsets, n * W codes."""
    found = quantised(rows)
    return _floats(found.scales) + _floats(found.offsets) + found.codes.tobytes()


def topk8(rows: FloatArray, kept: int) -> bytes:
    """n scales, n offsets, n * K indices, n * K codes.

    Of equal magnitudes the lower index is kept. NaN and infinities are larger than any number.
    """
    indices = largest(rows, kept)
    found = quantised(np.take_along_axis(rows, indices, axis=1))
    head = _floats(found.scales) + _floats(found.offsets)
    return head + indices.astype("<u4").tobytes() + found.codes.tobytes()


def largest(rows: FloatArray, kept: int) -> npt.NDArray[np.intp]:
    """Ascending indices of each row's K elements of largest magnitude, [n, K]."""
    count, width = rows.shape
    magnitudes = np.ascontiguousarray(rows).view(np.uint32) & np.uint32(0x7FFFFFFF)
    least = np.partition(magnitudes, width - kept, axis=1)[:, width - kept, None]
    above, equal = magnitudes > least, magnitudes == least
    room = kept - above.sum(axis=1, keepdims=True)
    taken = above | (equal & (equal.cumsum(axis=1) <= room))
    return np.nonzero(taken)[1].reshape(count, kept)


def projection_matrix(kept: int, width: int, seed: int) -> FloatArray:
    """The [K, W] matrix of RP8: `Quantization.seed` says how it is made."""
    state = np.arange(1, kept * width + 1, dtype=np.uint64)
    state *= np.uint64(0x9E3779B97F4A7C15)
    state += np.uint64(seed)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state ^= state >> np.uint64(shift)
        state *= np.uint64(factor)
    odd = (state ^ (state >> np.uint64(31))) & np.uint64(1)
    size = np.float32(1 / math.sqrt(kept))
    return np.where(odd == 0, size, -size).reshape(kept, width)


_cached_matrix = lru_cache(maxsize=_MATRICES)(projection_matrix)


def laid_out(rows: CodeArray, kept: int = 0) -> bytes:
    """Rows [n, bytes] that are coded each by itself as tensor.proto lays them out, part by part.

    `kept` is K of TOPK8, whose rows hold indices.
    """
    edges = [*(_edges(kept) if kept else _edges()), rows.shape[1]]
    return b"".join(rows[:, start:end].tobytes() for start, end in pairwise(edges))


def _edges(kept: int | None = None) -> list[int]:
    """Where the parts of a coded row begin: scale, offset, K indices if there are any, codes."""
    return [0, 4, 8] if kept is None else [0, 4, 8, 8 + 4 * kept]


def _floats(values: FloatArray) -> bytes:
    return values.astype("<f4").tobytes()


def _lz4_planes(rows: RawArray, *, held: FloatType, wanted: FloatType) -> tensor_pb2.Tensor:
    elements = converted(rows, held=held, wanted=wanted)
    payload = planes.packed(elements.tobytes(), elements.itemsize)
    return _tensor(tensor_pb2.ENCODING_LZ4_PLANES, wanted, rows.shape, payload)


def _full8(rows: RawArray, *, held: FloatType, wanted: FloatType) -> tensor_pb2.Tensor:
    return Form(tensor_pb2.ENCODING_FULL8).tensor(full8(_matrix(rows, held)), rows.shape, wanted)


def _rp8(
    matrix: FloatArray, seed: int, rows: RawArray, *, held: FloatType, wanted: FloatType
) -> tensor_pb2.Tensor:
    with np.errstate(over="ignore", invalid="ignore"):
        projections = _matrix(rows, held) @ matrix.T
    form = Form(tensor_pb2.ENCODING_RP8, len(matrix), seed)
    return form.tensor(full8(projections), rows.shape, wanted)


def _topk8(kept: int, rows: RawArray, *, held: FloatType, wanted: FloatType) -> tensor_pb2.Tensor:
    payload = topk8(_matrix(rows, held), kept)
    return Form(tensor_pb2.ENCODING_TOPK8, kept).tensor(payload, rows.shape, wanted)


def _matrix(rows: RawArray, held: FloatType) -> FloatArray:
    """Rows [..., W] as float32 [n, W]."""
    return np.ascontiguousarray(widened(rows, held)).reshape(-1, rows.shape[-1])


def _tensor(
    encoding: tensor_pb2.Encoding.ValueType,
    dtype: FloatType,
    shape: tuple[int, ...],
    payload: bytes,
) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(
        dtype=dtype.wire,
        shape=shape,
        encoding=encoding,
        inline=payload,
        crc32c=google_crc32c.value(payload),
    )
