"""Features of SAEs, and rows of their decoders, in the format of SAELens.

The format is a folder with cfg.json and a safetensors file that has ``W_dec`` [d_sae, d_in]. Row f
is the direction that feature f writes. cfg.json names the hook, at its top level or below
"metadata", as TransformerLens does: ``blocks.8.hook_resid_post`` is ``resid_post`` of layer 8. A
transcoder writes to another hook, ``hook_name_out``, in rows of ``d_out``. Rows are returned as
stored: if ``normalize_activations`` is set, their scale differs from the residual stream's.

The activation of feature f at a row x is act((x - b_dec).W_enc[:, f] + b_enc[f]), where b_dec is
subtracted if ``apply_b_dec_to_input`` is set, and act is a ReLU, or with ``threshold`` a JumpReLU.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rheostat._errors import invalid
from rheostat._files._about import About, vector_of
from rheostat._files._errors import bad_file, unreadable
from rheostat._files._tensors import TensorFile
from rheostat._points import Point
from rheostat._steering.readouts import Activation, Readout, ReadoutSettings
from rheostat._steering.sae_features import SaeFeature
from rheostat._steering.vectors import Vector

_CONFIG = "cfg.json"
_WEIGHTS = "sae_weights.safetensors"
_DECODER = "W_dec"
_DECODER_BIAS = "b_dec"
_ENCODER = "W_enc"
_ENCODER_BIAS = "b_enc"
_THRESHOLD = "threshold"
_HOOK = re.compile(r"blocks\.([0-9]+)\.hook_([a-z_]+)")


class _Opened(NamedTuple):
    """A feature of an SAE, and the SAE's files."""

    file: TensorFile
    config: Mapping[str, object]
    feature: int
    about: About
    """Metadata of the feature."""


def load(path: Path, feature: int | None) -> Vector:
    sae = _open(path, feature)
    return vector_of(sae.file.path, sae.file.row(_DECODER, sae.feature), sae.about)


def load_feature(path: Path, feature: int) -> SaeFeature:
    """The feature with its encoder; see `load_sae_feature`."""
    sae = _open(path, feature)
    about, file = sae.about, sae.file
    _check_encoder(sae)
    encoder = vector_of(file.path, file.column(_ENCODER, feature), about)
    bias = _number(file, _ENCODER_BIAS, feature)
    if sae.config.get("apply_b_dec_to_input", True) and _DECODER_BIAS in file.tensors:
        subtracted = np.asarray(file.whole(_DECODER_BIAS).values, np.float64).reshape(-1)
        column = np.asarray(file.column(_ENCODER, feature).values, np.float64).reshape(-1)
        bias -= float(subtracted @ column)
    activation: Activation = "relu"
    theta = None
    if _THRESHOLD in file.tensors:
        # SAELens applies the ReLU first, so a threshold below 0 has no effect.
        activation, theta = "jump_relu", max(0.0, _number(file, _THRESHOLD, feature))
    settings = ReadoutSettings(bias=bias, activation=activation, theta=theta)
    decoder = vector_of(file.path, file.row(_DECODER, feature), about)
    return SaeFeature(Readout(encoder, settings), decoder)


def _open(path: Path, feature: int | None) -> _Opened:
    folder, weights = (path, _weights(path)) if path.is_dir() else (path.parent, path)
    config = _config(folder / _CONFIG)
    file = TensorFile(weights)
    decoder = file.tensors.get(_DECODER)
    if decoder is None or len(decoder.shape) != 2:
        got = "" if decoder is None else f", but one of rank {len(decoder.shape)}"
        raise bad_file(
            weights,
            f"has no decoder {_DECODER} [d_sae, d_in]{got}",
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
    return _Opened(file, config, feature, About(None, description, (point,), (layer,)))


def _check_encoder(sae: _Opened) -> None:
    """Refuses SAEs whose features are not act(x.e + b) with a ReLU or JumpReLU."""
    config, file = sae.config, sae.file
    activation = config.get("activation_fn", config.get("activation_fn_str", "relu"))
    normalise = config.get("normalize_activations") or "none"
    count, width = file.tensors[_DECODER].shape
    problem = ""
    if config.get("architecture", "standard") not in ("standard", "jumprelu"):
        problem = f"has the architecture {config['architecture']!r}"
    elif activation != "relu":
        problem = f"has the activation {activation!r}"
    elif config.get("architecture") == "jumprelu" and _THRESHOLD not in file.tensors:
        problem = f"is a JumpReLU SAE, but has no {_THRESHOLD}"
    elif config.get("hook_name_out"):
        problem = "is a transcoder, which reads and writes at different sites"
    elif normalise != "none":
        problem = f"normalises its input ({normalise!r})"
    elif config.get("finetuning_scaling_factor"):
        problem = "scales its activations"
    elif _shape(file, _ENCODER) != (width, count) or _shape(file, _ENCODER_BIAS) != (count,):
        problem = f"has no {_ENCODER} [d_in, d_sae] with {_ENCODER_BIAS} [d_sae]"
    elif _shape(file, _THRESHOLD) not in (None, (count,)):
        problem = f"has no {_THRESHOLD} [d_sae]"
    elif _shape(file, _DECODER_BIAS) not in (None, (width,)):
        problem = f"has no {_DECODER_BIAS} [d_in]"
    if problem:
        raise bad_file(
            file.path,
            problem,
            "load_sae_feature reads only standard and JumpReLU SAEs; load_vector loads a row of "
            "any SAE's decoder",
        )


def _shape(file: TensorFile, name: str) -> tuple[int, ...] | None:
    return file.tensors[name].shape if name in file.tensors else None


def _number(file: TensorFile, name: str, index: int) -> float:
    return float(np.asarray(file.whole(name).values, np.float64).reshape(-1)[index])


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
            f"the hook must be blocks.N.hook_ and one of {', '.join(Point)}",
        )
    return Point(match[2]), int(match[1])
