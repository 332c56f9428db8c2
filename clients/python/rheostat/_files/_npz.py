"""A vector as a numpy archive: the array "vector", and an array with the metadata.

numpy has no bfloat16, so bfloat16 rows are stored as records with one uint16 field named
"bfloat16"; ``array["bfloat16"]`` returns the bits. Nothing is pickled or unpickled.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rheostat._arrays import BFLOAT16, Element, VectorData
from rheostat._files._about import KEY, About, numbers_of, read_about, vector_of, write_about
from rheostat._files._errors import bad_file, only_name, unreadable
from rheostat._steering.vectors import Vector
from rheostat_wire.dtypes import STORAGE

_STORAGE: dict[Element, np.dtype[np.generic]] = {**STORAGE, "bfloat16": BFLOAT16}


def load(path: Path) -> Vector:
    arrays = _arrays(path)
    text = arrays.pop(KEY, None)
    about = About() if text is None else read_about(path, str(text))
    name = only_name(path, arrays, "array")
    return vector_of(path, numbers_of(path, arrays[name]), about)


def _arrays(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise bad_file(path, "is not an archive, but one array", "use rheostat vectors put")
        with archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise unreadable(path, error) from error


def save(path: Path, vector: Vector, rows: VectorData) -> None:
    array = np.frombuffer(rows.data, _STORAGE[rows.element]).reshape(rows.shape)
    with path.open("wb") as file:
        np.savez(file, vector=array, rheostat_vector=np.array(write_about(vector)))
