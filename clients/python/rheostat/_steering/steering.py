"""Steering: functions that make interventions from vectors, and the list of interventions.

Ops act in the order of the list. A name or an array is not converted to a vector; the error shows
the call that converts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import TypeAlias, overload

from rheostat._errors import InvalidRequest, invalid
from rheostat._fields import builds_message, whole_number, with_paths
from rheostat._steering.interventions import Ablate, Band, Clamp, NormAdd, Scale
from rheostat._steering.readouts import Readout
from rheostat._steering.vectors import DOSE, Add, Intervention, Vector, VectorSource
from rheostat_wire.v1 import gain_pb2, steering_pb2

SteeringLike: TypeAlias = Vector | Intervention | Iterable[Vector | Intervention] | None
"""One intervention, several, or none. A vector is added with scale 1."""

_MOST_INTERVENTIONS = 256


def norm_add(vector: Vector, scale: float = 1.0) -> NormAdd:
    """Add a direction in proportion to the stream's norm: x + scale * |x| * v / |v|.

    ``scale`` is any finite number. ``vector`` has one row, [1, width], or one per layer; no row may
    be zero.
    """
    return NormAdd(_vector("norm_add", vector), scale)


def ablate(*directions: Vector, strength: float = 1.0) -> Ablate:
    """Remove the part of the stream along 1 to 8 directions: x - strength * P x.

    P is the orthogonal projection on the span of the directions (directional ablation, Arditi et
    al., 2024). They must be linearly independent, not orthogonal. ``strength`` is 0 (nothing) to 1
    (all).
    """
    return Ablate(tuple(_vector("ablate", direction) for direction in directions), strength)


def band(
    direction: Vector | Readout,
    min: float | None = None,
    max: float | None = None,
    strength: float = 1.0,
    *,
    write: Vector | None = None,
    only_on: bool = False,
) -> Band:
    """Bounds for one readout, for a `clamp` of several.

    For example ``clamp(band(joy, min=0), band(fear, max=1))``; the arguments are those of `clamp`.
    """
    return Band(_readable("band", direction), min, max, strength, _written("band", write), only_on)


@overload
def clamp(
    direction: Vector | Readout,
    /,
    *,
    min: float | None = None,
    max: float | None = None,
    strength: float = 1.0,
    write: Vector | None = None,
    only_on: bool = False,
) -> Clamp: ...
@overload
def clamp(*bands: Band) -> Clamp: ...
def clamp(
    *bands: Vector | Readout | Band,
    min: float | None = None,
    max: float | None = None,
    strength: float = 1.0,
    write: Vector | None = None,
    only_on: bool = False,
) -> Clamp:
    """Clip a number r that is read from the stream: x + strength * (clip(r, min, max) - r) * w.

    With a vector v, of one row, [1, width], or one row for each layer, r is the coordinate x.u with
    u = v / |v|. With a `readout`, r is its number. x moves along w: ``write`` as it is, by default
    the shortest vector along which r changes by 1, which is u for a vector. No row may be zero.
    ``min`` and ``max`` are in the units of r, and at least one is required. If they are equal, r
    gets this value. ``strength`` is 0 (no change) to 1 (all). With ``only_on``, rows with r = 0
    stay as they are; it needs a ReLU as activation. Instead, 1 to 8 bands made by `band` act in
    turn. If their directions are not orthogonal, only the last r is certain to end in its band.

    `load_sae_feature` makes the clamp of a feature of a sparse autoencoder.
    """
    already_bands = [item for item in bands if isinstance(item, Band)]
    given = min is not None or max is not None or strength != 1 or write is not None or only_on
    if len(already_bands) == len(bands) > 0 and not given:
        return Clamp(tuple(already_bands))
    if len(bands) == 1 and not already_bands:
        read = _readable("clamp", bands[0])
        return Clamp((Band(read, min, max, strength, _written("clamp", write), only_on),))
    raise invalid(
        "steering",
        "clamp takes one vector with min and max, or bands alone: "
        "clamp(band(a, min=0), band(b, max=1))",
    )


def scale(direction: Vector | Readout, factor: float, *, write: Vector | None = None) -> Scale:
    """Multiply a number r that is read from the stream: x + (factor - 1) * r * w.

    r and w are as in `clamp`: with a vector v the coordinate x.u and u = v / |v|. ``factor`` is any
    finite number: 1 changes nothing, 0 ablates, -1 mirrors.
    """
    return Scale(_readable("scale", direction), factor, _written("scale", write))


def _readable(op: str, given: object) -> Vector | Readout:
    return given if isinstance(given, Readout) else _vector(op, given)


def _written(op: str, given: object) -> Vector | None:
    return None if given is None else _vector(op, given)


def _vector(op: str, given: object) -> Vector:
    if isinstance(given, Vector):
        return given
    raise _wrong_type("steering", op, given)


def _wrong_type(path: str, what: str, given: object) -> InvalidRequest:
    """The error for a value that is not a vector; it shows how to make a vector of it."""
    if isinstance(given, Intervention):
        return invalid(path, f"{what} takes vectors: {DOSE}")
    if isinstance(given, VectorSource):
        return invalid(path, given.advice)
    if isinstance(given, Band):
        return invalid(path, "a band acts in a clamp: use rheostat.clamp(rheostat.band(...))")
    if isinstance(given, str):
        kind, remedy = "a name", f'rheostat.named("{given}", points=..., layers=...)'
    else:
        kind, remedy = type(given).__name__, "rheostat.inline(array, points=..., layers=...)"
    return invalid(path, f"{what} takes vectors, not {kind}: use {remedy}")


@builds_message
def steering_to_wire(
    steering: SteeringLike, path: str = "steering.interventions"
) -> steering_pb2.Steering | None:
    """The message, in the caller's order; None for none. ``path`` names the list in errors."""
    interventions = interventions_of(steering, path.removesuffix(".interventions"))
    if not interventions:
        return None
    if len(interventions) > _MOST_INTERVENTIONS:
        raise invalid(
            path,
            f"{len(interventions)} interventions; at most {_MOST_INTERVENTIONS} go together",
        )
    messages = [intervention.to_wire(at) for intervention, at in with_paths(interventions, path)]
    return steering_pb2.Steering(interventions=messages)


