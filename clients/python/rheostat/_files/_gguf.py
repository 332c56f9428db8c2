"""GGUF control vectors, the format of llama.cpp and repeng.

``general.architecture`` is "controlvector"; tensor ``direction.N`` holds the row of layer N. N is
the decoder block, counted from 0, and the row is added to the output of the block: ``resid_post``
of layer N.

llama.cpp stores ``direction.N`` at offset N - 1 of a buffer (its common.cpp) that its graph reads
at il - 1 for block il (its llama-adapter.cpp), so the two subtractions cancel. It adds the row
after the last residual sum of the block (``build_cvec`` before ``l_out``). repeng wraps block N and
adds to its output. Because of the offset, llama.cpp refuses ``direction.0``. repeng can write it
for the first block, so this module reads it, and never writes it.
"""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rheostat._arrays import VectorData
from rheostat._errors import InvalidRequest, invalid, missing_library
from rheostat._fields import counted
from rheostat._files._about import About, numbers_of, vector_of
from rheostat._files._errors import bad_file, unreadable
from rheostat._points import Point
from rheostat._steering.vectors import Vector

if TYPE_CHECKING:
    from gguf import GGUFReader

_ARCHITECTURE = "controlvector"
_HINT = f"{_ARCHITECTURE}.model_hint"
_COUNT = f"{_ARCHITECTURE}.layer_count"
_DIRECTION = re.compile(r"direction\.([0-9]+)")
_NO_HINT = "unknown"
_MAGIC = b"GGUF"
_SWAPPED = "S"
"""`GGUFReader.byte_order` of a file in the other byte order, whose numbers it would misread."""


def load(path: Path) -> Vector:
    """The vector of a file: one float32 row per layer, ascending."""
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError as error:
        raise missing_library("this file format", error, "files") from error
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise bad_file(path, "cannot be read (it is not a GGUF file)", "is it complete?")
        reader = GGUFReader(path)
        if reader.byte_order == _SWAPPED:
            raise bad_file(
                path,
                "has another byte order than this machine",
                "convert it with gguf-convert-endian, which comes with gguf",
            )
        texts = {
            key: _text(reader, key)
            for key in ("general.architecture", "general.name", "general.description", _HINT)
        }
    except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise unreadable(path, error) from error
    if texts["general.architecture"] != _ARCHITECTURE:
        architecture = texts["general.architecture"]
        raise bad_file(
            path,
            f'is not a control vector: its general.architecture is "{architecture}"',
            f'it must be "{_ARCHITECTURE}"',
        )
    rows = _directions(path, reader)
    if not rows:
        raise bad_file(path, "names no layer", "it needs tensors direction.1, direction.2, ...")
    if len({row.shape for row in rows.values()}) > 1:
        raise bad_file(
            path,
            "has directions of several widths",
            "all must have the width of the model's residual stream",
            "REASON_VECTOR_SHAPE",
        )
    layers = tuple(sorted(rows))
    hint = texts[_HINT]
    about = About(
        texts["general.name"] or None,
        texts["general.description"]
        or (f"control vector for {hint}" if hint not in ("", _NO_HINT) else ""),
        (Point.RESID_POST,),
        layers,
    )
    return vector_of(path, numbers_of(path, np.stack([rows[at] for at in layers])), about)


def _text(reader: GGUFReader, key: str) -> str:
    field = reader.get_field(key)
    return "" if field is None else str(field.contents())


def _directions(path: Path, reader: GGUFReader) -> dict[int, npt.NDArray[np.generic]]:
    """The row [width] of each layer, widened to float32 exactly."""
    from gguf.quants import dequantize

    rows: dict[int, npt.NDArray[np.generic]] = {}
    for tensor in reader.tensors:
        name = _DIRECTION.fullmatch(tensor.name)
        if name is None:
            continue
        if len(tensor.shape) != 1:
            raise bad_file(
                path,
                f"has {tensor.name} of rank {len(tensor.shape)}",
                "a direction is one row, [width]",
                "REASON_VECTOR_SHAPE",
            )
        layer = int(name[1])
        if layer in rows:
            raise bad_file(path, f"names layer {layer} twice", "export the vector again")
        try:
            rows[layer] = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise bad_file(
                path, f"has {tensor.name} as {tensor.tensor_type.name}", "save it as F32"
            ) from error
    return rows


def save(path: Path, vector: Vector, rows: VectorData, model_hint: str) -> None:
    """Write a vector to a file, float32. Raises InvalidRequest for sites that it cannot hold."""
    try:
        from gguf import GGUFWriter
    except ModuleNotFoundError as error:
        raise missing_library("this file format", error, "files") from error
    layers = _layers(vector)
    values = np.broadcast_to(rows.values, (len(layers), rows.shape[1]))
    with closing(GGUFWriter(path, _ARCHITECTURE)) as writer:
        writer.add_string(_HINT, model_hint)
        writer.add_uint32(_COUNT, len(layers))
        writer.add_string("general.name", vector.name or "")
        writer.add_string("general.description", vector.description)
        for layer, row in zip(layers, values, strict=True):
            writer.add_tensor(f"direction.{layer}", np.ascontiguousarray(row))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def _layers(vector: Vector) -> tuple[int, ...]:
    """The layers of a vector. Raises InvalidRequest if llama.cpp would apply it differently."""
    if vector.points != (Point.RESID_POST,):
        points = "+".join(vector.points) if vector.points else "no point"
        raise _cannot("points", f"control vectors act at resid_post, but this vector at {points}")
    if vector.layers is None or vector.layers == "all":
        raise _cannot("layers", "control vectors name their layers by number")
    layers = tuple(vector.layers)
    if layers[0] == 0:
        raise _cannot("layers", "control vectors begin at layer 1; llama.cpp cannot steer layer 0")
    if vector.shape is not None and vector.shape[0] not in (1, len(layers)):
        raise _cannot(
            "layers",
            f"it has {counted(vector.shape[0], 'row')} for {counted(len(layers), 'layer')}",
        )
    return layers


def _cannot(path: str, why: str) -> InvalidRequest:
    return invalid(path, f"{why}: save a vector with other {path}, or write .safetensors")
