"""Points, layers and sites: the places in the model where interventions and captures act.

Three points have an alias, which is accepted and never returned. Layers keep the form that the
caller chose, as far as protobuf has that form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from enum import StrEnum
from functools import lru_cache
from operator import index
from typing import Literal, NamedTuple, TypeAlias

from rheostat._errors import InvalidRequest, ServerError, invalid
from rheostat._fields import UINT32
from rheostat_wire.v1 import types_pb2


class Point(StrEnum):
    """A place in a decoder block."""

    RESID_PRE = "resid_pre"
    """The residual stream that enters the block."""
    RESID_MID = "resid_mid"
    """The residual stream after attention's branch is added."""
    RESID_POST = "resid_post"
    """The residual stream that leaves the block: ``resid_pre`` of the next layer."""
    ATTN_OUT = "attn_out"
    """The output of attention as it is added to the stream, after any norm and scale."""
    MLP_OUT = "mlp_out"
    """The output of the MLP or mixture of experts as it is added to the stream."""
    ROUTER_LOGITS = "router_logits"
    """The router's logit of each expert of a mixture; captured, never steered."""


PointLike: TypeAlias = Point | str
"""A point, its name, or an alias: pre_attn, post_attn, post_block."""
PointsLike: TypeAlias = PointLike | Iterable[PointLike]
"""One point or several."""
LayersLike: TypeAlias = Literal["all"] | int | Iterable[int]
""""all", one layer, or several (a range, a list). Layers count from 0."""
Layers: TypeAlias = Literal["all"] | range | tuple[int, ...]
"""Normalised layers: "all", an ascending range, or an ascending tuple."""

_ALIASES = {
    "pre_attn": Point.RESID_PRE,
    "post_attn": Point.RESID_MID,
    "post_block": Point.RESID_POST,
}
_HOOKS_AND_MODULES = (
    re.compile(r"(?:blocks\.(?P<layer>\d+)\.)?hook_(?P<part>\w+)"),
    re.compile(r"(?:\w+\.)*(?:layers|h|blocks)\.(?P<layer>\d+)(?:\.(?P<part>\w+))?"),
)
"""Names of hooks in TransformerLens, and of modules in Hugging Face models."""
_PARTS = {
    "": Point.RESID_POST,
    "attn": Point.ATTN_OUT,
    "attention": Point.ATTN_OUT,
    "self_attn": Point.ATTN_OUT,
    "mlp": Point.MLP_OUT,
    "resid_pre": Point.RESID_PRE,
    "resid_mid": Point.RESID_MID,
    "resid_post": Point.RESID_POST,
    "attn_out": Point.ATTN_OUT,
    "mlp_out": Point.MLP_OUT,
}
"""The point of each hook or module; "" is a whole block, whose output is the stream."""
_TO_WIRE = {point: types_pb2.Point.Value(f"POINT_{point.name}") for point in Point}
_FROM_WIRE = {number: point for point, number in _TO_WIRE.items()}

NO_HEADS = (
    "heads are not served, because a head's output is no point of the stream. Take attn_out of the "
    "layer, which is the sum of its heads; then take its heads apart with TransformerLens"
)
_PARTS_OF_HEADS = {"z", "q", "k", "v", "result", "pattern", "attn_scores", "head", "heads"}
"""Names of what heads compute, in TransformerLens."""


class Site(NamedTuple):
    """A point at one layer."""

    point: Point
    layer: int

    @property
    def twin(self) -> Site | None:
        """The same site under its other name; None if it has only one name."""
        if self.point is Point.RESID_POST:
            return Site(Point.RESID_PRE, self.layer + 1)
        if self.point is Point.RESID_PRE and self.layer > 0:
            return Site(Point.RESID_POST, self.layer - 1)
        return None

    def __str__(self) -> str:
        """As "resid_post[3]"."""
        return f"{self.point}[{self.layer}]"


def point_of(name: PointLike) -> Point:
    """The point of that name or alias. Raises InvalidRequest for any other name."""
    alias = _ALIASES.get(name) if isinstance(name, str) else None
    if alias is not None:
        return alias
    if names_head(name):
        raise invalid("sites.points", f"{name!r}: {NO_HEADS}", "REASON_NOT_SUPPORTED")
    try:
        return Point(name)
    except ValueError:
        raise invalid(
            "sites.points", f"unknown point {name!r}{_advice(name)}", "REASON_UNKNOWN_ENUM"
        ) from None


def names_head(name: object) -> bool:
    """Whether a name is that of something within attention heads."""
    return isinstance(name, str) and name.rpartition("hook_")[2] in _PARTS_OF_HEADS


def _advice(name: object) -> str:
    """Advice for an unknown name: the point of that hook or module, or a list of all points."""
    names = [*Point, *_ALIASES]
    for pattern in _HOOKS_AND_MODULES:
        match = pattern.fullmatch(name) if isinstance(name, str) else None
        point = _PARTS.get(match["part"] or "", "") if match else ""
        if match and point:
            layer = match.groupdict().get("layer")
            return f': write "{point}"' + (f" with layers={int(layer)}" if layer else "")
    matches = get_close_matches(name, names, 1) if isinstance(name, str) else []
    return f': did you mean "{matches[0]}"?' if matches else f"; there are {', '.join(names)}"


def points_of(points: PointsLike) -> tuple[Point, ...]:
    """The points in the caller's order. Raises InvalidRequest for none or repeated points."""
    if isinstance(points, str) or not isinstance(points, Iterable):
        points = (points,)
    chosen = tuple(point_of(name) for name in points)
    if not chosen:
        raise invalid("sites.points", "no point is named", "REASON_MISSING_FIELD")
    if len(set(chosen)) < len(chosen):
        raise invalid("sites.points", f"a point is named twice: {', '.join(chosen)}")
    return chosen


