"""The tensors of a safetensors file, or single rows of them.

The library checks the whole file: it refuses a header that does not cover the bytes exactly. Rows
are read without the library, because without torch it does not support bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rheostat._arrays import Element, VectorData
from rheostat._files._about import numbers_of
from rheostat._files._errors import bad_file, missing_library, unreadable

_LENGTH = 8
"""Bytes of the header's length."""

_DTYPES: dict[str, np.dtype[np.generic]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
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
            raise missing_library(error) from error
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
        return self._read(name, 0, self.tensors[name].shape)

    def row(self, name: str, row: int) -> VectorData:
        """One row of a tensor [rows, width]; the caller has checked its number."""
        tensor = self.tensors[name]
        return self._read(name, row * tensor.shape[1], tensor.shape[1:])

    def _read(self, name: str, first: int, shape: tuple[int, ...]) -> VectorData:
        tensor = self.tensors[name]
        dtype = _DTYPES.get(tensor.dtype)
        if dtype is None:
            raise bad_file(
                self.path,
                f'has elements of type {tensor.dtype} in "{name}"',
                "save it as F32, F16 or BF16",
            )
        count = int(np.prod(shape, dtype=np.int64))
        numbers = np.fromfile(
            self.path, dtype, count, offset=tensor.offset + first * dtype.itemsize
        )
        element: Element | None = "bfloat16" if tensor.dtype == "BF16" else None
        return numbers_of(self.path, numbers.reshape(shape), element)
