"""Interventions: an op at sites on tokens, as frozen values that build their messages.

Most numbers are checked when the message is built, because the path of each field is known then.
Checks that need the model are left to the server.

In formulas x is a row of the stream, [width], in its units; v is a row of a vector, [width], and
u = v / |v|; norms are L2. The server computes in float32 and rounds once.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from rheostat._errors import invalid
from rheostat._fields import flag, with_paths
from rheostat._points import Layers
from rheostat._steering.readouts import Readout
from rheostat._steering.vectors import Intervention, Vector, finite, finite_or_none, labels, row_ref
from rheostat_wire.v1 import steering_pb2, vector_pb2

_MOST_DIRECTIONS = 8


@dataclass(frozen=True)
class NormAdd(Intervention):
    """x + scale * |x| * u, where x is the stream before this op."""

    vector: Vector
    """Only its direction matters."""
    scale: float = 1.0
    """Norm of the added vector / norm of the stream: any finite number."""

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The vector."""
        return (self.vector,)

    def _op(self, path: str, layers: Layers) -> steering_pb2.Intervention:
        return steering_pb2.Intervention(
            norm_add=steering_pb2.NormAdd(
                vector=_direction(self.vector, layers, f"{path}.norm_add.vector"),
                scale=finite(self.scale, f"{path}.norm_add.scale", "scale"),
            )
        )

    def _text(self) -> str:
        return f"norm_add {self.scale:.6g} * {self.vector.label}"


@dataclass(frozen=True)
class Ablate(Intervention):
    """x - strength * (the orthogonal projection of x on the directions' span)."""

    directions: tuple[Vector, ...]
    """1 to 8, linearly independent; their norms do not matter."""
    strength: float = 1.0
    """0 (nothing) to 1 (all)."""

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The directions."""
        return self.directions

    def _op(self, path: str, layers: Layers) -> steering_pb2.Intervention:
        path = f"{path}.ablate"
        _few(len(self.directions), f"{path}.directions", "directions")
        numbered = with_paths(self.directions, f"{path}.directions")
        return steering_pb2.Intervention(
            ablate=steering_pb2.Ablate(
                directions=[_direction(direction, layers, at) for direction, at in numbered],
                strength=fraction(self.strength, f"{path}.strength", "strength"),
            )
        )

    def _text(self) -> str:
        return f"ablate {labels(self.directions)}{_part(self.strength)}"


@dataclass(frozen=True)
class Band:
    """Bounds for the number r that is read from a row x, and the vector w along which x moves."""

    direction: Vector | Readout
    """Gives r. A vector gives the coordinate x.u along it, so that its norm does not matter."""
    min: float | None = None
    """Lower bound, in the units of r; None: no bound."""
    max: float | None = None
    """Upper bound; None: no bound. If it equals ``min``, r gets this value."""
    strength: float = 1.0
    """Fraction of the correction that is applied, 0 to 1."""
    write: Vector | None = None
    """w, as it is. None: the shortest vector along which r changes by 1."""
    only_on: bool = False
    """Whether rows with r = 0 stay as they are, with the activations "relu" and "jump_relu"."""

    def __post_init__(self) -> None:
        """Raises InvalidRequest without bounds, and if min is above max."""
        low, high = self.min, self.max
        if low is None and high is None:
            raise invalid("clamp", "a band needs min, max or both", "REASON_MISSING_FIELD")
        if isinstance(low, Real) and isinstance(high, Real) and low > high:
            raise invalid("clamp.max", f"max {high:.6g} is below min {low:.6g}")

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The vectors that are read and written."""
        return _pulled_vectors(self.direction, self.write)

    def to_wire(self, path: str, layers: Layers) -> steering_pb2.Band:
        """The message. Raises InvalidRequest if numbers are out of range."""
        return steering_pb2.Band(
            min=finite_or_none(self.min, f"{path}.min", "min"),
            max=finite_or_none(self.max, f"{path}.max", "max"),
            read=_read(self.direction, layers, f"{path}.read"),
            write=_write(self.write, layers, f"{path}.write"),
            strength=fraction(self.strength, f"{path}.strength", "strength"),
            only_on=flag(self.only_on, f"{path}.only_on", "only_on"),
        )

    def __str__(self) -> str:
        """As "joy to -1..2", "joy to ..2", "joy to 0", "relu(joy) to 3 along calm if on"."""
        low, high = ("" if end is None else f"{end:.6g}" for end in (self.min, self.max))
        bounds = low if low == high else f"{low}..{high}"
        along = "" if self.write is None else f" along {self.write.label}"
        on = " if on" if self.only_on else ""
        return f"{self.direction.label} to {bounds}{along}{on}{_part(self.strength)}"


