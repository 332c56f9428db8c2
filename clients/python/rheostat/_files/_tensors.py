"""Reads tensors of a safetensors file, or single rows and columns of them, and writes such files.

The library checks the whole file: it refuses a header that does not cover the bytes exactly. Rows
are read without the library, because without torch it does not support bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat._arrays import BFLOAT16, Element, VectorData
from rheostat._errors import missing_library
from rheostat._files._about import numbers_of
from rheostat._files._errors import bad_file, unreadable
from rheostat_wire.dtypes import StoredArray

_LENGTH = 8
"""Bytes of the header's length."""

_DTYPES: dict[str, np.dtype[np.generic]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": BFLOAT16,
}


class Tensor(NamedTuple):
    """The place of a tensor in its file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class TensorFile:
    """A complete safetensors file."""

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises InvalidRequest for other files, Refused without the library."""
        try:
            from safetensors import SafetensorError, safe_open
        except ModuleNotFoundError as error:
            raise missing_library("this file format", error, "files") from error
        self.path = path
        try:
            with safe_open(path, framework="np"):
                pass
            with path.open("rb") as file:
                length = int.from_bytes(file.read(_LENGTH), "little")
                header = json.loads(file.read(length))
        except (OSError, SafetensorError) as error:
            raise unreadable(path, error) from error
        self.metadata: Mapping[str, str] = header.pop("__metadata__", {})
        self.tensors: Mapping[str, Tensor] = {
            name: Tensor(entry["dtype"], tuple(entry["shape"]), _LENGTH + length + offsets[0])
            for name, entry in header.items()
            for offsets in (entry["data_offsets"],)
        }

    def whole(self, name: str) -> VectorData:
        """A tensor [width] or [rows, width]. Raises InvalidRequest if it is not a vector."""
        return numbers_of(self.path, self.array(name))

    def row(self, name: str, row: int) -> VectorData:
        """One row of a tensor [rows, width]; the caller checks the number."""
        width = self.tensors[name].shape[1]
        return numbers_of(self.path, self._numbers(name, row * width, (width,)))

    def column(self, name: str, column: int) -> VectorData:
        """One column of a tensor [width, columns]; the caller checks the number."""
        tensor, dtype = self.tensors[name], self._dtype(name)
        mapped = np.memmap(self.path, dtype, "r", tensor.offset, tensor.shape)
        return numbers_of(self.path, np.array(mapped[:, column]))

    def array(self, name: str) -> npt.NDArray[np.generic]:
        """The numbers of a tensor. Raises InvalidRequest if they are not floats."""
        return self._numbers(name, 0, self.tensors[name].shape)

    def _numbers(self, name: str, first: int, shape: tuple[int, ...]) -> npt.NDArray[np.generic]:
        """Elements from number ``first`` on, in this shape."""
        tensor, dtype = self.tensors[name], self._dtype(name)
        count = int(np.prod(shape, dtype=np.int64))
        numbers = np.fromfile(
            self.path, dtype, count, offset=tensor.offset + first * dtype.itemsize
        )
        return numbers.reshape(shape)

    def _dtype(self, name: str) -> np.dtype[np.generic]:
        """The type in which elements are stored."""
        dtype = _DTYPES.get(self.tensors[name].dtype)
        if dtype is None:
            raise bad_file(
                self.path,
                f'has elements of type {self.tensors[name].dtype} in "{name}"',
                "save it as F32, F16 or BF16",
            )
        return dtype


def write_tensors(
    path: Path, tensors: Mapping[str, StoredArray], element: Element, metadata: Mapping[str, str]
) -> None:
    """Write tensors of one element type to a safetensors file; bfloat16 is given as bits."""
    try:
        from safetensors import TensorSpec, serialize
    except ModuleNotFoundError as error:
        raise missing_library("this file format", error, "files") from error
    arrays = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=element, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, array in arrays.items()
    }
    path.write_bytes(serialize(specs, metadata=dict(metadata)))
