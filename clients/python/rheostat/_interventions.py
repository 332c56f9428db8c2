"""Interventions: an op at sites on tokens, as frozen values, and the message that each becomes.

Numbers stay as the caller wrote them until the message is made; there the path of each field is
known, and what is wrong whatever the model is refused by it.

In formulas x is a row of the stream, [width], in its units; v is a row of a vector, [width], and
u = v / |v|; norms are L2. The server computes in float32 and rounds once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from rheostat._errors import invalid
from rheostat._points import (
    Layers,
    LayersLike,
    Point,
    PointsLike,
    layers_of,
    points_of,
    show_layers,
    site_set,
)
from rheostat._selectors import Selector, SelectorLike, selector_of
from rheostat._selectors import to_wire as selector_to_wire
from rheostat_wire.v1 import steering_pb2, vector_pb2

if TYPE_CHECKING:  # a vector's arithmetic makes interventions, so `_vectors` imports this module
    from rheostat._vectors import Vector

_MOST_DIRECTIONS = 8
_Default = TypeVar("_Default", tuple[Point, ...], Layers)
_LARGEST_FLOAT32 = float.fromhex("0x1.fffffep127")
_ZERO_FLOAT32 = 2.0**-150
"""Largest number that float32 rounds to 0."""


@dataclass(frozen=True, kw_only=True)
class Intervention(ABC):
    """One op at the selected rows of some sites. Steering is a list of these."""

    points: tuple[Point, ...] | None = None
    """Points; None: those that its vectors are meant for."""
    layers: Layers | None = None
    """Layers; None: those that its vectors are meant for."""
    where: Selector = field(default_factory=Selector)
    """Tokens; every one by default."""

    __array_ufunc__: ClassVar[None] = None

    @property
    @abstractmethod
    def vectors(self) -> tuple[Vector, ...]:
        """Its vectors, in order."""

    @abstractmethod
    def _op(self, path: str, layers: Layers) -> steering_pb2.Intervention:
        """A message that holds the op alone, for a site set of these layers."""

    @abstractmethod
    def _told(self) -> str:
        """The op in words."""

    def at(
        self,
        *,
        points: PointsLike | None = None,
        layers: LayersLike | None = None,
        where: SelectorLike = None,
    ) -> Self:
        """The same at other points, layers or tokens; what is left out stays as it is."""
        return replace(
            self,
            points=self.points if points is None else points_of(points),
            layers=self.layers if layers is None else layers_of(layers),
            where=self.where if where is None else selector_of(where),
        )

    def to_wire(self, path: str) -> steering_pb2.Intervention:
        """The message; ``path`` names it in errors.

        Raises InvalidRequest if no point or layer is known, if numbers are outside their
        limits, or if a vector's rows do not match the layers.
        """
        if not self.vectors:
            raise invalid(path, "an op without a vector does nothing", "REASON_MISSING_FIELD")
        points = self.points or _agreed((one.points for one in self.vectors), f"{path}.sites")
        layers = self.layers or _agreed((one.layers for one in self.vectors), f"{path}.sites")
        if points is None or layers is None:
            raise invalid(
                f"{path}.sites",
                f"{_labels(self.vectors)} has no default points and layers: "
                "give them, with .at(points=, layers=)",
                "REASON_MISSING_FIELD",
            )
        message = self._op(path, layers)
        message.sites.CopyFrom(site_set(points, layers))
        where = selector_to_wire(self.where)
        if where is not None:
            message.where.CopyFrom(where)
        return message

    def __str__(self) -> str:
        """What it does, where, and on which tokens."""
        told = self._told()
        if self.points is not None and self.layers is not None:
            told += f" at {'+'.join(self.points)} {show_layers(self.layers)}"
        return told if self.where == Selector() else f"{told} on {self.where!r}"


@dataclass(frozen=True)
class Add(Intervention):
    """x + scale * v, as ``4 * vector`` makes it."""

    vector: Vector
    """v: one row for all layers, or one per layer."""
    scale: float = 1.0
    """Any finite number; 0 leaves every bit as it was."""

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The vector."""
        return (self.vector,)

    def __mul__(self, scale: float) -> Add:
        """``scale`` times this."""
        return replace(self, scale=self.scale * _factor(scale))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Add:
        """This by ``divisor``."""
        factor = _factor(divisor)
        if factor == 0:
            raise invalid("scale", "a dose cannot be divided by 0")
        return replace(self, scale=self.scale / factor)

    def __neg__(self) -> Add:
        """The opposite."""
        return replace(self, scale=-self.scale)

    def _op(self, path: str, layers: Layers) -> steering_pb2.Intervention:
        return steering_pb2.Intervention(
            add=steering_pb2.Add(
                vector=row_ref(self.vector, layers, f"{path}.add.vector"),
                scale=_finite(self.scale, f"{path}.add.scale", "scale"),
            )
        )

    def _told(self) -> str:
        return f"add {self.scale:.6g} * {self.vector.label}"


