"""Vectors: immutable handles on numbers, by digest, by name or by value.

Arithmetic on a handle does not compute anything: it makes an `Add` whose scale the server applies.
"""

from __future__ import annotations

import datetime
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from rheostat._arrays import ArrayLike, Element, VectorData, read_element, vector_data
from rheostat._errors import Refused, invalid
from rheostat._fields import checks_arguments, counted, is_finite, vector_digest, vector_name
from rheostat._points import (
    Layers,
    LayersLike,
    Point,
    PointsLike,
    layers_of,
    missing_sites,
    points_of,
    read_site_set,
    show_layers,
    site_set,
)
from rheostat._selectors import Selector, SelectorLike, selector_of
from rheostat._selectors import to_wire as selector_to_wire
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.v1 import gate_pb2, steering_pb2, steering_service_pb2, vector_pb2

_Default = TypeVar("_Default", tuple[Point, ...], Layers)
_ZERO_FLOAT32 = 2.0**-150
"""Largest number that float32 rounds to 0."""


class _NoSums:
    """Sums and differences are errors that say what to write instead."""

    def __add__(self, other: object) -> NoReturn:
        _refuse_sum(self, "+", other)

    def __radd__(self, other: object) -> NoReturn:
        _refuse_sum(other, "+", self)

    def __sub__(self, other: object) -> NoReturn:
        _refuse_sum(self, "-", other)


@dataclass(frozen=True, repr=False)
class Vector(_NoSums):
    """A vector that requests can steer with; arithmetic on it makes an addition.

    Made by ``engine.vectors.put`` and ``get``, by `inline`, by `named`, or by `load_vector`.
    """

    digest: str | None
    """SHA-256 of the content, 64 hex digits; None if the handle has only a name."""
    name: str | None = None
    """Name on the server, if it has one."""
    shape: tuple[int, int] | None = None
    """[rows, width]: one row for all layers or one row per layer; None if unknown."""
    dtype: Element | None = None
    """Element type; None if unknown."""
    points: tuple[Point, ...] | None = None
    """Points where it acts by default; see `at`."""
    layers: Layers | None = None
    """Layers where it acts by default; see `at`."""
    rows: VectorData | None = field(default=None, repr=False, compare=False)
    """The numbers, if this handle holds them."""
    by_value: bool = False
    """Whether requests carry the numbers instead of the digest."""
    description: str = field(default="", repr=False, compare=False)
    """The description, "" if unknown."""
    row_layers: tuple[int, ...] | None = None
    """The layer of each row; None if `layers` has it, or if one row is for all layers."""

    __array_ufunc__: ClassVar[None] = None

    @property
    def values(self) -> FloatArray:
        """The numbers, float32 [rows, width]. Raises Refused if this handle does not hold them."""
        if self.rows is None:
            raise Refused(
                f"{self.label} has no numbers in this client; fetch it with engine.vectors.get"
            )
        return self.rows.values

    @property
    def layers_of_rows(self) -> tuple[int, ...]:
        """The layer of each row; empty if one row is for all layers, or if unknown."""
        if self.row_layers is not None:
            return self.row_layers
        rows = self.shape[0] if self.shape else 1
        if rows == 1 or self.layers is None:
            return ()
        layers = tuple(range(rows)) if self.layers == "all" else tuple(self.layers)
        return layers if len(layers) == rows else ()

    @property
    def label(self) -> str:
        """The name, or else the first digits of the digest."""
        return self.name or f"vector {(self.digest or '')[:12]}"

    def select(self, *, layers: LayersLike) -> Vector:
        """A vector of the rows of some layers, which acts at these layers; "all" keeps every row.

        If this handle holds its numbers, the result holds the selected rows. It is a new vector
        without a name, and it is sent in requests until ``engine.vectors.put`` stores it. Otherwise
        the result is a handle on the stored vector, and requests use the selected rows. A vector of
        one row keeps that row for any layers.

        Raises InvalidRequest if a layer has no row, and if the layers of several rows are unknown.
        """
        chosen = layers_of(layers)
        own = self.layers_of_rows
        if not own:
            if self.shape is not None and self.shape[0] > 1:
                raise invalid(
                    "layers",
                    f"{self.label} has {self.shape[0]} rows whose layers are not known: give "
                    f"them with dataclasses.replace(vector, layers=range({self.shape[0]}))",
                    "REASON_VECTOR_SHAPE",
                )
            return replace(self, layers=chosen)
        if chosen == "all":
            return self
        missing = [layer for layer in chosen if layer not in own]
        if missing:
            raise invalid(
                "layers",
                f"{self.label} has rows for {_name_layers(own)}, not for {_name_layers(missing)}",
                "REASON_VECTOR_SHAPE",
            )
        if self.rows is None:
            return replace(self, layers=chosen, row_layers=own)
        rows = self.rows.select([own.index(layer) for layer in chosen])
        return replace(
            self, digest=rows.digest.hex(), name=None, shape=rows.shape, layers=chosen, rows=rows,
            by_value=True, row_layers=None,
        )  # fmt: skip

    @checks_arguments
    def at(
        self,
        points: PointsLike | None = None,
        layers: LayersLike | None = None,
        where: SelectorLike = None,
    ) -> Add:
        """A dose: this vector, added at these points, layers and tokens.

        Omitted arguments keep the vector's own values. `select` gives a vector, not a dose.
        """
        return Add(self).at(points, layers, where)

    def when(self, gate: GateLike) -> Add:
        """A dose: this vector, added in proportion to a gate's openness; see `Intervention`."""
        return Add(self).when(gate)

    def __mul__(self, scale: float) -> Add:
        return Add(self) * scale

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Add:
        return Add(self) / divisor

    def __neg__(self) -> Add:
        return -Add(self)

    def __array__(
        self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
    ) -> npt.NDArray[Any]:
        """`values`, so that numpy can read it. Raises Refused if it does not hold its numbers.

        An array of objects has the vector itself.
        """
        if dtype is not None and np.dtype(dtype) == np.dtype(object):
            handle = np.empty((), object)
            handle[()] = self
            return handle
        return np.asarray(self.values, dtype)

    def __repr__(self) -> str:
        parts = [self.label]
        if self.shape is not None:
            parts.append(f"{self.dtype} {list(self.shape)}")
        if self.points is not None:
            parts.append("+".join(self.points))
        if self.layers is not None:
            parts.append(f"layers {show_layers(self.layers)}")
        return f"Vector({', '.join(parts)})"

    def to_wire(self) -> vector_pb2.VectorRef:
        """The reference to this vector in a request."""
        if self.by_value and self.rows is not None:
            return vector_pb2.VectorRef(inline=self.rows.to_tensor())
        if self.digest is not None:
            return vector_pb2.VectorRef(digest=vector_digest(self.digest))
        return vector_pb2.VectorRef(name=self.name or "")


