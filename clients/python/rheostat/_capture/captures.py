"""Captures: which rows to copy, their encoding and their destination."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Literal, Never, TypeAlias, TypeVar, get_args

import numpy as np

from rheostat._arrays import ArrayLike, Element, vector_data
from rheostat._capture.encodings import WIRE_ENCODINGS, EncodingName
from rheostat._errors import InvalidRequest, invalid
from rheostat._fields import UINT64, check_arguments, utf8_text, whole_number
from rheostat._points import Layers, LayersLike, Point, PointsLike, layers_of, points_of, site_set
from rheostat._runs import Run
from rheostat._selectors import Selector, SelectorLike, selector_of
from rheostat._selectors import to_wire as selector_to_wire
from rheostat._steering.readouts import Readout
from rheostat._steering.vectors import Vector, inline, refuse_dose, row_ref
from rheostat_wire.dtypes import TO_WIRE
from rheostat_wire.v1 import capture_pb2, vector_pb2

Overload: TypeAlias = Literal["fail", "drop_oldest", "drop_newest", "spill"]
"""What happens if rows arrive faster than they are read and acknowledged."""

OVERLOADS = {
    name: capture_pb2.Overload.Value(f"OVERLOAD_{name.upper()}") for name in get_args(Overload)
}

Layout: TypeAlias = Literal["per_file", "packed", "sharded"]
"""The layout of a sink's files."""

_LAYOUTS = {name: capture_pb2.Layout.Value(f"LAYOUT_{name.upper()}") for name in get_args(Layout)}
_MOST_CAPTURES = 16
_MOST_DIRECTIONS = 4096

DirectionsLike: TypeAlias = Vector | Readout | Iterable[Vector | Readout] | ArrayLike
"""What rows are projected on: one vector or readout, several, or an array [directions, width]."""

Word = TypeVar("Word", bound=str)
Value = TypeVar("Value", bound=int)


class RowDestination(ABC):
    """A subscription as the ``to=`` of a `Capture`."""

    @property
    @abstractmethod
    def id(self) -> str:
        """The id to which rows are sent. Raises Refused if there is none yet."""


