"""Captured rows as tensors in the encodings of tensor.proto, with their checksum."""

from dataclasses import dataclass
from functools import lru_cache

import google_crc32c
import numpy as np

from rheostat_server.tensors import FloatType, converted, widened
from rheostat_wire import byte_planes
from rheostat_wire.dtypes import FloatArray, StoredArray
from rheostat_wire.projection import projection_matrix
from rheostat_wire.quantization import CodeArray, encode_full8, encode_topk8, join_rows, split_rows
from rheostat_wire.v1 import tensor_pb2

_MATRICES = 4
"""Matrices of RP8 that are cached. The largest matrix for a width of 4096 takes 64 MiB."""


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
        if self.coded:
            wide = np.ascontiguousarray(widened(rows, row_type))
            payload = self._coded(wide.reshape(-1, rows.shape[-1]))
        else:
            payload = converted(rows, row_type=row_type, wanted=wanted).tobytes()
            if self.encoding == tensor_pb2.ENCODING_LZ4_PLANES:
                payload = byte_planes.compress(payload, wanted.itemsize)
        return self.tensor(payload, rows.shape, wanted)

    @property
    def coded(self) -> bool:
        """Whether the encoding sends 8-bit codes."""
        return self.encoding in _CODED

    def codes(self, rows: FloatArray) -> CodeArray:
        """Encodes rows [n, W] one by one to [n, bytes], in the layout that the engine makes."""
        kept = self.kept if self.encoding == tensor_pb2.ENCODING_TOPK8 else 0
        return split_rows(self._coded(rows), len(rows), kept)

    def _coded(self, rows: FloatArray) -> bytes:
        """The payload of rows [n, W] in 8-bit codes."""
        if self.encoding == tensor_pb2.ENCODING_TOPK8:
            return encode_topk8(rows, self.kept)
        if self.encoding == tensor_pb2.ENCODING_RP8:
            with np.errstate(over="ignore", invalid="ignore"):
                rows = rows @ _cached_matrix(self.kept, rows.shape[1], self.seed).T
        return encode_full8(rows)

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
        sent = tensor_pb2.Tensor(
            dtype=wanted.wire,
            shape=(*labels, last),
            encoding=self.encoding,
            inline=payload,
            crc32c=google_crc32c.value(payload),
        )
        if projects or self.encoding == tensor_pb2.ENCODING_TOPK8:
            sent.quantization.kept, sent.quantization.width = self.kept, width
            if projects:
                sent.quantization.seed = self.seed
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


_cached_matrix = lru_cache(maxsize=_MATRICES)(projection_matrix)