@dataclass(frozen=True)
class Clamp(Intervention):
    """For each band in turn: x + strength * (clip(r, min, max) - r) * w, with r read from x."""

    bands: tuple[Band, ...]
    """1 to 8. If directions are not orthogonal, only the last r is certain to end in its band."""

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The bands' vectors."""
        return tuple(vector for band in self.bands for vector in band.vectors)

    def _op(self, path: str, layers: Layers) -> steering_pb2.Intervention:
        path = f"{path}.clamp.bands"
        _few(len(self.bands), path, "bands")
        bands = [band.to_wire(at, layers) for band, at in with_paths(self.bands, path)]
        return steering_pb2.Intervention(clamp=steering_pb2.Clamp(bands=bands))

    def _text(self) -> str:
        return f"clamp {', '.join(str(band) for band in self.bands)}"


@dataclass(frozen=True)
class Scale(Intervention):
    """x + (factor - 1) * r * w, with r read from x."""

    direction: Vector | Readout
    """Gives r, as in `Band`."""
    factor: float
    """Multiplies r: 1 changes nothing, 0 ablates, -1 mirrors."""
    write: Vector | None = None
    """w, as in `Band`."""

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The vectors that are read and written."""
        return _pulled_vectors(self.direction, self.write)

    def _op(self, path: str, layers: Layers) -> steering_pb2.Intervention:
        return steering_pb2.Intervention(
            scale=steering_pb2.Scale(
                read=_read(self.direction, layers, f"{path}.scale.read"),
                write=_write(self.write, layers, f"{path}.scale.write"),
                factor=finite(self.factor, f"{path}.scale.factor", "factor"),
            )
        )

    def _text(self) -> str:
        along = "" if self.write is None else f" along {self.write.label}"
        return f"scale {self.direction.label} by {self.factor:.6g}{along}"


def _pulled_vectors(read: Vector | Readout, write: Vector | None) -> tuple[Vector, ...]:
    vector = read.vector if isinstance(read, Readout) else read
    return (vector,) if write is None else (vector, write)


def _read(read: Vector | Readout, layers: Layers, path: str) -> vector_pb2.Readout:
    """The message of a readout; of a vector the coordinate along it."""
    if isinstance(read, Readout):
        _direction(read.vector, layers, f"{path}.vector")
        return read.to_wire(layers, path)
    return vector_pb2.Readout(
        vector=_direction(read, layers, f"{path}.vector"), normalise=vector_pb2.NORMALISE_UNIT
    )


def _write(vector: Vector | None, layers: Layers, path: str) -> vector_pb2.VectorRef | None:
    return None if vector is None else _direction(vector, layers, path)


def _direction(vector: Vector, layers: Layers, path: str) -> vector_pb2.VectorRef:
    """As `row_ref`. Raises InvalidRequest if the client knows that a row is zero."""
    if vector.rows is not None and not vector.rows.values.any(axis=1).all():
        raise invalid(path, f"{vector.label} is zero and has no direction", "REASON_ZERO_VECTOR")
    return row_ref(vector, layers, path)


def fraction(number: float, path: str, what: str) -> float:
    """``number``, if it is 0 to 1."""
    value = finite(number, path, what)
    if not 0 <= value <= 1:
        article = "an" if what[0] in "aeiou" else "a"
        raise invalid(path, f"{article} {what} is 0 to 1, not {value:.6g}")
    return value


def _few(count: int, path: str, what: str) -> None:
    if count > _MOST_DIRECTIONS:
        raise invalid(path, f"{count} {what}; at most {_MOST_DIRECTIONS} go together")


def _part(strength: float) -> str:
    return "" if strength == 1 else f" (strength {strength:.6g})"
