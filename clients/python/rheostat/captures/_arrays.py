"""Arrays inside a part of a file, or single rows of them: safetensors and uncompressed .npz.

Only headers and the requested rows are read. An array that is not inside the part is refused.
"""

from __future__ import annotations

import ast
import io
import json
import math
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat._errors import DataLoss

_LENGTH = 8
_LOCAL_HEADER = 30
_NPY = b"\x93NUMPY\x01\x00"
_DTYPES: Mapping[str, np.dtype[np.generic]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I32": np.dtype("<i4"),
    "U32": np.dtype("<u4"),
    "U8": np.dtype("u1"),
}


class Part(NamedTuple):
    """A range of bytes of a file."""

    path: Path
    offset: int
    length: int


class ArrayLocation(NamedTuple):
    """The place of an array in its file; bfloat16 has dtype uint16."""

    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def arrays_in(part: Part, format: str, start: str) -> Mapping[str, ArrayLocation]:
    """The arrays of a part whose names begin with ``start``.

    Raises DataLoss if the part is incomplete.
    """
    try:
        with part.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < part.offset + part.length:
                raise ValueError("it is truncated")
            arrays = (_safetensors if format == "safetensors" else _npz)(file, part, start)
    except (OSError, ValueError, LookupError, TypeError, zipfile.BadZipFile) as error:
        raise damaged(part.path, str(error)) from error
    end = part.offset + part.length
    if any(location.offset + location.size > end for location in arrays.values()):
        raise damaged(part.path, "its arrays end behind it")
    return arrays


def read_rows(
    path: Path, location: ArrayLocation, first: int, count: int
) -> npt.NDArray[np.generic]:
    """Rows of an array, [count, ...]. Raises DataLoss if they cannot be read."""
    inner = location.shape[1:]
    size = math.prod(inner)
    offset = location.offset + first * size * location.dtype.itemsize
    try:
        return np.fromfile(path, location.dtype, count * size, offset=offset).reshape(count, *inner)
    except (OSError, ValueError) as error:
        raise damaged(path, str(error)) from error


def damaged(path: Path, why: str) -> DataLoss:
    """The error of a file that does not match its manifest."""
    return DataLoss(f"{path} is damaged ({why}): its rows cannot be read")


def _safetensors(file: io.BufferedReader, part: Part, start: str) -> dict[str, ArrayLocation]:
    file.seek(part.offset)
    length = int.from_bytes(file.read(_LENGTH), "little")
    if length > part.length:
        raise ValueError("its header is longer than itself")
    header = json.loads(file.read(length))
    data = part.offset + _LENGTH + length
    return {
        name: ArrayLocation(
            _DTYPES[entry["dtype"]], tuple(entry["shape"]), data + int(entry["data_offsets"][0])
        )
        for name, entry in header.items()
        if name.startswith(start)
    }


def _npz(file: io.BufferedReader, part: Part, start: str) -> dict[str, ArrayLocation]:
    arrays = {}
    with zipfile.ZipFile(_Section(file, part)) as archive:
        for member in archive.infolist():
            if not member.filename.startswith(start):
                continue
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError("it is compressed")
            file.seek(part.offset + member.header_offset)
            local = file.read(_LOCAL_HEADER)
            names = int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
            file.seek(names, io.SEEK_CUR)
            arrays[member.filename.removesuffix(".npy")] = _npy(file)
    return arrays


def _npy(file: io.BufferedReader) -> ArrayLocation:
    magic = file.read(len(_NPY))
    length = int.from_bytes(file.read(2), "little")
    if magic != _NPY:
        raise ValueError("an array in it has another .npy version")
    header = ast.literal_eval(file.read(length).decode("latin1"))
    if header["fortran_order"]:
        raise ValueError("an array in it has Fortran order")
    return ArrayLocation(np.dtype(header["descr"]), tuple(header["shape"]), file.tell())


class _Section(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: io.BufferedReader, part: Part) -> None:
        self._file = file
        self._part = part
        self._at = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._part.length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._part.length - self._at)
        self._file.seek(self._part.offset + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data
