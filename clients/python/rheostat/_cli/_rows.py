"""Checks and selection of a vector's rows by layer. A row never moves to another layer."""

from __future__ import annotations

from dataclasses import replace

from rheostat._cli._common import CommandError
from rheostat._fields import counted
from rheostat._points import Layers, Point, show_layers
from rheostat._responses.model import ModelInfo
from rheostat._steering.vectors import Vector


def check_layers(vector: Vector, model: ModelInfo) -> None:
    """Raise CommandError if the model lacks a layer, or if rows and layers do not match."""
    if vector.layers is None or vector.shape is None:
        return
    layers = _numbers(vector.layers, model.layer_count)
    if layers[-1] >= model.layer_count:
        raise CommandError(
            f"{model.name} has the layers 0 to {model.layer_count - 1}, no layer {layers[-1]}",
            2,
        )
    if vector.shape[0] not in (1, len(layers)):
        raise CommandError(
            f"{counted(vector.shape[0], 'row')} for {counted(len(layers), 'layer')} "
            f"({show_layers(vector.layers)}): a vector has one row, or one per layer",
            2,
        )


def part(vector: Vector, points: tuple[Point, ...] | None, layers: Layers | None) -> Vector:
    """The vector at some of its points and layers, with the rows of those layers.

    A vector without points or layers gets these. Raises CommandError for points or layers that are
    not the vector's.
    """
    if points is not None and vector.points is not None:
        foreign = [point for point in points if point not in vector.points]
        if foreign:
            raise CommandError(
                f"{vector.label} acts at {','.join(vector.points)}, not at {','.join(foreign)}",
                2,
            )
    selected = replace(vector, points=points or vector.points, layers=layers or vector.layers)
    if layers is None or vector.layers is None or vector.rows is None or layers == vector.layers:
        return selected
    count = vector.rows.shape[0]
    if vector.layers == "all" and count == 1:
        return selected
    own = _numbers(vector.layers, count)
    other_layers = (
        layers if layers == "all" else tuple(layer for layer in layers if layer not in own)
    )
    if layers == "all" or other_layers:
        raise CommandError(
            f"{vector.label} has layers {show_layers(own)}, and not {show_layers(other_layers)}", 2
        )
    if count == 1:
        return selected
    return replace(vector.select(layers=layers), name=vector.name, points=selected.points)


def _numbers(layers: Layers, count: int) -> range | tuple[int, ...]:
    """The numbers of the layers of a model with ``count`` layers."""
    return range(count) if isinstance(layers, str) else layers
