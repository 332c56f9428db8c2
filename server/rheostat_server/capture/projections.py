"""Readouts that captured rows are projected on: a number for each, in float32.

Invariant: a projection is content alone. What a name meant when it was looked up stays.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rheostat_engine import Directions, ModelSites, Normalise, Readout
from rheostat_server import validation
from rheostat_server.errors import MissingField, NotSupported
from rheostat_server.limits import PROJECTIONS
from rheostat_server.steering.readouts import check_norm, read_numbers, resolve_product
from rheostat_server.steering.vector_lookup import find_vector, rows_by_layer
from rheostat_server.validation import field_path
from rheostat_server.vectors.store import Vector, VectorView
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.v1 import capture_pb2

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
    readouts: tuple[Readout, ...] = ()
    """One per vector; empty: x.d for all."""

    @property
    def numbers(self) -> int:
        """How many numbers come of a row."""
        return len(self.vectors)

    def directions(self, layer: int) -> Directions:
        """What rows of a layer are projected on, as the engine knows it."""
        digests = tuple(vector.digest for vector in self.vectors)
        return Directions(digests, self.rows[layer], self.readouts)

    def apply(self, rows: FloatArray, layer: int) -> FloatArray:
        """Rows [n, W] of a layer, projected: float32 [n, D]."""
        with np.errstate(over="ignore", invalid="ignore"):
            projected: FloatArray = rows @ _matrix(self, layer).T
            return self._read(rows, projected, layer) if self.readouts else projected

    def _read(self, rows: FloatArray, products: FloatArray, layer: int) -> FloatArray:
        """What the readouts make of x.d [n, D] of rows [n, W]."""
        numbers = np.empty_like(products)
        norms = np.linalg.norm(rows.astype(np.float32), axis=1)
        for index, (readout, vector) in enumerate(zip(self.readouts, self.vectors, strict=True)):
            z = products[:, index]
            if readout.normalise is not Normalise.NONE:
                z = z * np.float32(1 / vector.norms[self.rows[layer][index]])
            numbers[:, index] = read_numbers(readout, z, norms)
        return numbers


_PRODUCT = Readout(Normalise.NONE)
"""x.d."""


@lru_cache(maxsize=_MATRICES)
def _matrix(projection: Projection, layer: int) -> FloatArray:  # [D, W]
    rows = zip(projection.vectors, projection.rows[layer], strict=True)
    return np.stack([vector.row(row) for vector, row in rows])


def resolve_projection(
    projection: capture_pb2.Projection,
    layers: Sequence[int],
    vectors: VectorView,
    model: ModelSites,
    path: str,
) -> Projection:
    """The projection of rows of some layers.

    Raises:
        InvalidArgument: something is malformed.
        NotSupported: something is not served yet.
        MessageTooLarge: an inline vector is too large.
        NotFound: a vector is not stored, or a name not known.
        VectorShape: a vector has neither one row nor one for each of the layers.
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
    found, settings = [], []
    for index, readout in enumerate(readouts):
        place = f"{field}[{index}]"
        settings.append(resolve_product(readout, place))
        ref = readout.vector if readout.HasField("vector") else None
        found.append(find_vector(ref, vectors, model, field_path(place, "vector")))
    by_layer = [rows_by_layer(vector, layers) for vector in found]
    for setting, vector, rows in zip(settings, found, by_layer, strict=True):
        if setting.normalise is not Normalise.NONE:
            for row in sorted(set(rows.values())):
                check_norm(vector.vector, row, vector.path)
    plain = all(readout == _PRODUCT for readout in settings)
    return Projection(
        tuple(vector.vector for vector in found),
        {layer: tuple(rows[layer] for rows in by_layer) for layer in layers},
        () if plain else tuple(settings),
    )