class GateMessages(Protocol):
    """What an intervention needs of its `Gate`, which is made of probes, and these of vectors."""

    def to_wire(self, path: str) -> gate_pb2.Gate:
        """The message; ``path`` names it in errors."""

    def probes_to_wire(self) -> list[gate_pb2.Probe]:
        """The probes that it reads, each once."""


class GateLike(Protocol):
    """A `Gate`, or a `Condition`, which makes one of its own."""

    def as_gate(self) -> GateMessages:
        """The gate."""


@dataclass(frozen=True, kw_only=True)
class Intervention(_NoSums, ABC):
    """One op at the selected rows of some sites. Steering is a list of these."""

    points: tuple[Point, ...] | None = None
    """Points; None: the default points of its vectors."""
    layers: Layers | None = None
    """Layers; None: the default layers of its vectors."""
    where: Selector = field(default_factory=Selector)
    """Tokens. Default: every token."""
    gate: GateMessages | None = None
    """Multiplies its effect at each token; None: 1."""

    __array_ufunc__: ClassVar[None] = None
    _needs_vectors: ClassVar[bool] = True

    @property
    @abstractmethod
    def vectors(self) -> tuple[Vector, ...]:
        """Its vectors, in order."""

    @abstractmethod
    def _op(self, path: str, layers: Layers) -> steering_pb2.Intervention:
        """A message with the op, without sites; ``layers`` are those where it acts."""

    @abstractmethod
    def _text(self) -> str:
        """The op in words."""

    @checks_arguments
    def at(
        self,
        points: PointsLike | None = None,
        layers: LayersLike | None = None,
        where: SelectorLike = None,
    ) -> Self:
        """The same op at other points, layers or tokens. Omitted arguments keep their values."""
        return replace(
            self,
            points=self.points if points is None else points_of(points),
            layers=self.layers if layers is None else layers_of(layers),
            where=self.where if where is None else selector_of(where),
        )

    def when(self, gate: GateLike) -> Self:
        """The same op with a gate, which multiplies its effect. A condition becomes a gate.

        For example ``joy.when(gloom.above(2))``, with a `probe` ``gloom``. Served by generate,
        stream, session, explain and ``steering.set_global``. Raises InvalidRequest if the op
        already has a gate.
        """
        as_gate = getattr(gate, "as_gate", None)
        if as_gate is None:
            problem = "when takes a gate or a condition, such as rheostat.probe(vector).above(2) "
            raise invalid("steering", f"{problem}or a fit's .condition, not {type(gate).__name__}")
        if self.gate is not None:
            problem = f"it has a gate already, when {self.gate}: put all conditions into one, "
            raise invalid("steering", f"{problem}rheostat.gate(a, b)")
        return replace(self, gate=as_gate())

    def to_wire(self, path: str) -> steering_pb2.Intervention:
        """The message; ``path`` names it in errors.

        Raises InvalidRequest if no point or layer is given, if numbers are out of range, or if a
        vector's rows do not match the layers.
        """
        if not self.vectors and self._needs_vectors:
            raise invalid(path, "an op without a vector does nothing", "REASON_MISSING_FIELD")
        points = self.points or _agreed((vector.points for vector in self.vectors), f"{path}.sites")
        layers = self.layers or _agreed((vector.layers for vector in self.vectors), f"{path}.sites")
        if points is None or layers is None:
            what, call = labels(self.vectors) or self._text(), ".at({})"
            raise missing_sites(
                f"{path}.sites", what, points, layers, call, named=unfetched(self.vectors)
            )
        message = self._op(path, layers)
        message.sites.CopyFrom(site_set(points, layers))
        where = selector_to_wire(self.where)
        if where is not None:
            message.where.CopyFrom(where)
        if self.gate is not None:
            message.gate.CopyFrom(self.gate.to_wire(f"{path}.gate"))
        return message

    def __str__(self) -> str:
        text = self._text()
        if self.points is not None or self.layers is not None:
            points = self.points or _common(vector.points for vector in self.vectors)
            layers = self.layers or _common(vector.layers for vector in self.vectors)
            text += f" at {'+'.join(points or ('its points',))}"
            text += f" {'its layers' if layers is None else show_layers(layers)}"
        if self.where != Selector():
            text += f" on {self.where!r}"
        return text if self.gate is None else f"{text} when {self.gate}"