def interventions_of(steering: object, path: str = "steering") -> tuple[Intervention, ...]:
    """The interventions; none for None. ``path`` names the argument in errors.

    Raises InvalidRequest for a value of another type.
    """
    if steering is None:
        return ()
    if isinstance(steering, Mapping) and steering:
        doses = ", ".join(_times(*pair) for pair in steering.items())
        doses = f"[{doses}]" if len(steering) > 1 else doses
        raise invalid(path, f"steering takes vectors, not a dict: use {doses}")
    alone = isinstance(steering, Vector | Intervention | str) or hasattr(steering, "__array__")
    items = (steering,) if alone or not isinstance(steering, Iterable) else tuple(steering)
    interventions: list[Intervention] = []
    for number, item in enumerate(items):
        if isinstance(item, Vector):
            interventions.append(Add(item))
        elif isinstance(item, Intervention):
            for vector in item.vectors:
                if not isinstance(vector, Vector):
                    raise _wrong_type(f"{path}[{number}]", "an op", vector)
            interventions.append(item)
        elif isinstance(item, Real) and (scaled := _beside(items, number)) is not None:
            raise invalid(
                f"{path}[{number}]",
                "steering takes vectors, not a number: a scale multiplies its vector, as in "
                f"{_times(scaled, item)}",
            )
        else:
            raise _wrong_type(f"{path}[{number}]", "steering", item)
    return tuple(interventions)


def _beside(items: Sequence[object], number: int) -> Vector | None:
    """The vector before or after an item of a list."""
    for item in (*items[:number][-1:], *items[number + 1 :][:1]):
        if isinstance(item, Vector | Add):
            return item if isinstance(item, Vector) else item.vector
    return None


def _times(vector: object, scale: object) -> str:
    """As "joy * 0.5", to show how a dose is written."""
    name = vector.name if isinstance(vector, Vector) else ""
    text = name if name and name.isidentifier() else "vector"
    if isinstance(vector, str):
        text = f'rheostat.named("{vector}")'
    return f"{text} * {float(scale):g}" if isinstance(scale, Real) else text


def indices_of(given: object, path: str, what: str) -> list[int]:
    """The indices of interventions that a gain multiplies.

    ``path`` names the list in errors, and ``what`` one of them.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise invalid(
            path, f"interventions is a list of their indices, such as [0, 2], not {given!r}"
        )
    return [whole_number(index, at, what) for index, at in with_paths(given, path)]


@builds_message
def gain_to_wire(factor: float, interventions: Iterable[int]) -> gain_pb2.Gain:
    """The message that multiplies interventions by ``factor``; all of them if none is listed."""
    indices = indices_of(interventions, "gain.interventions", "an intervention's index")
    message = gain_pb2.Gain(interventions=indices)
    try:
        message.factor = factor  # the server refuses one that is not finite, as an event
    except (OverflowError, TypeError, ValueError):
        raise invalid("gain.factor", f"the factor is a number, not {factor!r}") from None
    return message