@dataclass(frozen=True)
class Sink:
    """A sink of the server, which stores rows; `Engine.sinks` lists the sinks."""

    name: str
    tag: str | None = None
    """Group of stored rows; for files, a folder. Default: "default"."""
    layout: Layout | None = None
    """Layout of files. Default: the sink's own."""
    options: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Further options that the sink documents."""

    def to_wire(self) -> capture_pb2.SinkTarget:
        """The message."""
        message = capture_pb2.SinkTarget(
            sink_name=utf8_text(self.name, "captures", "a sink's name")
        )
        if not isinstance(self.options, Mapping):
            given = type(self.options).__name__
            raise invalid(
                "captures.options",
                f'options are a dict of strings, e.g. {{"format": "npz"}}, not {given}',
            )
        if self.tag is not None:
            message.tag = utf8_text(self.tag, "captures", "a tag")
        if self.layout is not None:
            message.layout = one_of(_LAYOUTS, self.layout, "captures.layout")
        for name, value in self.options.items():
            option = utf8_text(name, "captures", "an option")
            message.options[option] = utf8_text(value, "captures", "an option")
        return message


@dataclass(frozen=True, init=False)
class Capture:
    """Rows to copy out of the stream, after every op at their site."""

    points: tuple[Point, ...]
    layers: Layers
    where: Selector
    """Tokens whose rows are captured."""
    to: Sink | Run | str | None
    """Destination of the rows: a sink, a run, or the id of a subscription; None: the answer."""
    encoding: EncodingName
    """Encoding in which rows are sent and stored; see `Encoding`."""
    kept: int | None
    """K of "rp8" and "topk8": numbers kept per row."""
    seed: int | None
    """Seed of "rp8"."""
    overload: Overload | None
    """What happens if the sink, or the reader of the answer, is slower than the model. Default:
    "fail". Under "drop_oldest" and "drop_newest" the receipt counts lost rows."""
    dtype: Element | None
    """Element type of the rows. Default: the model's; of projections float32."""
    projection: tuple[Vector | Readout, ...]
    """Directions d. If there are any, the numbers x.d are captured instead of the rows x."""

    def __init__(
        self,
        points: PointsLike,
        layers: LayersLike = "all",
        where: SelectorLike = None,
        to: RowDestination | Sink | Run | str | None = None,
        *,
        encoding: EncodingName = "raw",
        kept: int | None = None,
        seed: int | None = None,
        overload: Overload | None = None,
        dtype: Element | None = None,
        projection: DirectionsLike = (),
        **unknown: Never,
    ) -> None:
        """Every combination of points and layers, on the tokens that ``where`` selects.

        The rows return with the answer, or go to ``to``: a sink, a run, or a subscription or its
        id. A run takes one sample, encoding "raw" and no projection. "rp8" and "topk8" need
        ``kept``; ``seed`` is for "rp8".

        ``projection`` takes up to 4096 directions d: the numbers x.d, [rows, directions], are
        captured instead of the rows x. Directions are not normalised. A vector has one row for all
        layers, or one per layer. Each row of an array is a direction. Arrays are sent inside every
        request, so store directions that are used often.
        """
        check_arguments("Capture", unknown, [argument.name for argument in fields(self)])
        object.__setattr__(self, "points", points_of(points))
        object.__setattr__(self, "layers", layers_of(layers))
        object.__setattr__(self, "where", selector_of(where))
        object.__setattr__(self, "to", _destination_of(to))
        object.__setattr__(self, "encoding", encoding)
        object.__setattr__(self, "kept", kept)
        object.__setattr__(self, "seed", seed)
        object.__setattr__(self, "overload", overload)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "projection", _directions_of(projection))

    def to_wire(self) -> capture_pb2.CaptureSpec:
        """The message, with the destination."""
        spec = self.to_spec()
        if self.to is None:
            spec.inline.SetInParent()
        elif isinstance(self.to, Sink):
            spec.sink.CopyFrom(self.to.to_wire())
        elif isinstance(self.to, Run):
            spec.run.CopyFrom(self.to.to_wire())
        else:
            spec.subscription_id = utf8_text(self.to, "captures", "a subscription's id")
        return spec

    def to_spec(self) -> capture_pb2.CaptureSpec:
        """The message without a destination."""
        spec = capture_pb2.CaptureSpec(
            sites=site_set(self.points, self.layers), where=selector_to_wire(self.where)
        )
        if self.encoding != "raw":
            spec.encoding = one_of(WIRE_ENCODINGS, self.encoding, "captures.encoding")
        self._check_kept()
        if self.kept is not None:
            spec.kept = whole_number(self.kept, "captures", "kept", least=1, most=2**32 - 1)
        if self.seed is not None:
            spec.seed = whole_number(self.seed, "captures", "the seed", least=0, most=UINT64)
        if self.overload is not None:
            spec.overload = one_of(OVERLOADS, self.overload, "captures.overload")
        if self.dtype is not None:
            spec.dtype = one_of(TO_WIRE, self.dtype, "captures.dtype")
        if self.projection:
            path = "captures.projection.readouts.readouts"
            spec.projection.readouts.readouts.extend(
                _readout(direction, self.layers, f"{path}[{number}]")
                for number, direction in enumerate(self.projection)
            )
        return spec

    def _check_kept(self) -> None:
        keeps = self.encoding in ("rp8", "topk8")
        if keeps and self.kept is None:
            raise invalid(
                "captures.kept",
                f'encoding="{self.encoding}" needs kept=, the numbers to keep of each row',
                "REASON_MISSING_FIELD",
            )
        if self.kept is not None and not keeps:
            raise invalid(
                "captures.kept", f'kept= is for "rp8" and "topk8", not encoding="{self.encoding}"'
            )
        if self.seed is not None and self.encoding != "rp8":
            raise invalid("captures.seed", f'seed= is for "rp8", not encoding="{self.encoding}"')


