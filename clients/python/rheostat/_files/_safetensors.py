"""A vector as a safetensors file: one tensor, [width] or [rows, width], with metadata.

Rheostat calls the tensor "vector". A file of another program is read if it has exactly one tensor;
its points and layers are None.
"""

from __future__ import annotations

from pathlib import Path

from rheostat._arrays import VectorData, stored
from rheostat._files._about import KEY, About, read_about, vector_of, write_about
from rheostat._files._errors import bad_file, only_name
from rheostat._files._tensors import TensorFile, write_tensors
from rheostat._steering.vectors import Vector

_TENSOR = "vector"
_DECODER = "W_dec"


def load(path: Path) -> Vector:
    file = TensorFile(path)
    text = file.metadata.get(KEY)
    about = About() if text is None else read_about(path, text)
    if _DECODER in file.tensors:
        raise bad_file(path, "is an SAE", "give the feature to load")
    return vector_of(path, file.whole(only_name(path, file.tensors, "tensor")), about)


def save(path: Path, vector: Vector, rows: VectorData) -> None:
    tensor = stored(rows.data, rows.element, rows.shape)
    write_tensors(path, {_TENSOR: tensor}, rows.element, {KEY: write_about(vector)})
