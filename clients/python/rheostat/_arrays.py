"""Numbers on the wire and in numpy: little-endian row-major bytes, widened to float32 exactly.

numpy has no bfloat16, so its bits are stored in uint16; see `rheostat_wire.dtypes`. An array whose
dtype has the name "bfloat16" (ml_dtypes) is read in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from rheostat._errors import ServerError, invalid
from rheostat_wire.digests import vector_digest
from rheostat_wire.dtypes import FROM_WIRE, STORAGE, TO_WIRE, DtypeName, FloatArray, narrow, widen
from rheostat_wire.v1 import tensor_pb2

Element: TypeAlias = DtypeName
"""Element types of vectors and rows."""


class ArrayLike(Protocol):
    """An array, or an object with ``__array__`` that numpy can read, such as a CPU tensor."""

    def __array__(self) -> npt.NDArray[np.generic]:
        """The numbers."""


@runtime_checkable
class _Tensor(Protocol):
    """The methods of a torch tensor that lead to numpy, so that torch need not be imported."""

    def detach(self) -> _Tensor: ...
    def cpu(self) -> _Tensor: ...
    def numpy(self) -> npt.NDArray[np.generic]: ...
    def float(self) -> _Tensor: ...


@dataclass(frozen=True)
class VectorData:
    """The numbers of a vector as they are sent: rows of equal width, all finite."""

    element: Element
    shape: tuple[int, int]
    """[rows, width]."""
    data: bytes
    """The elements, little-endian, row-major."""

    @property
    def digest(self) -> bytes:
        """SHA-256 of the canonical form that `VectorRef` in steering.proto defines, 32 bytes."""
        return vector_digest(self.element, *self.shape, self.data)

    @property
    def values(self) -> FloatArray:
        """The numbers as float32 [rows, width]; widening is exact."""
        return widened(self.data, self.element, self.shape)

    def select(self, rows: Sequence[int]) -> VectorData:
        """A vector of these rows, in this order."""
        size = len(self.data) // self.shape[0]
        data = b"".join(self.data[row * size : (row + 1) * size] for row in rows)
        return VectorData(self.element, (len(rows), self.shape[1]), data)

    def to_tensor(self) -> tensor_pb2.Tensor:
        """The message that carries the numbers inline."""
        return raw_tensor(self.element, self.shape, self.data)


def raw_tensor(element: Element, shape: tuple[int, ...], data: bytes) -> tensor_pb2.Tensor:
    """The message that carries elements, little-endian and row-major, inline."""
    return tensor_pb2.Tensor(
        dtype=TO_WIRE[element], shape=shape, encoding=tensor_pb2.ENCODING_RAW, inline=data
    )


def stored(
    data: bytes | npt.NDArray[np.uint8], element: Element, shape: tuple[int, ...]
) -> npt.NDArray[np.generic]:
    """The elements in ``data``, not copied; bfloat16 as its bits, uint16."""
    return np.frombuffer(data, dtype=STORAGE[element]).reshape(shape)


def widened(
    data: bytes | npt.NDArray[np.uint8], element: Element, shape: tuple[int, ...]
) -> FloatArray:
    """A float32 copy of the elements in ``data``, of ``shape``. Every value is exact."""
    return widen(stored(data, element, shape), element)


def vector_data(array: ArrayLike | npt.ArrayLike, dtype: Element | None = None) -> VectorData:
    """The rows of a vector; an array [width] is one row.

    Element types: float32, float16, bfloat16; others (float64, integers) are rounded to float32.
    ``dtype`` converts to that type, except that ``dtype="bfloat16"`` reads uint16 as its bits.
    Raises InvalidRequest for another rank, an empty array, and elements that are not finite.
    """
    numbers = _numpy(array)
    if numbers.dtype.kind in "US":
        raise invalid(
            "vector",
            "a vector is made of numbers, not of texts: engine.vectors.derive(positive, negative, "
            "points=..., layers=...) makes one of two sets of texts",
        )
    if numbers.ndim == 1:
        numbers = numbers[None, :]
    if numbers.ndim != 2 or numbers.size == 0:
        raise invalid(
            "vector", f"a vector is [width] or [rows, width], not {list(numbers.shape)}",
            "REASON_VECTOR_SHAPE",
        )  # fmt: skip
    element, stored = _stored(numbers, dtype)
    rows = VectorData(element, (numbers.shape[0], numbers.shape[1]), stored.tobytes())
    if not np.isfinite(rows.values).all():
        raise invalid(
            "vector", "the vector has elements that are not finite numbers", "REASON_NON_FINITE"
        )
    return rows


def rows_data(
    array: ArrayLike | npt.ArrayLike, rank: int, what: str, dtype: Element | None = None
) -> tuple[Element, npt.NDArray[np.generic]]:
    """The element type and the stored numbers of an array of ``rank`` dimensions, all finite.

    Element types are those of `vector_data`. Raises InvalidRequest otherwise.
    """
    numbers = _numpy(array)
    if numbers.ndim != rank or numbers.size == 0:
        needed = f"{rank} {'dimension' if rank == 1 else 'dimensions'}, none of them empty"
        raise invalid(
            what, f"the array has shape {list(numbers.shape)}; it needs {needed}",
            "REASON_VECTOR_SHAPE",
        )  # fmt: skip
    element, kept = _stored(numbers, dtype)
    if not np.isfinite(widen(kept, element)).all():
        raise invalid(
            what, f"the array has elements that are not finite in {element}", "REASON_NON_FINITE"
        )
    return element, kept


def _numpy(array: object) -> npt.NDArray[np.generic]:
    if not isinstance(array, _Tensor):
        try:
            return np.asarray(array)
        except (TypeError, ValueError) as error:
            raise invalid("vector", f"no numbers can be read from it: {error}") from error
    tensor = array.detach().cpu()
    try:
        return np.asarray(tensor.numpy())
    except TypeError:  # torch.bfloat16 has no numpy type; float32 holds it exactly
        return narrow(np.asarray(tensor.float().numpy(), np.float32), "bfloat16").view(BFLOAT16)


BFLOAT16 = np.dtype([("bfloat16", "<u2")])
"""The dtype of an array of bfloat16 in this client."""


def _stored(
    numbers: npt.NDArray[np.generic], dtype: Element | None
) -> tuple[Element, npt.NDArray[np.generic]]:
    """The element type to send, and the array in the storage type of that element."""
    if numbers.dtype == BFLOAT16 or numbers.dtype.name == "bfloat16":
        bits = numbers.view(np.uint16)
        if dtype in (None, "bfloat16"):
            return "bfloat16", bits.astype("<u2")
        numbers = widen(bits, "bfloat16")
    if dtype == "bfloat16":
        if (numbers.dtype.kind, numbers.dtype.itemsize) == ("u", 2):
            return "bfloat16", numbers.astype("<u2")
        return "bfloat16", narrow(_floats(numbers).astype(np.float32), "bfloat16")
    element: Element = dtype or ("float16" if numbers.dtype == np.float16 else "float32")
    if element not in STORAGE:
        names = ", ".join(STORAGE)
        raise invalid("vector", f"vectors are {names}, not {element}")
    with np.errstate(over="ignore"):
        return element, _floats(numbers).astype(STORAGE[element])


def _floats(numbers: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Returns ``numbers``. Raises InvalidRequest unless the dtype is real."""
    if numbers.dtype.kind not in "fiu":
        raise invalid("vector", f"a vector holds real numbers, not {numbers.dtype}")
    return numbers


def read_element(number: tensor_pb2.Dtype.ValueType) -> Element:
    """The element type of an enum value. Raises ServerError if rows cannot have the type."""
    element = FROM_WIRE.get(number)
    if element is None:
        raise ServerError(f"the server sent elements of type {number}, which rows cannot have")
    return element
