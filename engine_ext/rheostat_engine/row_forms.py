"""In which form captured rows leave the device, where whole rows are more than anybody wants.

Invariant: a form and a row decide the bytes; every row of a form has the same number of them, and
stands by itself. A row may leave as it is whatever its form: whoever reads it looks at the key.
"""

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

RAW_KEY = b""
"""The key of rows that left as they are."""

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element, by the name of its type."""


class Coding(IntEnum):
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
    """What rows are projected on: number i is x.d, d a row of vector i, as it is."""

    vectors: tuple[bytes, ...]
    """SHA-256 of each vector's content; at least one."""
    rows: tuple[int, ...]
    """Which row of it."""


@dataclass(frozen=True)
class RowForm:
    """A form of rows."""

    coding: Coding
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
        """Made once: directions are many."""
        return hash(self.key)

    def numbers(self, width: int) -> int:
        """How many numbers are coded of a row of `width`, before RP8 and TOPK8 choose."""
        return len(self.directions.vectors) if self.directions is not None else width

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` numbers."""
        if self.coding is Coding.CAST:
            return self.numbers(width) * ITEM_BYTES[self.dtype]
        if self.coding is Coding.TOPK8:
            return 8 + 5 * self.kept
        return 8 + (self.kept if self.coding is Coding.RP8 else self.numbers(width))

    @cached_property
    def key(self) -> bytes:
        """Tells it from every other form; 16 bytes."""
        said = hashlib.sha256(repr((int(self.coding), self.dtype, self.kept, self.seed)).encode())
        if self.directions is not None:
            said.update(b"".join(self.directions.vectors))
            said.update(repr(self.directions.rows).encode())
        return said.digest()[:16]
