"""Element types of rows and vectors: their storage in numpy, and conversion to and from float32.

Elements are little-endian. numpy has no bfloat16, so the 16 bits of an element are stored in
uint16. They are the upper half of a float32, so widening is exact.
"""

from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from rheostat_wire.v1 import tensor_pb2

FloatArray: TypeAlias = npt.NDArray[np.float32]
StoredArray: TypeAlias = npt.NDArray[np.generic]
"""Elements in their numpy storage type; see `STORAGE`."""
DtypeName: TypeAlias = Literal["float32", "float16", "bfloat16"]
"""Names of the element types of rows and vectors."""

STORAGE: dict[DtypeName, np.dtype[np.generic]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}
"""The numpy storage type of each element type."""

TO_WIRE: dict[DtypeName, tensor_pb2.Dtype.ValueType] = {
    "float32": tensor_pb2.DTYPE_FLOAT32,
    "float16": tensor_pb2.DTYPE_FLOAT16,
    "bfloat16": tensor_pb2.DTYPE_BFLOAT16,
}
"""The enum value of each element type on the wire."""

FROM_WIRE = {value: name for name, value in TO_WIRE.items()}
"""The element type of each enum value on the wire."""

_CHUNK = 1 << 18
"""Elements that are widened at a time, so that they fit the cache of a core."""
_QUIET_NAN = np.uint16(0x7FC0)


def widen(stored: StoredArray, dtype: DtypeName) -> FloatArray:
    """Copies stored elements to float32, in the same shape. Every value is exact."""
    if dtype != "bfloat16":
        return stored.astype(np.float32)
    bits, wide = stored.reshape(-1), np.empty(stored.size, np.uint32)
    for start in range(0, len(wide), _CHUNK):
        chunk = wide[start : start + _CHUNK]
        chunk[...] = bits[start : start + _CHUNK]
        chunk <<= np.uint32(16)
    return wide.view(np.float32).reshape(stored.shape)


def narrow(values: FloatArray, dtype: DtypeName) -> StoredArray:
    """Rounds float32 numbers to another type, to nearest, ties to even.

    Numbers that are too large become infinite. NaN stays NaN.
    """
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return values.astype(STORAGE[dtype])
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), _QUIET_NAN, rounded)
