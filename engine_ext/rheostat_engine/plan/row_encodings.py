"""Encodings in which captured rows leave the device, if no reader wants whole rows.

Invariant: an encoding and a row decide the bytes. All rows of an encoding have the same number of
bytes, and are decoded one by one. A worker may send any row raw, so readers look at the key.
"""

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

RAW_KEY = b""
"""The key of raw rows."""

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element, by the name of its type."""


class Codec(IntEnum):
    """How the numbers of a row become bytes; all little-endian.

    Scale and offset are float32; a number is about offset + scale * code, as tensor.proto says.
    """

    CAST = 1
    """Elements of another type."""
    FULL8 = 2
    """Scale, offset, a code per number."""
    RP8 = 3
    """As FULL8, of the random projection to K numbers that a seed determines."""
    TOPK8 = 4
    """Scale, offset, K indices (uint32, ascending), K codes: the largest numbers."""


@dataclass(frozen=True, slots=True)
class Directions:
    """The directions on which rows are projected: number i is x.d, where d is a row of vector i."""

    vectors: tuple[bytes, ...]
    """SHA-256 of each vector's content; at least one."""
    rows: tuple[int, ...]
    """The row of each vector."""


@dataclass(frozen=True)
class RowEncoding:
    """An encoding of rows."""

    codec: Codec
    """How numbers become bytes."""
    dtype: str = ""
    """CAST: the element type."""
    kept: int = 0
    """K of RP8 and TOPK8."""
    seed: int = 0
    """Of RP8."""
    directions: Directions | None = None
    """If set, the numbers are the row's projection, not the row."""

    def __hash__(self) -> int:
        """The hash of the key, which is computed once because directions may be many."""
        return hash(self.key)

    def numbers(self, width: int) -> int:
        """The numbers of a row of `width` that are encoded, before RP8 and TOPK8 reduce them."""
        return len(self.directions.vectors) if self.directions is not None else width

    def row_bytes(self, width: int) -> int:
        """Bytes of an encoded row of `width` numbers."""
        if self.codec is Codec.CAST:
            return self.numbers(width) * ITEM_BYTES[self.dtype]
        if self.codec is Codec.TOPK8:
            return 8 + 5 * self.kept
        return 8 + (self.kept if self.codec is Codec.RP8 else self.numbers(width))

    @cached_property
    def key(self) -> bytes:
        """16 bytes that differ from those of any other encoding."""
        digest = hashlib.sha256(repr((int(self.codec), self.dtype, self.kept, self.seed)).encode())
        if self.directions is not None:
            digest.update(b"".join(self.directions.vectors))
            digest.update(repr(self.directions.rows).encode())
        return digest.digest()[:16]
