"""Captured rows as tensors in the encodings of tensor.proto, with their checksum."""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol

import google_crc32c
import numpy as np

from rheostat_server.tensors import FloatType, converted, encode_rows, widened
from rheostat_wire import byte_planes
from rheostat_wire.dtypes import FloatArray, StoredArray
from rheostat_wire.projection import projection_matrix
from rheostat_wire.quantization import CodeArray, encode_full8, encode_topk8, join_rows, split_rows
from rheostat_wire.v1 import tensor_pb2

_MATRICES = 4
"""Matrices of RP8 that are cached. The largest matrix for a width of 4096 takes 64 MiB."""


class RowEncoder(Protocol):
    """Encodes rows [..., W] as a tensor."""

    def __call__(
        self, rows: StoredArray, *, row_type: FloatType, wanted: FloatType
    ) -> tensor_pb2.Tensor:
        """Encodes rows of type `row_type`. The tensor's element type is `wanted`."""


@dataclass(frozen=True, slots=True)
class Form:
    """An encoding of captured rows, with its parameters."""

    encoding: tensor_pb2.Encoding.ValueType = tensor_pb2.ENCODING_RAW
    """The encoding."""
    kept: int = 0
    """K of RP8 and TOPK8."""
    seed: int = 0
    """Seed of RP8."""

    def encode(
        self, rows: StoredArray, *, row_type: FloatType, wanted: FloatType
    ) -> tensor_pb2.Tensor:
        """Encodes rows [..., W] of type `row_type`. The tensor's element type is `wanted`."""
        encoder = row_encoder(self.encoding, width=rows.shape[-1], kept=self.kept, seed=self.seed)
        return encoder(rows, row_type=row_type, wanted=wanted)

    @property
    def coded(self) -> bool:
        """Whether the encoding sends 8-bit codes."""
        return self.encoding in _CODED

    def codes(self, rows: FloatArray) -> CodeArray:
        """Encodes rows [n, W] one by one to [n, bytes], in the layout that the engine makes."""
        if self.encoding == tensor_pb2.ENCODING_TOPK8:
            return split_rows(encode_topk8(rows, self.kept), len(rows), self.kept)
        if self.encoding == tensor_pb2.ENCODING_RP8:
            with np.errstate(over="ignore", invalid="ignore"):
                rows = rows @ _cached_matrix(self.kept, rows.shape[1], self.seed).T
        return split_rows(encode_full8(rows), len(rows))

    def tensor_of_codes(self, rows: CodeArray, width: int, wanted: FloatType) -> tensor_pb2.Tensor:
        """The tensor of rows [..., bytes] that were coded one by one, from `width` numbers each."""
        kept = self.kept if self.encoding == tensor_pb2.ENCODING_TOPK8 else 0
        payload = join_rows(rows.reshape(-1, rows.shape[-1]), kept)
        return self.tensor(payload, (*rows.shape[:-1], width), wanted)

    def tensor(
        self, payload: bytes, shape: tuple[int, ...], wanted: FloatType
    ) -> tensor_pb2.Tensor:
        """The tensor of a payload that encodes rows [..., W]."""
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
        """The most bytes that the payload of one row can take."""
        if self.encoding == tensor_pb2.ENCODING_FULL8:
            return 8 + width
        if self.encoding == tensor_pb2.ENCODING_RP8:
            return 8 + self.kept
        if self.encoding == tensor_pb2.ENCODING_TOPK8:
            return 8 + 5 * self.kept
        if self.encoding == tensor_pb2.ENCODING_LZ4_PLANES:
            return byte_planes.largest_frame(width * kind.itemsize)
        return width * kind.itemsize

    def work(self, width: int) -> int:
        """Bytes that the encoder reads beside the rows; see `offload`."""
        return 4 * self.kept * width if self.encoding == tensor_pb2.ENCODING_RP8 else 0


RAW = Form()
"""ENCODING_RAW."""

_CODED = (tensor_pb2.ENCODING_FULL8, tensor_pb2.ENCODING_RP8, tensor_pb2.ENCODING_TOPK8)


def row_encoder(
    encoding: tensor_pb2.Encoding.ValueType, *, width: int, kept: int = 0, seed: int = 0
) -> RowEncoder:
    """Returns the encoder for the rows of a capture.

    Args:
        encoding: a known encoding.
        width: W of the rows.
        kept: K of RP8 and TOPK8, 1 to W.
        seed: the seed of RP8.
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


_cached_matrix = lru_cache(maxsize=_MATRICES)(projection_matrix)


def _lz4_planes(rows: StoredArray, *, row_type: FloatType, wanted: FloatType) -> tensor_pb2.Tensor:
    elements = converted(rows, row_type=row_type, wanted=wanted)
    payload = byte_planes.compress(elements.tobytes(), elements.itemsize)
    return _tensor(tensor_pb2.ENCODING_LZ4_PLANES, wanted, rows.shape, payload)


def _full8(rows: StoredArray, *, row_type: FloatType, wanted: FloatType) -> tensor_pb2.Tensor:
    return Form(tensor_pb2.ENCODING_FULL8).tensor(
        encode_full8(_matrix(rows, row_type)), rows.shape, wanted
    )


def _rp8(
    matrix: FloatArray, seed: int, rows: StoredArray, *, row_type: FloatType, wanted: FloatType
) -> tensor_pb2.Tensor:
    with np.errstate(over="ignore", invalid="ignore"):
        projections = _matrix(rows, row_type) @ matrix.T
    form = Form(tensor_pb2.ENCODING_RP8, len(matrix), seed)
    return form.tensor(encode_full8(projections), rows.shape, wanted)


def _topk8(
    kept: int, rows: StoredArray, *, row_type: FloatType, wanted: FloatType
) -> tensor_pb2.Tensor:
    payload = encode_topk8(_matrix(rows, row_type), kept)
    return Form(tensor_pb2.ENCODING_TOPK8, kept).tensor(payload, rows.shape, wanted)


def _matrix(rows: StoredArray, row_type: FloatType) -> FloatArray:
    """Rows [..., W] as float32 [n, W]."""
    return np.ascontiguousarray(widened(rows, row_type)).reshape(-1, rows.shape[-1])


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