CaptureLike: TypeAlias = Capture | Iterable[Capture] | None
"""One capture, several, or none."""


def captures_of(capture: object) -> list[Capture]:
    """The captures as a list. Raises InvalidRequest for too many, and for other types."""
    if capture is None:
        return []
    if isinstance(capture, str) or not isinstance(capture, Iterable) or _is_site(capture):
        capture = (capture,)
    captures = list(capture)
    if len(captures) > _MOST_CAPTURES:
        raise invalid("captures", f"{len(captures)} captures; at most {_MOST_CAPTURES} go together")
    for number, item in enumerate(captures):
        if not isinstance(item, Capture):
            raise _wrong_type(f"captures[{number}]", item)
    return captures


def _destination_of(given: object) -> Sink | Run | str | None:
    """The destination; a subscription is replaced by its id."""
    if given is None or isinstance(given, str | Sink | Run):
        return given
    if isinstance(given, RowDestination):
        return given.id
    kind = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
    if given is Sink or given is Run:
        kind += f": call it, rheostat.{given.__name__}(...)"
    raise invalid(
        "captures.to",
        'to= takes rheostat.Sink("name"), rheostat.Run("id"), a subscription or its id, '
        f"not {kind}",
    )


def _readout(item: Vector | Readout, layers: Layers, path: str) -> vector_pb2.Readout:
    if isinstance(item, Readout):
        return item.to_wire(layers, path)
    return vector_pb2.Readout(vector=row_ref(item, layers, f"{path}.vector"))


def _directions_of(given: object) -> tuple[Vector | Readout, ...]:
    """The directions as vectors; each row of an array becomes one."""
    if isinstance(given, Vector | Readout):
        return (given,)
    path = "captures.projection"
    if hasattr(given, "__array__"):
        numbers = vector_data(given)
        items: list[object] = [
            inline(row, dtype=numbers.element) for row in np.array(numbers.values)
        ]
    elif isinstance(given, Iterable) and not isinstance(given, str):
        items = list(given)
    else:
        items = [given]
    if len(items) > _MOST_DIRECTIONS:
        raise invalid(path, f"{len(items)} directions; at most {_MOST_DIRECTIONS} go together")
    directions = []
    for number, direction in enumerate(items):
        refuse_dose(direction, f"{path}[{number}]")
        if not isinstance(direction, Vector | Readout):
            raise invalid(
                f"{path}[{number}]",
                f"a direction is a vector, not {type(direction).__name__}: give vectors, e.g. "
                "rheostat.named(name), or an array [directions, width]",
            )
        directions.append(direction)
    return tuple(directions)


def _is_site(given: object) -> bool:
    """Whether ``given`` is probably meant as a point and its layers."""
    match given:
        case (str(), int() | list() | tuple() | range() | "all"):
            return True
    return False


def _wrong_type(path: str, given: object) -> InvalidRequest:
    """The error for a value that is not a capture; it shows how to make a capture of it."""
    kind, arguments = type(given).__name__, '"resid_post", layers=...'
    if isinstance(given, str):
        kind, arguments = "a name", f'"{given}", layers=...'
    elif isinstance(given, tuple | list) and _is_site(given):
        arguments = f'"{given[0]}", {given[1]!r}'
    return invalid(path, f"capture takes captures, not {kind}: use rheostat.Capture({arguments})")


def one_of(values: Mapping[Word, Value], word: Word, path: str) -> Value:
    """As `_fields.word`, but errors have the reason REASON_INVALID_VALUE."""
    if not isinstance(word, str) or word not in values:
        words = ", ".join(map(repr, values))
        raise invalid(path, f"{path.rpartition('.')[2]} is one of {words}, not {word!r}")
    return values[word]
