"""A vector that a request refers to: its content in the store, and which row serves which layer.

A vector with one row serves every layer with it. Of a vector with several rows, the first of these
that is known says which layer each row is for:

1. the request (`row_layers`),
2. the name that the request uses, if the name was stored with as many layers as there are rows,
3. the layers of the request, if there are as many as rows.

The name comes before the request's own layers because rows for layers 1 and 4 that act at layers 2
and 3 are an error that no result shows.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rheostat_engine import ModelSites
from rheostat_server.errors import VectorShape
from rheostat_server.steering.ops import VectorDraft
from rheostat_server.validation import field_path
from rheostat_server.vectors.store import Name, Vector, VectorSource
from rheostat_wire.v1 import types_pb2

_SHOWN = 16
"""Layers that an error lists."""


class FoundVector(NamedTuple):
    """A vector of a request, looked up."""

    path: str
    """Path of the VectorRef."""
    vector: Vector
    """Its content."""
    row_layers: tuple[int, ...]
    """The layer of each row; empty: neither the request nor a name says it."""
    name: str
    """The name that says the layers; empty where the request does."""


def find_vector(draft: VectorDraft, store: VectorSource, model: ModelSites) -> FoundVector:
    """Looks up the vector of a reference.

    Raises:
        NotFound: no vector has this digest or name.
        VectorShape: the vector does not have the model's width.
    """
    path, vector, row_layers = draft
    name = ""
    if not isinstance(vector, Vector):
        if vector.WhichOneof("ref") == "digest":
            vector = store.get(vector.digest, field_path(path, "digest"))
        else:
            used, field = vector.name, field_path(path, "name")
            label = store.named(used, field)
            vector = store.get(label.digest, field)
            if not row_layers and (row_layers := _layers_of_rows(label, vector, model)):
                name = used
    if vector.width != model.width:
        raise VectorShape(
            f"the vector has width {vector.width}; the model's stream has {model.width}",
            field=path,
            metadata={"expected": str(model.width), "got": str(vector.width)},
        )
    return FoundVector(path, vector, row_layers, name)


def rows_by_layer(found: FoundVector, layers: Sequence[int]) -> dict[int, int]:
    """The vector's row for each of some layers.

    Raises:
        VectorShape: it does not have one.
    """
    vector, row_layers = found.vector, found.row_layers
    if vector.rows == 1 and not row_layers:
        return dict.fromkeys(layers, 0)
    rows = {layer: row for row, layer in enumerate(row_layers or layers)}
    without = [layer for layer in layers if layer not in rows]
    if vector.rows == len(rows) and not without:
        return rows
    if found.name:
        problem = (
            f'"{found.name}" has rows for layers {_show(row_layers)}, not for all of layers '
            f"{_show(layers)}; choose among the former, or say with row_layers which layer each "
            "row is for"
        )
    elif vector.rows == len(rows):
        problem = f"the vector has no row for layer {without[0]}"
    else:
        problem = (
            f"the vector has {vector.rows} rows for {len(rows)} layers; it needs 1 or one each"
        )
        if not row_layers:
            problem += ", or row_layers that say which layer each row belongs to"
    raise VectorShape(
        problem,
        field=found.path,
        metadata={"expected": str(len(layers)), "got": str(vector.rows)},
    )


def _layers_of_rows(label: Name, vector: Vector, model: ModelSites) -> tuple[int, ...]:
    """The layers that a name was stored with, ascending, if there is one for each row."""
    if label.sites is None or vector.rows == 1:
        return ()
    layers: Sequence[int]
    match label.sites.WhichOneof("layers"):
        case "list":
            layers = sorted(set(label.sites.list.layers))
        case "range":
            layers = _range(label.sites.range, model)
        case "all":
            layers = range(model.num_layers)
        case _:
            return ()
    return tuple(layers) if len(layers) == vector.rows else ()


def _range(layers: types_pb2.LayerRange, model: ModelSites) -> range:
    """The layers of a message, which may be as long as uint32 allows, so that none is listed."""
    stop = layers.stop if layers.HasField("stop") else model.num_layers
    step = layers.step if layers.HasField("step") else 1
    return range(layers.start, stop, step) if step else range(0)


def _show(layers: Sequence[int]) -> str:
    """As "2-5" or "0, 4, 7"; the first sixteen of more."""
    if len(layers) > 1 and layers[-1] - layers[0] == len(layers) - 1:
        return f"{layers[0]}-{layers[-1]}"
    more = f" and {len(layers) - _SHOWN} more" if len(layers) > _SHOWN else ""
    return ", ".join(str(layer) for layer in layers[:_SHOWN]) + more
