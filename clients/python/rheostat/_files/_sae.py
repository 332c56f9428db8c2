"""Rows of an SAE's decoder, in the format of SAELens.

The format is a folder with cfg.json and a safetensors file that has ``W_dec`` [d_sae, d_in]. Row f
is the direction that feature f writes. cfg.json names the hook, at its top level or below
"metadata", as TransformerLens does: ``blocks.8.hook_resid_post`` is ``resid_post`` of layer 8. A
transcoder writes to another hook, ``hook_name_out``, in rows of ``d_out``. Rows are returned as
stored: if ``normalize_activations`` is set, their scale is not that of the stream.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from rheostat._errors import invalid
from rheostat._files._about import About, vector_of
from rheostat._files._errors import bad_file, unreadable
from rheostat._files._tensors import TensorFile
from rheostat._points import Point
from rheostat._steering.vectors import Vector

_CONFIG = "cfg.json"
_WEIGHTS = "sae_weights.safetensors"
_DECODER = "W_dec"
_HOOK = re.compile(r"blocks\.([0-9]+)\.hook_([a-z_]+)")


def load(path: Path, feature: int | None) -> Vector:
    folder, weights = (path, _weights(path)) if path.is_dir() else (path.parent, path)
    config = _config(folder / _CONFIG)
    file = TensorFile(weights)
    decoder = file.tensors.get(_DECODER)
    if decoder is None or len(decoder.shape) != 2:
        got = "none" if decoder is None else f"one of rank {len(decoder.shape)}"
        raise bad_file(
            weights,
            f"has no decoder {_DECODER} [d_sae, d_in], but {got}",
            "give the file that SAELens writes",
            "REASON_VECTOR_SHAPE",
        )
    _check_shape(weights, config, decoder.shape)
    count = decoder.shape[0]
    if feature is None or not 0 <= feature < count:
        raise invalid("feature", f"give a feature: {path} has 0 to {count - 1}")
    hook = config.get("hook_name_out") or config.get("hook_name")
    point, layer = _site(folder / _CONFIG, hook)
    model = config.get("model_name")
    description = f"SAE feature {feature} of {hook}" + (f", {model}" if model else "")
    about = About(None, description, (point,), (layer,))
    return vector_of(weights, file.row(_DECODER, feature), about)


def _weights(folder: Path) -> Path:
    if (folder / _WEIGHTS).exists():
        return folder / _WEIGHTS
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        raise bad_file(
            folder,
            f"holds no {_WEIGHTS}, and {len(files)} other safetensors files",
            "give the path of the one with the decoder",
        )
    return files[0]


def _config(path: Path) -> Mapping[str, object]:
    """The entries of cfg.json, where those below "metadata" are moved to the top level."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if not isinstance(config, dict):
        raise bad_file(path, "is not a JSON object", "give the cfg.json that SAELens writes")
    inner = config.get("metadata")
    return {**(inner if isinstance(inner, dict) else {}), **config}


def _check_shape(path: Path, config: Mapping[str, object], shape: tuple[int, ...]) -> None:
    width = config.get("d_out") if config.get("hook_name_out") else config.get("d_in")
    expected = (config.get("d_sae", shape[0]), shape[1] if width is None else width)
    if expected != shape:
        raise bad_file(
            path,
            f"has a decoder {list(shape)} where its {_CONFIG} says {list(expected)}",
            "give the two files of one SAE",
            "REASON_VECTOR_SHAPE",
        )


def _site(path: Path, hook: object) -> tuple[Point, int]:
    match = _HOOK.fullmatch(hook) if isinstance(hook, str) else None
    if match is None or match[2] not in set(Point):
        raise bad_file(
            path,
            f"names the hook {hook!r}" if hook else "names no hook",
            f"rows can be used at blocks.N.hook_ with {', '.join(Point)}",
        )
    return Point(match[2]), int(match[1])
