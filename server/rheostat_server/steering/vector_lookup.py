"""Looks up a vector that a request refers to, and the row for each layer.

A single row is used at every layer. If there are several rows, their layers are the first of these
that is known:

1. `row_layers` of the request,
2. the layers of the name that the request uses, if there are as many as rows,
3. the layers of the request, if there are as many as rows.

The name comes before the request's layers, because otherwise rows for layers 1 and 4 could act at
layers 2 and 3, and no result would show the error.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rheostat_engine import ModelSites
from rheostat_server import validation
from rheostat_server.errors import (
    InvalidValue,
    MessageTooLarge,
    MissingField,
    NotSupported,
    VectorShape,
)
from rheostat_server.limits import DIGEST_BYTES, INLINE_VECTOR_BYTES, LAYERS
from rheostat_server.tensors import checked_payload, float_type
from rheostat_server.validation import counted, field_path
from rheostat_server.vectors.store import Name, Vector, VectorView, make_vector, vector_rows
from rheostat_wire.v1 import tensor_pb2, types_pb2, vector_pb2

_SHOWN = 16
"""Layers that an error lists."""


class FoundVector(NamedTuple):
    """A vector of a request, looked up."""

    path: str
    """Path of the VectorRef."""
    vector: Vector
    row_layers: tuple[int, ...]
    """The layer of each row, from the request or a name; empty if neither has them."""
    name: str
    """The name that has the layers; empty if the request has them."""


def find_vector(
    ref: vector_pb2.VectorRef | None, vectors: VectorView, model: ModelSites, path: str
) -> FoundVector:
    """The vector of a reference, which is None if it is missing.

    Raises:
        InvalidArgument: the reference is malformed.
        NotFound: no vector has this digest or name.
        MessageTooLarge: the vector is inline and too large.
        NotSupported: it is a direction of a token, and is not loaded, or the model has none.
        VectorShape: the vector does not have the model's width.
    """
    if ref is None:
        raise MissingField("a vector is required", field=path)
    kind = validation.required(
        ref.WhichOneof("ref"), path, "digest, name, inline and token_direction"
    )
    row_layers, field, name = _row_layers(ref, path), field_path(path, kind), ""
    if kind == "inline":
        vector = inline_vector(ref.inline, model.width, field)
    elif kind == "token_direction":
        if model.no_directions:
            raise NotSupported(
                f"tokens of this model have no directions: {model.no_directions}", field=field
            )
        vector = vectors.token_direction(ref.token_direction, field)
    elif kind == "digest":
        if len(ref.digest) != DIGEST_BYTES:
            raise InvalidValue(f"a digest has {DIGEST_BYTES} bytes", field=field)
        vector = vectors.get(ref.digest, field)
    else:
        label = vectors.named(validation.matches(ref.name, validation.VECTOR_NAME, field), field)
        vector = vectors.get(label.digest, field)
        if not row_layers and (row_layers := _layers_of_rows(label, vector, model)):
            name = ref.name
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
            f"the vector has {vector.rows} rows for {counted(len(rows), 'layer')}; it needs 1 or "
            "one each"
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
    """The layers of a message as a range, because they may be as many as uint32 allows."""
    stop = layers.stop if layers.HasField("stop") else model.num_layers
    step = layers.step if layers.HasField("step") else 1
    return range(layers.start, stop, step) if step else range(0)


def _show(layers: Sequence[int]) -> str:
    """As "2-5" or "0, 4, 7"; the first 16 if there are more."""
    if len(layers) > 1 and layers[-1] - layers[0] == len(layers) - 1:
        return f"{layers[0]}-{layers[-1]}"
    more = f" and {len(layers) - _SHOWN} more" if len(layers) > _SHOWN else ""
    return ", ".join(str(layer) for layer in layers[:_SHOWN]) + more


def _row_layers(ref: vector_pb2.VectorRef, path: str) -> tuple[int, ...]:
    if not ref.HasField("row_layers"):
        return ()
    layers, field = ref.row_layers.layers, field_path(path, "row_layers.layers")
    if not layers:
        raise InvalidValue("at least one layer is required", field=field)
    validation.check_count(len(layers), LAYERS, field, "layers")
    validation.no_repeats(layers, field, "layers")
    return tuple(layers)


def inline_vector(tensor: tensor_pb2.Tensor, width: int, path: str) -> Vector:
    """The vector of a tensor inside a request. `width` is that of the model.

    Raises:
        InvalidArgument: it is not a vector of this width.
        MessageTooLarge: it is too large.
    """
    kind = float_type(tensor.dtype, field_path(path, "dtype"))
    _check_size(len(tensor.inline), path)
    rows = vector_rows(tensor.shape, width, field_path(path, "shape"))
    if tensor.encoding == tensor_pb2.ENCODING_LZ4_PLANES:
        _check_size(rows * width * kind.itemsize, path)
    data = checked_payload(tensor, path, kind=kind)
    return make_vector(kind, rows, width, data, field_path(path, "inline"))


def _check_size(size: int, path: str) -> None:
    if size > INLINE_VECTOR_BYTES:
        raise MessageTooLarge(
            f"the inline vector has {size} bytes; at most {INLINE_VECTOR_BYTES} are allowed. Store "
            "it with PutVector and name it",
            field=field_path(path, "inline"),
        )
