"""Directions that captured rows are projected on: x.d for each, in float32.

Invariant: a projection is content alone. What a name meant when it was looked up stays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rheostat_engine import Directions, ModelSites
from rheostat_server import validation
from rheostat_server.errors import MissingField, NotSupported
from rheostat_server.limits import PROJECTIONS
from rheostat_server.steering.ops import VectorDraft, draft_vector
from rheostat_server.steering.readouts import OF_PROJECTIONS, check_readout
from rheostat_server.steering.vector_lookup import FoundVector, find_vector, rows_by_layer
from rheostat_server.tensors import widen
from rheostat_server.validation import field_path
from rheostat_server.vectors.store import Vector, VectorSource
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.v1 import capture_pb2, vector_pb2

_DIRECTION_BYTES = 256
"""What `offload` counts for a direction at a layer."""

_MATRICES = 4
"""Matrices that are kept for rows that the engine did not project; each at most 64 MiB in a model
of width 4096."""


@dataclass(frozen=True, eq=False)
class Projection:
    """What the rows of a capture are projected on."""

    vectors: tuple[Vector, ...]
    """In the request's order."""
    rows: Mapping[int, tuple[int, ...]]
    """By layer, the row of each vector."""

    @property
    def numbers(self) -> int:
        """How many numbers come of a row."""
        return len(self.vectors)

    def directions(self, layer: int) -> Directions:
        """What rows of a layer are projected on, as the engine knows it."""
        return Directions(tuple(one.digest for one in self.vectors), self.rows[layer])

    def apply(self, rows: FloatArray, layer: int) -> FloatArray:
        """Rows [n, W] of a layer, projected: float32 [n, D]."""
        with np.errstate(over="ignore", invalid="ignore"):
            projected: FloatArray = rows @ _matrix(self, layer).T
        return projected


@lru_cache(maxsize=_MATRICES)
def _matrix(projection: Projection, layer: int) -> FloatArray:  # [D, W]
    found = []
    for vector, row in zip(projection.vectors, projection.rows[layer], strict=True):
        size = vector.width * vector.kind.itemsize
        found.append(widen(vector.data[row * size : (row + 1) * size], vector.kind))
    return np.stack(found)


def draft_directions(
    projection: capture_pb2.Projection, width: int, path: str
) -> tuple[VectorDraft, ...]:
    """Checks a projection as far as the request itself goes.

    Raises:
        InvalidArgument: something is malformed.
        NotSupported: something is not served yet.
        MessageTooLarge: an inline vector is too large.
    """
    kind = validation.required(projection.WhichOneof("onto"), path, "readouts and matrix")
    if kind == "matrix":
        raise NotSupported(
            f"matrices are not served yet: give readouts one by one, at most {PROJECTIONS} of them",
            field=field_path(path, kind),
        )
    if projection.HasField("top_k"):
        raise NotSupported(
            "top_k is not served yet: choose among the numbers that come",
            field=field_path(path, "top_k"),
        )
    readouts, field = projection.readouts.readouts, field_path(path, "readouts.readouts")
    if not readouts:
        raise MissingField("at least one readout is required", field=field)
    validation.check_count(len(readouts), PROJECTIONS, field, "readouts")
    return tuple(
        _draft(readout, width, f"{field}[{index}]") for index, readout in enumerate(readouts)
    )


def _draft(readout: vector_pb2.Readout, width: int, path: str) -> VectorDraft:
    check_readout(readout, OF_PROJECTIONS, path)
    ref = readout.vector if readout.HasField("vector") else None
    return draft_vector(ref, width, field_path(path, "vector"))


def projection_work(directions: int, layers: int) -> int:
    """Bytes that `project_on` counts for; see `offload`."""
    return _DIRECTION_BYTES * directions * layers


def find_directions(
    drafts: Sequence[VectorDraft], store: VectorSource, model: ModelSites
) -> tuple[FoundVector, ...]:
    """The vectors of a projection.

    Raises:
        NotFound: one is not stored or its name not known.
        VectorShape: one does not fit the model.
    """
    return tuple(find_vector(draft, store, model) for draft in drafts)


def project_on(directions: Sequence[FoundVector], layers: Sequence[int]) -> Projection:
    """The projection on vectors that were found, at some layers.

    Raises:
        VectorShape: one has neither one row nor one for each of the layers.
    """
    by_layer = [rows_by_layer(one, layers) for one in directions]
    return Projection(
        tuple(one.vector for one in directions),
        {layer: tuple(rows[layer] for rows in by_layer) for layer in layers},
    )
