"""Vectors and what is done with them: an immutable handle, and a dose of it at sites and tokens.

A handle stands for numbers, by digest, by name or by value; arithmetic on it never touches the
numbers, it makes a `Steer` whose scale the server applies.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias

import numpy.typing as npt

from rheostat._arrays import ArrayLike, Element, FloatArray, VectorData, read_element, vector_data
from rheostat._errors import Refused, invalid
from rheostat._points import (
    Layers,
    LayersLike,
    Point,
    PointsLike,
    layers_of,
    points_of,
    read_site_set,
    show_layers,
    site_set,
)
from rheostat._proto.v1 import steering_pb2, steering_service_pb2
from rheostat._selectors import Selector, SelectorLike, selector_of
from rheostat._selectors import to_wire as selector_to_wire


@dataclass(frozen=True, repr=False)
class Vector:
    """A vector that requests can add to the stream.

    Made by ``engine.vectors.put`` and ``get``, by `inline`, or by `named`.
    """

    digest: str | None
    """SHA-256 of the content, 64 hex digits; None for a handle that only knows a name."""
    name: str | None = None
    """Name on the server, if it has one."""
    shape: tuple[int, int] | None = None
    """[rows, width]: one row for all layers or one row per layer; None if not known."""
    dtype: Element | None = None
    """Element type; None if not known."""
    points: tuple[Point, ...] | None = None
    """Points where it acts unless `at` says otherwise."""
    layers: Layers | None = None
    """Layers where it acts unless `at` says otherwise."""
    rows: VectorData | None = field(default=None, repr=False, compare=False)
    """The numbers, where this handle holds them."""
    by_value: bool = False
    """Whether requests carry the numbers themselves, not the digest."""

    __array_ufunc__: ClassVar[None] = None

    @property
    def values(self) -> FloatArray:
        """The numbers, float32 [rows, width]. Raises Refused for a handle that holds none."""
        if self.rows is None:
            raise Refused(f"{self.label} holds no numbers here; fetch it with engine.vectors.get")
        return self.rows.values

    @property
    def label(self) -> str:
        """Name, else the digest's beginning."""
        return self.name or f"vector {(self.digest or '')[:12]}"

    def at(
        self,
        *,
        points: PointsLike | None = None,
        layers: LayersLike | None = None,
        where: SelectorLike = None,
    ) -> Steer:
        """This vector at these points, layers and tokens; what is left out stays as it is."""
        return Steer(self).at(points=points, layers=layers, where=where)

    def __mul__(self, scale: float) -> Steer:
        """``scale`` times this vector."""
        return Steer(self) * scale

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Steer:
        """This vector by ``divisor``."""
        return Steer(self) / divisor

    def __neg__(self) -> Steer:
        """Minus this vector."""
        return -Steer(self)

    def __repr__(self) -> str:
        """Label, element type and shape, and where it acts by default."""
        parts = [self.label]
        if self.shape is not None:
            parts.append(f"{self.dtype} {list(self.shape)}")
        if self.points is not None:
            parts.append("+".join(self.points))
        if self.layers is not None:
            parts.append(f"layers {show_layers(self.layers)}")
        return f"Vector({', '.join(parts)})"

    def to_wire(self) -> steering_pb2.VectorRef:
        """The reference that a request carries."""
        if self.by_value and self.rows is not None:
            return steering_pb2.VectorRef(inline=self.rows.to_tensor())
        if self.digest is not None:
            return steering_pb2.VectorRef(digest=bytes.fromhex(self.digest))
        return steering_pb2.VectorRef(name=self.name or "")


@dataclass(frozen=True)
class Steer:
    """An addition: scale times a vector, at sites, on tokens."""

    vector: Vector
    """What is added."""
    scale: float = 1.0
    """How much of it; 0 leaves every bit as it was."""
    points: tuple[Point, ...] | None = None
    """Points; None: the vector's own."""
    layers: Layers | None = None
    """Layers; None: the vector's own."""
    where: Selector = field(default_factory=Selector)
    """Tokens; every one by default."""

    __array_ufunc__: ClassVar[None] = None

    def at(
        self,
        *,
        points: PointsLike | None = None,
        layers: LayersLike | None = None,
        where: SelectorLike = None,
    ) -> Steer:
        """The same at other points, layers or tokens; what is left out stays as it is."""
        return replace(
            self,
            points=self.points if points is None else points_of(points),
            layers=self.layers if layers is None else layers_of(layers),
            where=self.where if where is None else selector_of(where),
        )

    def __mul__(self, scale: float) -> Steer:
        """``scale`` times this."""
        return replace(self, scale=self.scale * float(scale))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Steer:
        """This by ``divisor``."""
        return replace(self, scale=self.scale / float(divisor))

    def __neg__(self) -> Steer:
        """The opposite."""
        return replace(self, scale=-self.scale)

    def to_wire(self, path: str) -> steering_pb2.Intervention:
        """The intervention; ``path`` names it in errors.

        Raises InvalidRequest where no point or layer is known, the scale is not finite, or rows
        and layers do not match.
        """
        points = self.points or self.vector.points
        layers = self.layers or self.vector.layers
        if points is None or layers is None:
            raise invalid(
                f"{path}.sites",
                f"{self.vector.label} has no default points and layers: use .at(points=, layers=)",
                "REASON_MISSING_FIELD",
            )
        if not math.isfinite(self.scale):
            raise invalid(f"{path}.add.scale", "the scale is not finite", "REASON_NON_FINITE")
        rows = self.vector.shape[0] if self.vector.shape else 1
        if rows > 1 and layers != "all" and rows != len(layers):
            raise invalid(
                f"{path}.add.vector",
                f"{self.vector.label} has {rows} rows for {len(layers)} layers "
                f"({show_layers(layers)})",
                "REASON_VECTOR_SHAPE",
            )
        return steering_pb2.Intervention(
            sites=site_set(points, layers),
            where=selector_to_wire(self.where),
            add=steering_pb2.Add(vector=self.vector.to_wire(), scale=self.scale),
        )