@dataclass(frozen=True)
class Add(Intervention):
    """x + scale * v, for example ``4 * vector``."""

    vector: Vector
    """v: one row for all layers, or one per layer."""
    scale: float = 1.0
    """Any finite number; 0 changes no bit."""

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The vector."""
        return (self.vector,)

    def __mul__(self, scale: float) -> Add:
        return replace(self, scale=self.scale * _factor(scale))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Add:
        factor = _factor(divisor)
        if factor == 0:
            raise invalid("scale", "a dose cannot be divided by 0")
        return replace(self, scale=self.scale / factor)

    def __neg__(self) -> Add:
        return replace(self, scale=-self.scale)

    def _op(self, path: str, layers: Layers) -> steering_pb2.Intervention:
        return steering_pb2.Intervention(
            add=steering_pb2.Add(
                vector=row_ref(self.vector, layers, f"{path}.add.vector"),
                scale=finite(self.scale, f"{path}.add.scale", "scale"),
            )
        )

    def _text(self) -> str:
        return f"add {self.scale:.6g} * {self.vector.label}"


@checks_arguments
def inline(
    array: ArrayLike | npt.ArrayLike,
    *,
    points: PointsLike | None = None,
    layers: LayersLike | None = None,
    dtype: Element | None = None,
) -> Vector:
    """A vector that is sent inside each request, for vectors that are small or used once.

    ``array`` is [width] or [rows, width]; see ``engine.vectors.put`` for element types.
    """
    refuse_dose(array, "vector")
    rows = vector_data(array, dtype)
    at_points, at_layers = defaults(points, layers)
    return Vector(
        rows.digest.hex(), None, rows.shape, rows.element, at_points, at_layers, rows, by_value=True
    )


@checks_arguments
def named(
    name: str,
    *,
    points: PointsLike | None = None,
    layers: LayersLike | None = None,
) -> Vector:
    """The vector that has ``name`` on the server when a request is admitted.

    The client does not know its default points and layers, so give them here or in ``at``, or use
    ``engine.vectors.get``. If the vector was stored with one layer per row, each of ``layers``
    takes its own row, and the server refuses layers without a row.
    """
    if not name:
        raise invalid("vector.name", "the name is empty", "REASON_MISSING_FIELD")
    at_points, at_layers = defaults(points, layers)
    return Vector(None, vector_name(name, "vector.name"), points=at_points, layers=at_layers)


class VectorSource:
    """A result with a ``vector``. Users often pass the result instead of this vector."""

    @property
    def advice(self) -> str:
        """The error message if the result is passed instead of its vector."""
        return f"a {type(self).__name__} is not a vector: pass its .vector"


def refuse_dose(given: object, path: str) -> None:
    """Raise InvalidRequest if a dose, or a result that has a vector, is passed as a vector."""
    if isinstance(given, Intervention):
        raise invalid(path, DOSE)
    if isinstance(given, VectorSource):
        raise invalid(path, given.advice)


DOSE = (
    "this is a dose, not a vector, as .at(...) and a scale make doses: pass its vector; "
    "vector.select(layers=3) is a vector of the row of layer 3"
)
"""The error text if a dose is passed instead of a vector."""


def check_row_count(shape: tuple[int, int], layers: Layers | None) -> None:
    """Raise InvalidRequest if several rows are not as many as ``layers``."""
    rows = shape[0]
    if rows > 1 and layers is not None and layers != "all" and rows != len(layers):
        raise invalid(
            "layers",
            f"{rows} rows for {_count_layers(layers)}: a vector has one row, or one row per "
            "layer; vector.select(layers=...) takes the rows of some layers",
            "REASON_VECTOR_SHAPE",
        )


def _name_layers(layers: Sequence[int]) -> str:
    """As "layer 3" or "layers 2-5"."""
    return f"{'layer' if len(layers) == 1 else 'layers'} {show_layers(layers)}"


def _count_layers(layers: range | tuple[int, ...]) -> str:
    """As "1 layer (3)" or "4 layers (2-5)"."""
    return f"{counted(len(layers), 'layer')} ({show_layers(layers)})"


def defaults(
    points: PointsLike | None, layers: LayersLike | None
) -> tuple[tuple[Point, ...] | None, Layers | None]:
    """The default points and layers of a handle, normalised."""
    return (
        None if points is None else points_of(points),
        None if layers is None else layers_of(layers),
    )


@dataclass(frozen=True, repr=False)
class VectorInfo:
    """A stored vector, as the server lists it."""

    vector: Vector
    description: str
    """The description that was stored with it."""
    store_time: datetime.datetime
    """Time when it was stored, UTC."""
    request_count: int
    """Number of running requests that use it."""

    def __repr__(self) -> str:
        vector = self.vector
        parts = [repr(vector.name), (vector.digest or "")[:12]]
        if vector.shape is not None:
            parts.append(f"{vector.dtype} {list(vector.shape)}")
        if vector.points is not None and vector.layers is not None:
            parts.append(f"{'+'.join(vector.points)} {show_layers(vector.layers)}")
        parts += [counted(self.request_count, "user")] if self.request_count else []
        parts += [repr(self.description)] if self.description else []
        return f"VectorInfo({', '.join(parts)})"


def read_vector(info: steering_service_pb2.VectorInfo, data: bytes | None = None) -> Vector:
    """The handle on a listed vector; ``data`` are its elements, if they were downloaded."""
    element = read_element(info.dtype)
    shape = (info.shape[0], info.shape[1])
    meant_for = read_site_set(info.sites) if info.HasField("sites") else None
    points, layers = meant_for or (None, None)
    rows = None if data is None else VectorData(element, shape, data)
    return Vector(
        info.digest.hex(), info.name or None, shape, element, points, layers, rows,
        description=info.description,
    )  # fmt: skip


def read_info(info: steering_service_pb2.VectorInfo) -> VectorInfo:
    return VectorInfo(
        read_vector(info),
        info.description,
        info.store_time.ToDatetime(tzinfo=datetime.UTC),
        info.request_count,
    )


def row_ref(vector: Vector, layers: Layers, path: str) -> vector_pb2.VectorRef:
    """A reference to the rows of a vector for ``layers``.

    Raises InvalidRequest if the vector has several rows, and none for one of the layers.
    """
    ref = vector.to_wire()
    own = vector.layers_of_rows
    if not own:
        rows = vector.shape[0] if vector.shape else 1
        if rows > 1 and layers != "all" and rows != len(layers):
            raise invalid(
                path,
                f"{vector.label} has {rows} rows for {_count_layers(layers)}",
                "REASON_VECTOR_SHAPE",
            )
        return ref
    if layers != "all" and not set(layers) <= set(own):
        raise invalid(
            path,
            f"{vector.label} has rows for {_name_layers(own)}, not for "
            f"{_name_layers([layer for layer in layers if layer not in own])}: choose among "
            "these, or use its rows for other layers with "
            "dataclasses.replace(vector, row_layers=(...))",
            "REASON_VECTOR_SHAPE",
        )
    # A reference without row_layers means rows in the order of the layers.
    if vector.row_layers is not None or (layers != vector.layers and tuple(layers) != own):
        ref.row_layers.layers.extend(own)
    return ref


def _agreed(defaults: Iterable[_Default | None], path: str) -> _Default | None:
    """The common default points or layers of vectors; None if no vector has a default."""
    given = [default for default in defaults if default is not None]
    if not _equal(given):
        advice = "give the sites, with .at(points=, layers=)"
        raise invalid(path, f"the vectors are meant for different sites: {advice}")
    return given[0] if given else None


def _equal(defaults: Sequence[tuple[Point, ...] | Layers]) -> bool:
    return all(tuple(default) == tuple(defaults[0]) for default in defaults)


def _common(defaults: Iterable[_Default | None]) -> _Default | None:
    """As `_agreed`, but None if the defaults differ."""
    given = [default for default in defaults if default is not None]
    return given[0] if given and _equal(given) else None


def _refuse_sum(left: object, sign: str, right: object) -> NoReturn:
    text = "interventions are not summed: give them in a list, as in steering=[4 * joy, 2 * calm]"
    if isinstance(left, Vector) and isinstance(right, Vector):
        second = "b" if sign == "+" else "-b"
        text = (
            f"vectors are not added or subtracted: steering=[a, {second}] steers with both; "
            f"rheostat.inline(a.values {sign} b.values, points=..., layers=...) is a "
            "new vector of their rows"
        )
    raise invalid("steering.interventions", text)


def _factor(number: float) -> float:
    try:
        return float(number)
    except OverflowError:
        raise invalid("scale", "the scale is not finite", "REASON_NON_FINITE") from None
    except (TypeError, ValueError):
        raise invalid("scale", f"a dose is a number, not {number!r}") from None


def finite(number: float, path: str, what: str) -> float:
    """Returns ``number`` if float32 can hold it."""
    try:
        value = float(number)
    except OverflowError:
        value = float("inf")
    except (TypeError, ValueError):
        raise invalid(path, f"the {what} is a number, not {number!r}") from None
    if not is_finite(value):
        raise invalid(path, f"the {what} is not finite", "REASON_NON_FINITE")
    if 0 < abs(value) <= _ZERO_FLOAT32:
        raise invalid(path, f"the {what} {value:g} is 0 in float32: write 0, or 1e-45 and above")
    return value


def finite_or_none(number: float | None, path: str, what: str) -> float | None:
    """As `finite`; None stays None."""
    return None if number is None else finite(number, path, what)


def unfetched(vectors: Iterable[Vector]) -> str:
    """The name of the first handle that has only a name; "" if there is none."""
    return next((vector.name for vector in vectors if vector.digest is None and vector.name), "")


def labels(vectors: Iterable[Vector]) -> str:
    return ", ".join(vector.label for vector in vectors)
