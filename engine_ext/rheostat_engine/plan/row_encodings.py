"""Encodings of captured rows on the device, used if no reader wants raw rows.

Invariant: the bytes depend only on the encoding and the row. All rows of an encoding have the same
size, and each is decoded alone. A worker may send any row raw, so readers must check the key.
"""

import hashlib
import struct
from dataclasses import dataclass
from enum import IntEnum

from rheostat_engine.cached_property import cached_property
from rheostat_engine.plan.gates import Readout

RAW_KEY = b""
"""The `RowEncoding.key` of raw rows."""

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element, by dtype."""


class Codec(IntEnum):
    """How the numbers of a row become little-endian bytes.

    Scale and offset are float32. A number is about offset + scale * code; see tensor.proto.
    """

    CAST = 1
    """Elements of another dtype."""
    FULL8 = 2
    """Scale, offset, and one code per number."""
    RP8 = 3
    """FULL8 of a random projection to K numbers, which the seed determines."""
    TOPK8 = 4
    """Scale, offset, K indices (uint32, ascending) and K codes of the K largest numbers."""


@dataclass(frozen=True, slots=True)
class Directions:
    """A projection of rows: number i is x.d, where d is `rows[i]` of vector i."""

    vectors: tuple[bytes, ...]
    """SHA-256 of each vector's content; at least one."""
    rows: tuple[int, ...]
    readouts: tuple[Readout, ...] = ()
    """What number i is instead of x.d; empty: x.d for all."""


@dataclass(frozen=True)
class RowEncoding:
    """An encoding of rows."""

    codec: Codec
    dtype: str = ""
    """CAST: the element type."""
    kept: int = 0
    """K of RP8 and TOPK8."""
    seed: int = 0
    """Of RP8."""
    directions: Directions | None = None
    """If set, the row's projection is encoded in place of the row."""

    def __hash__(self) -> int:
        return hash(self.key)  # cached, because there may be many directions

    def numbers(self, width: int) -> int:
        """Numbers of a row of width W before RP8 and TOPK8 reduce them."""
        return len(self.directions.vectors) if self.directions is not None else width

    def row_bytes(self, width: int) -> int:
        """Bytes of an encoded row of width W."""
        if self.codec is Codec.CAST:
            return self.numbers(width) * ITEM_BYTES[self.dtype]
        if self.codec is Codec.TOPK8:
            return 8 + 5 * self.kept
        return 8 + (self.kept if self.codec is Codec.RP8 else self.numbers(width))

    @cached_property
    def key(self) -> bytes:
        """16 bytes that identify the encoding."""
        digest = hashlib.sha256(repr((int(self.codec), self.dtype, self.kept, self.seed)).encode())
        if self.directions is not None:
            digest.update(b"".join(self.directions.vectors))
            digest.update(repr(self.directions.rows).encode())
            for readout in self.directions.readouts:
                digest.update(struct.pack("<qqdd", *readout))
        return digest.digest()[:16]
