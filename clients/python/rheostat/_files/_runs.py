"""A run as a safetensors file: a tensor [positions, width] per site, named as "resid_post.3".

The metadata "rheostat_run" is JSON: the tokens of the prompt, and the position and input token of
each row.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat._capture.activations import Activations
from rheostat._errors import InvalidRequest
from rheostat._fields import whole_number
from rheostat._files._errors import bad_file, replacing
from rheostat._files._tensors import TensorFile, write_tensors
from rheostat._points import Point, Site, point_of, site_order
from rheostat._runs import RunInfo
from rheostat_wire.dtypes import narrow

_KEY = "rheostat_run"
_FIELDS = ("prompt_token_ids", "positions", "token_ids")


class StoredRun(NamedTuple):
    """A run's rows, as `Engine.put_run` takes them."""

    rows: Mapping[tuple[Point | str, int], npt.NDArray[np.generic]]
    """By point and layer, [positions, width] in the run's dtype."""
    prompt_token_ids: tuple[int, ...]
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    labels: Mapping[str, str]


def save_run(path: Path, run: RunInfo, rows: Activations) -> None:
    """Write rows of a run to a file, in the run's dtype. An existing file is replaced.

    Raises InvalidRequest if it cannot be written, Refused if safetensors is missing.
    """
    element = run.dtype or "float32"
    first = next(iter(rows))
    about = {
        "prompt_token_ids": run.prompt_token_ids,
        "positions": rows.positions(*first).tolist(),
        "token_ids": rows.token_ids(*first).tolist(),
        "labels": dict(run.labels),
    }
    tensors = {f"{point}.{layer}": narrow(rows[point, layer], element) for point, layer in rows}
    with replacing(path) as part:
        write_tensors(part, tensors, element, {_KEY: json.dumps(about, ensure_ascii=False)})


def load_run(path: Path) -> StoredRun:
    """Read a file that `save_run` has written.

    Raises InvalidRequest for another file, Refused if safetensors is missing.
    """
    file = TensorFile(path)
    if _KEY not in file.metadata:
        raise bad_file(path, f'has no entry "{_KEY}"', "write runs with rheostat runs get")
    try:
        about = json.loads(file.metadata[_KEY])
        numbers = {
            field: tuple(whole_number(item, field, "a number") for item in about[field])
            for field in _FIELDS
        }
        labels = {str(key): str(value) for key, value in about.get("labels", {}).items()}
        sites = {name: _site(name) for name in file.tensors}
    except (AttributeError, KeyError, TypeError, ValueError, InvalidRequest) as error:
        raise bad_file(path, f"is no run ({error})", "write runs with rheostat runs get") from error
    rows: dict[tuple[Point | str, int], npt.NDArray[np.generic]] = {
        sites[name]: file.array(name)
        for name in sorted(sites, key=lambda name: site_order(sites[name]))
    }
    return StoredRun(rows=rows, labels=labels, **numbers)


def _site(name: str) -> Site:
    point, _, layer = name.rpartition(".")
    return Site(point_of(point), whole_number(int(layer), name, "a layer"))
