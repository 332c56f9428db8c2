"""Vectors that the server derived from two sets of prompts, with the statistics of their rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, TypeAlias

from rheostat._errors import Refused, ServerError
from rheostat._notebook import passage, text_table
from rheostat._points import (
    Layers,
    PointLike,
    Site,
    point_of,
    read_point,
    show_layers,
)
from rheostat._steering.transfers import Progress
from rheostat._steering.vectors import Vector, VectorSource
from rheostat_wire.v1 import steering_service_pb2

DeriveMethod: TypeAlias = Literal["difference_of_means", "principal_component"]
"""Methods that derive a direction from two sets of rows; see ``engine.vectors.derive``."""

_LOG = logging.getLogger("rheostat")

METHODS: dict[DeriveMethod, steering_service_pb2.DeriveMethod.ValueType] = {
    "difference_of_means": steering_service_pb2.DERIVE_METHOD_DIFFERENCE_OF_MEANS,
    "principal_component": steering_service_pb2.DERIVE_METHOD_PRINCIPAL_COMPONENT,
}


@dataclass(frozen=True)
class DerivedRow:
    """The statistics of one row of a derived vector."""

    site: Site
    """Site where it was captured, and where it acts by default."""
    norm: float
    """L2 norm of the row; 0 if the two sets do not differ."""
    stream_norm: float
    """Mean L2 norm of the stream at the site, as a scale for doses."""
    explained: float
    """Fraction, 0 to 1, of the differences between the sets that lies along the row."""
    separation: float | None
    """Cohen's d of held-out prompts, on a direction derived from the others: the distance of the
    sets in standard deviations. If it is about 0 or below, the direction does not generalise. None
    if it is not defined, as with one prompt in a set."""


@dataclass(frozen=True)
class Derivation(VectorSource):
    """Vectors that the server derived and stored, one per point, and statistics of their rows.

    ``derivation["resid_post"]`` is the vector of a point. ``print`` shows the statistics as a
    table.
    """

    vectors: tuple[Vector, ...]
    """Handles, in the order of the requested points."""
    rows: tuple[DerivedRow, ...]
    """The statistics of every row, by point in the same order, then by layer, ascending."""

    def __getitem__(self, point: PointLike) -> Vector:
        """The vector of a point. Raises KeyError if the point was not requested."""
        chosen = point_of(point)
        for vector in self.vectors:
            if vector.points == (chosen,):
                return vector
        raise KeyError(point)

    @property
    def vector(self) -> Vector:
        """The vector, if one point was requested. Raises Refused if there are several."""
        if len(self.vectors) > 1:
            raise Refused('there is a vector per point: choose one, as derivation["resid_post"]')
        return self.vectors[0]

    @property
    def best(self) -> DerivedRow:
        """The row with the largest separation, as a first candidate for steering.

        Its site separates the prompts best. Only a sweep over doses shows whether steering works
        best there. Raises Refused if no row has a separation.
        """
        row = self._best()
        if row is None:
            raise Refused("no row has a separation; give two prompts or more in each set")
        return row

    def _best(self) -> DerivedRow | None:
        measured = [row for row in self.rows if row.separation is not None]
        return max(measured, key=attrgetter("separation"), default=None)

    def __str__(self) -> str:
        best = self._best()
        head = ["site", "norm", "stream", "explained", "separation", ""]
        lines = [
            [
                str(row.site),
                f"{row.norm:.3g}",
                f"{row.stream_norm:.3g}",
                f"{row.explained:.1%}",
                "-" if row.separation is None else f"{row.separation:.2f}",
                "best" if row is best else "",
            ]
            for row in self.rows
        ]
        return text_table([head, *lines], right=range(1, 5))

    def _repr_html_(self) -> str:
        return passage(str(self))


class DerivationAccumulator:
    """Turns `DeriveVectorsResponse` messages into a `Derivation`."""

    def __init__(self, layers: Layers, progress: Progress | None) -> None:
        self._layers = layers
        self._progress = progress
        self._derived: steering_service_pb2.DerivedVectors | None = None

    def add(self, message: steering_service_pb2.DeriveVectorsResponse) -> list[None]:
        """Take the next event."""
        match message.WhichOneof("event"):
            case "progress" if self._progress is not None:
                progress = message.progress
                self._progress(progress.done_prompt_count, progress.total_prompt_count)
            case "derived":
                self._derived = message.derived
        return []

    def result(self) -> Derivation:
        """The vectors, once the stream has ended with OK."""
        if self._derived is None:
            raise ServerError("the server ended a derivation without its vectors")
        return _read_derivation(self._derived, self._layers)


def _read_derivation(answer: steering_service_pb2.DerivedVectors, layers: Layers) -> Derivation:
    vectors: list[Vector] = []
    rows: list[DerivedRow] = []
    for derived in answer.vectors:
        point = read_point(derived.point)
        vectors.append(
            Vector(
                derived.digest.hex(),
                derived.name or None,
                dtype="float32",
                points=(point,),
                layers=layers,
                # A single row may act at any layer.
                row_layers=tuple(row.layer for row in derived.rows)
                if len(derived.rows) > 1
                else None,
            )
        )
        rows.extend(
            DerivedRow(
                Site(point, row.layer),
                row.norm,
                row.stream_norm,
                row.explained,
                row.separation if row.HasField("separation") else None,
            )
            for row in derived.rows
        )
    for vector in vectors:
        _warn_of_zero(vector, [row for row in rows if row.site.point in (vector.points or ())])
    return Derivation(tuple(vectors), tuple(rows))


def _warn_of_zero(vector: Vector, rows: Sequence[DerivedRow]) -> None:
    if any(row.norm for row in rows):
        return
    where = f"{'+'.join(vector.points or ())} {show_layers([row.site.layer for row in rows])}"
    _LOG.warning("the two sets do not differ at %s: the vector is zero and steers nothing", where)
