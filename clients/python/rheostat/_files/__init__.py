"""Vectors and runs in files, with one module per format of vectors.

Points and layers that a file does not name stay None. An incomplete file is refused. Saving
replaces a file as a whole or not at all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from rheostat._errors import Refused, invalid
from rheostat._files import _gguf, _npz, _sae, _safetensors
from rheostat._files._errors import replaced_file, replacing
from rheostat._files._runs import StoredRun, load_run, save_run
from rheostat._steering.sae_features import SaeFeature
from rheostat._steering.vectors import Vector, refuse_dose

__all__ = [
    "FORMATS", "StoredRun", "VectorFormat", "load_run", "load_sae_feature", "load_vector",
    "replaced_file", "save_run", "save_vector",
]  # fmt: skip

VectorFormat: TypeAlias = Literal["safetensors", "npz", "gguf", "sae"]
"""Formats of vector files; "sae" can only be read."""

FORMATS: tuple[VectorFormat, ...] = get_args(VectorFormat)


def load_vector(
    path: str | os.PathLike[str],
    *,
    feature: int | None = None,
    format: VectorFormat | None = None,
) -> Vector:
    """Load a vector with its numbers, for a request or for ``vectors.put``.

    ``path`` is a ``.safetensors``, ``.npz`` or ``.gguf`` file, or a folder of an SAE in SAELens
    format (or the ``.safetensors`` file in it) together with ``feature``, the row of its decoder.
    ``format`` defaults to the format of the suffix. Element types are kept, but GGUF gives float32
    and float64 is rounded to float32. Name, description, points and layers come from the file. A
    GGUF control vector acts at ``resid_post`` of the layers that its tensors name, a row of an SAE
    at the hook that its cfg.json names.

    Raises InvalidRequest, with the cause, for a file that has no vector, and Refused if a library
    is missing.
    """
    path = Path(path)
    kind = _format(path, feature, format)
    if kind == "sae":
        return _sae.load(path, feature)
    if feature is not None:
        raise invalid("feature", f"only SAEs have features, not {kind} files: leave feature out")
    match kind:
        case "safetensors":
            return _safetensors.load(path)
        case "npz":
            return _npz.load(path)
        case "gguf":
            return _gguf.load(path)


def load_sae_feature(path: str | os.PathLike[str], feature: int) -> SaeFeature:
    """A feature of a sparse autoencoder, which can be clamped, scaled and read.

    ``path`` is a folder of a standard or JumpReLU SAE in SAELens format, or the ``.safetensors``
    file in it. The feature acts at the hook that its cfg.json names.

    Raises InvalidRequest, with the cause, for any other file, and for an SAE that computes its
    features otherwise (top-k, gated, transcoder, normalised input). Raises Refused if a library is
    missing.
    """
    return _sae.load_feature(Path(path), feature)


def save_vector(
    path: str | os.PathLike[str],
    vector: Vector,
    *,
    format: VectorFormat | None = None,
    model_hint: str = "unknown",
) -> None:
    """Write a vector that holds its numbers to a ``.safetensors``, ``.npz`` or ``.gguf`` file.

    The first two keep every bit, the element type, name, description, points and layers. GGUF keeps
    the numbers as float32, exactly, with name and description. It needs ``points="resid_post"`` and
    layers from 1 on, one row each. llama.cpp ignores its field ``model_hint``. An existing file is
    replaced; a symbolic link stays, and its target is replaced.

    Raises InvalidRequest for a dose, if the format cannot hold the vector, and if the file cannot
    be written. Raises Refused for a vector without numbers, and if a library is missing.
    """
    if isinstance(path, Vector):
        raise invalid("path", "the file comes first: save_vector(path, vector)")
    path = Path(path)
    refuse_dose(vector, "vector")
    if not isinstance(vector, Vector):
        raise invalid(
            "vector",
            "save_vector writes a vector, such as rheostat.inline(array, points=..., layers=...), "
            f"not {type(vector).__name__}",
        )
    if vector.rows is None:
        raise Refused(
            f"{vector.label} has no numbers in this client; fetch it with engine.vectors.get"
        )
    kind = _format(path, None, format)
    with replacing(path) as part:
        match kind:
            case "safetensors":
                _safetensors.save(part, vector, vector.rows)
            case "npz":
                _npz.save(part, vector, vector.rows)
            case "gguf":
                _gguf.save(part, vector, vector.rows, model_hint)
            case "sae":
                raise invalid("format", "SAEs can only be read: write safetensors, npz or gguf")


def _format(path: Path, feature: int | None, format: VectorFormat | None) -> VectorFormat:
    if format is not None:
        if format not in FORMATS:
            raise invalid("format", f"unknown format {format!r}: give {', '.join(FORMATS)}")
        return format
    if feature is not None or path.is_dir():
        return "sae"
    for name in FORMATS:
        if path.suffix == f".{name}":
            return name
    raise invalid(
        "format",
        f"{path} does not end in .safetensors, .npz or .gguf: give its format, one of "
        f"{', '.join(FORMATS)}",
    )
