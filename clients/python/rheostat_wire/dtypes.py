"""Element types of rows and vectors: how numpy stores them, and conversion to and from float32.

Elements are little-endian. numpy has no bfloat16: its 16 bits are stored in uint16. They are the
upper half of a float32, so that widening is exact.
"""

from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rheostat_wire.v1 import tensor_pb2

FloatArray: TypeAlias = npt.NDArray[np.float32]
"""float32 numbers."""
StoredArray: TypeAlias = npt.NDArray[np.generic]
"""Elements as numpy stores their type."""
DtypeName: TypeAlias = Literal["float32", "float16", "bfloat16"]
"""Names of the types that rows and vectors can have."""

STORAGE: dict[DtypeName, np.dtype[np.generic]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}
"""How numpy stores an element."""

TO_WIRE: dict[DtypeName, tensor_pb2.Dtype.ValueType] = {
    "float32": tensor_pb2.DTYPE_FLOAT32,
    "float16": tensor_pb2.DTYPE_FLOAT16,
    "bfloat16": tensor_pb2.DTYPE_BFLOAT16,
}
"""Values of the wire's enum."""

FROM_WIRE = {value: name for name, value in TO_WIRE.items()}
"""Names by value of the wire's enum."""

_CHUNK = 1 << 18
"""Elements that are widened at a time: they fit a core's cache."""
_NAN = np.uint16(0x7FC0)
"""A bfloat16 that is not a number."""


def widen(stored: StoredArray, dtype: DtypeName) -> FloatArray:
    """A float32 copy of stored elements, of the same shape. Every value stays exactly as it is."""
    if dtype != "bfloat16":
        return stored.astype(np.float32)
    bits, wide = stored.reshape(-1), np.empty(stored.size, np.uint32)
    for start in range(0, len(wide), _CHUNK):
        chunk = wide[start : start + _CHUNK]
        chunk[...] = bits[start : start + _CHUNK]
        chunk <<= np.uint32(16)
    return wide.view(np.float32).reshape(stored.shape)


def narrow(values: FloatArray, dtype: DtypeName) -> StoredArray:
    """float32 numbers in another type, rounded to nearest, ties to even.

    Numbers that are too large become infinite. NaN stays NaN.
    """
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(STORAGE[dtype])
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), _NAN, rounded)