SteeringLike: TypeAlias = Vector | Steer | Iterable[Vector | Steer] | None
"""One addition, several, or none."""


def steering_to_wire(steering: SteeringLike) -> steering_pb2.Steering | None:
    """The message, in the caller's order; None for none."""
    if steering is None:
        return None
    many = _each(steering)
    if not many:
        return None
    return steering_pb2.Steering(
        interventions=[
            (one if isinstance(one, Steer) else Steer(one)).to_wire(
                f"steering.interventions[{number}]"
            )
            for number, one in enumerate(many)
        ]
    )


def _each(steering: object) -> tuple[Vector | Steer, ...]:
    """The additions. Raises InvalidRequest for what is none, saying what makes one of it."""
    alone = isinstance(steering, Vector | Steer | str) or hasattr(steering, "__array__")
    many = (steering,) if alone or not isinstance(steering, Iterable) else tuple(steering)
    found: list[Vector | Steer] = []
    for number, one in enumerate(many):
        if isinstance(one, Vector | Steer):
            found.append(one)
            continue
        if isinstance(one, str):
            kind, remedy = "a name", f'rheostat.named("{one}", points=..., layers=...)'
        else:
            kind, remedy = type(one).__name__, "rheostat.inline(array, points=..., layers=...)"
        raise invalid(f"steering[{number}]", f"steering takes vectors, not {kind}: use {remedy}")
    return tuple(found)


def inline(
    array: ArrayLike | npt.ArrayLike,
    *,
    points: PointsLike | None = None,
    layers: LayersLike | None = None,
    dtype: Element | None = None,
) -> Vector:
    """A vector that travels inside each request, for small or one-off ones.

    ``array`` is [width] or [rows, width]; see ``engine.vectors.put`` for element types.
    """
    rows = vector_data(array, dtype)
    at_points, at_layers = defaults(points, layers)
    return Vector(
        rows.digest.hex(), None, rows.shape, rows.element, at_points, at_layers, rows, by_value=True
    )


def named(
    name: str, *, points: PointsLike | None = None, layers: LayersLike | None = None
) -> Vector:
    """The vector that carries ``name`` on the server when a request is admitted."""
    if not name:
        raise invalid("vector.name", "the name is empty", "REASON_MISSING_FIELD")
    at_points, at_layers = defaults(points, layers)
    return Vector(None, name, points=at_points, layers=at_layers)


def defaults(
    points: PointsLike | None, layers: LayersLike | None
) -> tuple[tuple[Point, ...] | None, Layers | None]:
    """Points and layers that a handle acts at unless told otherwise."""
    return (
        None if points is None else points_of(points),
        None if layers is None else layers_of(layers),
    )


@dataclass(frozen=True)
class VectorInfo:
    """A stored vector, as the server lists it."""

    vector: Vector
    """Handle on it."""
    description: str
    """What its uploader wrote."""
    stored_at: datetime.datetime
    """When it was stored, UTC."""
    users: int
    """Running requests that use it."""


def read_vector(info: steering_service_pb2.VectorInfo, data: bytes | None = None) -> Vector:
    """The handle on a listed vector; with ``data``, its downloaded elements."""
    element = read_element(info.dtype)
    shape = (info.shape[0], info.shape[1])
    points, layers = read_site_set(info.sites) if info.HasField("sites") else (None, None)
    rows = None if data is None else VectorData(element, shape, data)
    return Vector(info.digest.hex(), info.name or None, shape, element, points, layers, rows)


def read_info(info: steering_service_pb2.VectorInfo) -> VectorInfo:
    """One entry of a list."""
    return VectorInfo(
        read_vector(info),
        info.description,
        info.stored_at.ToDatetime(tzinfo=datetime.UTC),
        info.users,
    )