def layers_of(layers: LayersLike) -> Layers:
    """The layers, normalised. Raises InvalidRequest for none, negative or repeated layers."""
    if isinstance(layers, str):
        if layers == "all":
            return "all"
        raise invalid(
            "sites.layers", f'layers are "all" or numbers, not {layers!r}: {_in_numbers(layers)}'
        )
    if isinstance(layers, range) and layers.step > 0:
        numbers: range | tuple[int, ...] = layers
    else:
        items = layers if isinstance(layers, Iterable) else (layers,)
        numbers = tuple(sorted(_layer(layer) for layer in items))
        if len(set(numbers)) < len(numbers):
            raise invalid("sites.layers", "a layer is named twice")
    if not numbers:
        raise invalid("sites.layers", "no layer is named")
    for end in (numbers[0], numbers[-1]):
        _layer(end)
    return numbers


def _in_numbers(layers: str) -> str:
    """Advice for layers in a text, the form that the command line takes."""
    match = re.fullmatch(r"(\d+)-(\d+)", layers)
    if match:
        return f"write range({int(match[1])}, {int(match[2]) + 1})"
    if re.fullmatch(r"\d+(,\s*\d+)*", layers):
        numbers = ", ".join(str(int(number)) for number in layers.split(","))
        return f"write [{numbers}]" if "," in layers else f"write {numbers}"
    return "write 3, [0, 4], range(2, 6), or engine.model().layer_count - 1 for the last"


def _layer(number: int) -> int:
    """Returns ``number`` if it and the end of a range after it fit uint32."""
    try:
        layer = index(number)
    except TypeError:
        raise invalid("sites.layers", f"layers are whole numbers, not {number!r}") from None
    if layer < 0:
        raise invalid(
            "sites.layers",
            f"layers count from 0, not {layer}; engine.model().layer_count - 1 is the last",
            "REASON_UNKNOWN_LAYER",
        )
    if layer >= UINT32:
        raise invalid("sites.layers", f"no model has a layer {layer}", "REASON_UNKNOWN_LAYER")
    return layer


def missing_sites(
    path: str,
    what: str,
    points: tuple[Point, ...] | None,
    layers: Layers | None,
    call: str,
    *,
    named: str,
) -> InvalidRequest:
    """The error of an op or a probe whose points, layers or both are unknown.

    Args:
        path: its path.
        what: its vectors, in words.
        points: its points, if they are known.
        layers: its layers, if they are known.
        call: the call that sets them, with "{}" in the place of its arguments.
        named: a vector of which the client knows only this name; "": none.
    """
    missing = [name for name, given in (("points", points), ("layers", layers)) if given is None]
    needed = " and ".join(missing)
    remedy = f"give them, with {call.format(', '.join(f'{name}=' for name in missing))}"
    text = f"{what} has no default {needed}: {remedy}"
    if named:
        text = (
            f"the client does not know the {needed} of {what}: {remedy}, or use "
            f'engine.vectors.get("{named}"), which returns those that were stored with it, and '
            "raises NotFound if no vector has this name"
        )
    return invalid(path, text, "REASON_MISSING_FIELD")


def site_set(points: tuple[Point, ...], layers: Layers) -> types_pb2.SiteSet:
    """The message for every combination of the points with the layers."""
    message = types_pb2.SiteSet(points=[_TO_WIRE[point] for point in points])
    if layers == "all":
        message.all.SetInParent()
    elif isinstance(layers, range):
        message.range.start = layers.start
        message.range.stop = layers.stop
        if layers.step != 1:
            message.range.step = layers.step
    else:
        message.list.layers.extend(layers)
    return message


def read_site_set(message: types_pb2.SiteSet) -> tuple[tuple[Point, ...], Layers] | None:
    """Points and layers of a set that a server sent.

    None if this client cannot express the set: it has a point that only newer clients know, or a
    range of layers without an end.
    """
    if not all(knows_point(number) for number in message.points):
        return None
    points = tuple(_FROM_WIRE[number] for number in message.points)
    layers = message.range
    match message.WhichOneof("layers"):
        case "list":
            return points, tuple(sorted(message.list.layers))
        case "range" if layers.HasField("stop"):
            return points, range(layers.start, layers.stop, layers.step or 1)
        case "range" if layers.start or layers.step > 1:
            return None
    return points, "all"


def knows_point(number: types_pb2.Point.ValueType) -> bool:
    """Whether this client knows the point of a wire number."""
    return number in _FROM_WIRE


def read_point(number: types_pb2.Point.ValueType) -> Point:
    """The point of a wire number. Raises ServerError if the number is unknown."""
    point = _FROM_WIRE.get(number)
    if point is None:
        raise ServerError(f"the server sent point {number}, which needs a newer client")
    return point


def site_to_wire(site: Site) -> types_pb2.Site:
    """The message of a site."""
    return types_pb2.Site(point=_TO_WIRE[site.point], layer=site.layer)


def site_order(site: Site) -> tuple[int, int]:
    """Sort key of a site: its layer, then the number of its point on the wire."""
    return site.layer, _TO_WIRE[site.point]


def read_site(message: types_pb2.Site) -> Site:
    return _site(message.point, message.layer)


@lru_cache(maxsize=4096)
def _site(point: types_pb2.Point.ValueType, layer: int) -> Site:
    return Site(read_point(point), layer)


def show_layers(layers: Layers | Sequence[int]) -> str:
    """As "all", "3", "2-5" or "0, 4, 7"."""
    if isinstance(layers, str):
        return layers
    if len(layers) > 1 and layers[-1] - layers[0] == len(layers) - 1:
        return f"{layers[0]}-{layers[-1]}"
    return ", ".join(str(layer) for layer in layers)