@dataclass(frozen=True)
class NormAdd(Intervention):
    """x + scale * |x| * u: the dose follows the norm that the stream has before this op."""

    vector: Vector
    """Its direction counts, its norm does not."""
    scale: float = 1.0
    """Added norm over the stream's norm: any finite number."""

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The vector."""
        return (self.vector,)

    def _op(self, path: str, layers: Layers) -> steering_pb2.Intervention:
        return steering_pb2.Intervention(
            norm_add=steering_pb2.NormAdd(
                vector=_direction(self.vector, layers, f"{path}.norm_add.vector"),
                scale=_finite(self.scale, f"{path}.norm_add.scale", "scale"),
            )
        )

    def _told(self) -> str:
        return f"norm_add {self.scale:.6g} * {self.vector.label}"


@dataclass(frozen=True)
class Ablate(Intervention):
    """x - strength * (the orthogonal projection of x on the directions' span)."""

    directions: tuple[Vector, ...]
    """1 to 8, linearly independent; their norms do not count."""
    strength: float = 1.0
    """0 (nothing) to 1 (all)."""

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The directions."""
        return self.directions

    def _op(self, path: str, layers: Layers) -> steering_pb2.Intervention:
        path = f"{path}.ablate"
        _few(len(self.directions), f"{path}.directions", "directions")
        return steering_pb2.Intervention(
            ablate=steering_pb2.Ablate(
                directions=[
                    _direction(one, layers, f"{path}.directions[{number}]")
                    for number, one in enumerate(self.directions)
                ],
                strength=_fraction(self.strength, f"{path}.strength"),
            )
        )

    def _told(self) -> str:
        return f"ablate {_labels(self.directions)}{_part(self.strength)}"


@dataclass(frozen=True)
class Band:
    """Where the coordinate x.u along a direction may lie."""

    direction: Vector
    """Its norm does not count."""
    min: float | None = None
    """Lower bound, in the units of the stream; None: none."""
    max: float | None = None
    """Upper bound; None: none. Equal to ``min``: the coordinate is pinned there."""
    strength: float = 1.0
    """How much of the way into the band: 0 (nothing) to 1 (all)."""

    def to_wire(self, path: str, layers: Layers) -> steering_pb2.Band:
        """The message. Raises InvalidRequest for no bound at all, and for min above max."""
        low = None if self.min is None else _finite(self.min, f"{path}.min", "min")
        high = None if self.max is None else _finite(self.max, f"{path}.max", "max")
        if low is None and high is None:
            raise invalid(path, "a band needs min, max or both", "REASON_MISSING_FIELD")
        if low is not None and high is not None and low > high:
            raise invalid(f"{path}.max", f"max {high:.6g} is below min {low:.6g}")
        return steering_pb2.Band(
            read=_along(self.direction, layers, f"{path}.read"),
            min=low,
            max=high,
            strength=_fraction(self.strength, f"{path}.strength"),
        )

    def __str__(self) -> str:
        """As "joy to -1..2", "joy to ..2", "joy to 0"."""
        low, high = ("" if end is None else f"{end:.6g}" for end in (self.min, self.max))
        told = low if low == high else f"{low}..{high}"
        return f"{self.direction.label} to {told}{_part(self.strength)}"


@dataclass(frozen=True)
class Clamp(Intervention):
    """For each band in turn: x + strength * (clip(x.u, min, max) - x.u) * u."""

    bands: tuple[Band, ...]
    """1 to 8. Of directions that are not orthogonal, only the last is sure to end in its band."""

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The bands' directions."""
        return tuple(band.direction for band in self.bands)

    def _op(self, path: str, layers: Layers) -> steering_pb2.Intervention:
        path = f"{path}.clamp.bands"
        _few(len(self.bands), path, "bands")
        return steering_pb2.Intervention(
            clamp=steering_pb2.Clamp(
                bands=[
                    band.to_wire(f"{path}[{number}]", layers)
                    for number, band in enumerate(self.bands)
                ]
            )
        )

    def _told(self) -> str:
        return f"clamp {', '.join(str(band) for band in self.bands)}"


@dataclass(frozen=True)
class Scale(Intervention):
    """x + (factor - 1) * (x.u) * u."""

    direction: Vector
    """Its norm does not count."""
    factor: float
    """Of the coordinate x.u: 1 changes nothing, 0 ablates, -1 mirrors."""

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The direction."""
        return (self.direction,)

    def _op(self, path: str, layers: Layers) -> steering_pb2.Intervention:
        return steering_pb2.Intervention(
            scale=steering_pb2.Scale(
                read=_along(self.direction, layers, f"{path}.scale.read"),
                factor=_finite(self.factor, f"{path}.scale.factor", "factor"),
            )
        )

    def _told(self) -> str:
        return f"scale {self.direction.label} by {self.factor:.6g}"


def _agreed(defaults: Iterable[_Default | None], path: str) -> _Default | None:
    """What all vectors that are meant for somewhere are meant for."""
    known = [one for one in defaults if one is not None]
    if any(tuple(one) != tuple(known[0]) for one in known):
        raise invalid(
            path,
            "the vectors are meant for different sites: say which, with .at(points=, layers=)",
        )
    return known[0] if known else None


def row_ref(vector: Vector, layers: Layers, path: str) -> vector_pb2.VectorRef:
    """The reference that takes the vector's row of each of ``layers``.

    Raises InvalidRequest if the vector has several rows and not one for each of the layers.
    """
    ref = vector.to_wire()
    own = vector.layers_of_rows
    if not own:
        rows = vector.shape[0] if vector.shape else 1
        if rows > 1 and layers != "all" and rows != len(layers):
            raise invalid(
                path,
                f"{vector.label} has {rows} rows for {len(layers)} layers ({show_layers(layers)})",
                "REASON_VECTOR_SHAPE",
            )
        return ref
    if layers != "all" and not set(layers) <= set(own):
        raise invalid(
            path,
            f"{vector.label} has rows for layers {show_layers(own)}, not for all of layers "
            f"{show_layers(layers)}: choose among the former, or use its rows for other layers "
            "with dataclasses.replace(vector, row_layers=(...))",
            "REASON_VECTOR_SHAPE",
        )
    # Rows in the order of the layers are what a reference without row_layers means.
    if vector.row_layers is not None or (layers != vector.layers and tuple(layers) != own):
        ref.row_layers.layers.extend(own)
    return ref


def _along(vector: Vector, layers: Layers, path: str) -> vector_pb2.Readout:
    """The coordinate along a direction, whatever its norm."""
    return vector_pb2.Readout(
        vector=_direction(vector, layers, f"{path}.vector"), normalise=vector_pb2.NORMALISE_UNIT
    )


def _direction(vector: Vector, layers: Layers, path: str) -> vector_pb2.VectorRef:
    """As `row_ref`, if no row that this handle knows is zero."""
    if vector.rows is not None and not vector.rows.values.any(axis=1).all():
        raise invalid(path, f"{vector.label} is zero and has no direction", "REASON_ZERO_VECTOR")
    return row_ref(vector, layers, path)


def _factor(number: float) -> float:
    """What a dose is multiplied by or divided by."""
    try:
        return float(number)
    except (TypeError, ValueError):
        raise invalid("scale", f"a dose is a number, not {number!r}") from None


def _finite(number: float, path: str, what: str) -> float:
    """``number``, if float32 can hold it."""
    try:
        found = float(number)
    except (OverflowError, TypeError, ValueError):
        raise invalid(path, f"the {what} cannot be {number!r}") from None
    if not abs(found) <= _LARGEST_FLOAT32:
        raise invalid(path, f"the {what} is not finite", "REASON_NON_FINITE")
    if 0 < abs(found) <= _ZERO_FLOAT32:
        raise invalid(path, f"the {what} {found:g} is 0 in float32: write 0, or 1e-45 and above")
    return found


def _fraction(strength: float, path: str) -> float:
    found = _finite(strength, path, "strength")
    if not 0 <= found <= 1:
        raise invalid(path, f"a strength is 0 to 1, not {found:.6g}")
    return found


def _few(count: int, path: str, what: str) -> None:
    if count > _MOST_DIRECTIONS:
        raise invalid(path, f"{count} {what}; at most {_MOST_DIRECTIONS} go together")


def _labels(vectors: Iterable[Vector]) -> str:
    return ", ".join(vector.label for vector in vectors)


def _part(strength: float) -> str:
    return "" if strength == 1 else f" (strength {strength:.6g})"
