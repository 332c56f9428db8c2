"""The metadata in files that Rheostat writes: name, description, points and layers as JSON.

The JSON is the same in every format that can hold text. Layers are "all", a list, or a range as
{"start", "stop", "step"}.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy.typing as npt

from rheostat._arrays import VectorData, vector_data
from rheostat._errors import InvalidRequest
from rheostat._fields import counted
from rheostat._files._errors import bad_file
from rheostat._points import Layers, LayersLike, Point, layers_of, points_of
from rheostat._steering.vectors import Vector

KEY = "rheostat_vector"
"""The key of the metadata in a file."""


class About(NamedTuple):
    """The metadata of a vector in a file."""

    name: str | None = None
    description: str = ""
    points: tuple[Point, ...] | None = None
    layers: Layers | None = None


def write_about(vector: Vector) -> str:
    layers: object = vector.layers
    if isinstance(vector.layers, range):
        span = vector.layers
        layers = {"start": span.start, "stop": span.stop, "step": span.step}
    return json.dumps(
        {
            "name": vector.name,
            "description": vector.description,
            "points": vector.points,
            "layers": layers,
        },
        ensure_ascii=False,
    )


def read_about(path: Path, text: str) -> About:
    """Parses metadata. Raises InvalidRequest if Rheostat did not write it."""
    try:
        fields = json.loads(text)
        points, layers = fields["points"], fields["layers"]
        name, description = fields["name"], fields["description"]
        if not isinstance(name, str | None) or not isinstance(description, str):
            raise TypeError("name and description must be strings")
        return About(
            name,
            description,
            None if points is None else points_of(points),
            None if layers is None else layers_of(_layers(layers)),
        )
    except (ValueError, KeyError, TypeError, InvalidRequest) as error:
        raise bad_file(
            path,
            f'has an entry "{KEY}" that Rheostat did not write ({error})',
            "export the vector again, or remove the entry",
        ) from error


def _layers(layers: LayersLike | dict[str, int]) -> LayersLike:
    if isinstance(layers, dict):
        return range(layers["start"], layers["stop"], layers["step"])
    return layers


def numbers_of(path: Path, array: npt.ArrayLike) -> VectorData:
    """The rows of an array in a file. Raises InvalidRequest if they are not a vector."""
    try:
        return vector_data(array)
    except InvalidRequest as error:
        raise bad_file(
            path, f"holds no vector ({error.message})", "save one array [rows, width] of real, "
            "finite numbers", error.reason,
        ) from error  # fmt: skip


def vector_of(path: Path, rows: VectorData, about: About) -> Vector:
    """The vector of a file. Raises InvalidRequest if rows and layers do not match."""
    layers, count = about.layers, rows.shape[0]
    if count > 1 and layers is not None and layers != "all" and len(layers) != count:
        raise bad_file(
            path,
            f"has {count} rows for {counted(len(layers), 'layer')}",
            "a vector has one row, or one per layer",
            "REASON_VECTOR_SHAPE",
        )
    return Vector(
        rows.digest.hex(), about.name, rows.shape, rows.element, about.points, layers, rows,
        by_value=True, description=about.description,
    )  # fmt: skip
