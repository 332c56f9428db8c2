"""Converts sites of messages to sites of the engine.

A SiteSet is every combination of its points with its layers, by layer, then point. Two names may be
one site (resid_post L, resid_pre L+1), which has one index in the engine.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rheostat_engine import ROUTERS, ModelSites, Point, Site
from rheostat_server import validation
from rheostat_server.errors import (
    InvalidValue,
    MissingField,
    NotSupported,
    SiteNotServed,
    UnknownLayer,
)
from rheostat_server.limits import LAYERS, POINTS
from rheostat_server.selectors.spans import runs
from rheostat_server.validation import field_path
from rheostat_wire.v1 import types_pb2

ENGINE_POINTS = {
    types_pb2.POINT_RESID_PRE: Point.RESID_PRE,
    types_pb2.POINT_RESID_MID: Point.RESID_MID,
    types_pb2.POINT_RESID_POST: Point.RESID_POST,
    types_pb2.POINT_ATTN_OUT: Point.ATTN_OUT,
    types_pb2.POINT_MLP_OUT: Point.MLP_OUT,
    types_pb2.POINT_ROUTER_LOGITS: Point.ROUTER_LOGITS,
}
"""The points that the engine has."""

NO_STREAM = "router_logits is no part of the stream: it can be captured, and nothing else"

_WIRE_POINTS = {point: wire for wire, point in ENGINE_POINTS.items()}

_SHOWN_RANGES = 8
"""Ranges of layers that an error lists for a point."""


class SiteSelection(NamedTuple):
    """A SiteSet, resolved."""

    sites: tuple[Site, ...]
    """Every name, by layer, then point."""
    layers: tuple[int, ...]
    """The layers, ascending."""


def to_wire(site: Site) -> types_pb2.Site:
    """A site as a message."""
    return types_pb2.Site(point=_WIRE_POINTS[site.point], layer=site.layer)


def write_site(message: types_pb2.Site, site: Site) -> None:
    """Writes a site into an empty message. This is faster than copying `to_wire`'s message."""
    message.point, message.layer = _WIRE_POINTS[site.point], site.layer


def from_wire(site: types_pb2.Site) -> Site:
    """The site of a message that this server made."""
    return Site(ENGINE_POINTS[site.point], site.layer)


def resolve_sites(sites: types_pb2.SiteSet, model: ModelSites, path: str) -> SiteSelection:
    """Resolves a set of sites.

    Raises:
        InvalidArgument: the set is malformed or names a layer that the model lacks.
        SiteNotServed: the model does not serve one of the sites.
    """
    points = _points(sites, path)
    layers = _layers(sites, model.num_layers, path)
    selected = tuple(Site(point, layer) for layer in layers for point in points)
    _check_served(selected, model, path)
    return SiteSelection(selected, layers)


def resolve_site(site: types_pb2.Site, model: ModelSites, path: str) -> Site:
    """Resolves a site.

    Raises:
        InvalidArgument: the model lacks its layer, or there is no such point.
        SiteNotServed: the model does not serve it.
    """
    validation.known_enum(site.point, types_pb2.Point.values(), field_path(path, "point"))
    if site.layer >= model.num_layers:
        raise _unknown_layer(site.layer, model.num_layers, field_path(path, "layer"))
    resolved = Site(ENGINE_POINTS[site.point], site.layer)
    _check_served((resolved,), model, path)
    return resolved


def refuse_what_is_no_stream(selection: SiteSelection, path: str) -> None:
    """Refuses sites that are not part of the residual stream.

    Raises:
        NotSupported: the set has such a site.
    """
    if any(site.point is Point.ROUTER_LOGITS for site in selection.sites):
        raise NotSupported(NO_STREAM, field=path)


def refuse_double_names(selection: SiteSelection, path: str) -> None:
    """Refuses a set that has one site under two names, because an op would act on it twice.

    Raises:
        InvalidValue: the set has such a site.
    """
    seen: dict[int, Site] = {}
    for site in selection.sites:
        other = seen.setdefault(site.index, site)
        if other != site:
            raise InvalidValue(
                f"{_label(other)} and {_label(site)} are one site, which the op would act on twice",
                field=path,
            )


def _points(sites: types_pb2.SiteSet, path: str) -> list[Point]:
    field = field_path(path, "points")
    if not sites.points:
        raise MissingField("at least one point is required", field=field)
    validation.check_count(len(sites.points), POINTS, field, "points")
    for index, point in enumerate(sites.points):
        validation.known_enum(point, types_pb2.Point.values(), f"{field}[{index}]")
    validation.no_repeats(sites.points, field, "points")
    return [ENGINE_POINTS[point] for point in sorted(sites.points)]


def _layers(sites: types_pb2.SiteSet, count: int, path: str) -> tuple[int, ...]:
    kind = validation.required(sites.WhichOneof("layers"), path, "list, range and all")
    if kind == "all":
        return tuple(range(count))
    if kind == "list":
        field = f"{path}.list.layers"
        layers: Sequence[int] = sites.list.layers
        if not layers:
            raise InvalidValue("at least one layer is required", field=field)
        validation.check_count(len(layers), LAYERS, field, "layers")
        validation.no_repeats(layers, field, "layers")
        refuse_unknown_layers(sites, count, path)
        return tuple(sorted(layers))
    refuse_unknown_layers(sites, count, path)
    field = field_path(path, "range")
    start = sites.range.start if sites.range.HasField("start") else 0
    stop = sites.range.stop if sites.range.HasField("stop") else count
    step = sites.range.step if sites.range.HasField("step") else 1
    if step < 1:
        raise InvalidValue("must be at least 1", field=field_path(field, "step"))
    if start >= stop:
        raise InvalidValue(f"the range from {start} to {stop} holds no layer", field=field)
    return tuple(range(start, stop, step))


def refuse_unknown_layers(sites: types_pb2.SiteSet, count: int, path: str) -> None:
    """Refuses layers that a model with `count` layers does not have.

    Raises:
        UnknownLayer: the set names such a layer.
    """
    for index, layer in enumerate(sites.list.layers):
        if layer >= count:
            raise _unknown_layer(layer, count, f"{path}.list.layers[{index}]")
    if sites.range.stop > count:
        raise _unknown_layer(sites.range.stop - 1, count, f"{path}.range.stop")


def _unknown_layer(layer: int, count: int, field: str) -> UnknownLayer:
    return UnknownLayer(
        f"layer {layer} is not one of the model's layers 0 to {count - 1}",
        field=field,
        metadata={"layers": str(count)},
    )


def _check_served(sites: Sequence[Site], model: ModelSites, path: str) -> None:
    refused: dict[str, list[Site]] = {}
    for site in sites:
        why = model.supports(site)
        if why is not None:
            refused.setdefault(why, []).append(site)
    if refused:
        parts = [f"{_show(unserved)}: {why}" for why, unserved in refused.items()]
        lacking = {*model.refused, *(() if model.experts else [Point.ROUTER_LOGITS])}
        served = [point.value for point in Point if point not in lacking]
        raise SiteNotServed(
            f"{model.architecture} does not serve {'; '.join(parts)}. "
            f"It serves {', '.join(served)}",
            field=path,
        )


def _show(sites: Sequence[Site]) -> str:
    """As "resid_mid 0, 2" or "router_logits 0-35"; the first ranges of layers, if many."""
    layers: dict[Point, list[int]] = {}
    for site in sites:
        layers.setdefault(site.point, []).append(site.layer)
    parts = []
    for point, numbers in layers.items():
        spans = runs(np.array(numbers))
        shown = [str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in spans[:_SHOWN_RANGES]]
        more = f" and {len(spans) - _SHOWN_RANGES} more" if len(spans) > _SHOWN_RANGES else ""
        parts.append(f"{point.value} {', '.join(shown)}{more}")
    return ", ".join(parts)


def _label(site: Site) -> str:
    return f"{site.point.value} {site.layer}"


def of_routers(sites: Sequence[Site]) -> bool:
    """Whether some sites are routers, which are not part of the residual stream."""
    return any(site.index >= ROUTERS for site in sites)


def width_of(sites: Sequence[Site], model: ModelSites, path: str) -> int:
    """The number of values of a row at these sites.

    Raises:
        InvalidValue: the sites have different widths.
    """
    widths = {model.width_of(site): site for site in sites}
    if len(widths) > 1:
        parts = ", ".join(f"{site.point.value} {site.layer} {n}" for n, site in widths.items())
        raise InvalidValue(
            f"rows of a capture have one width, but these have several ({parts} values): capture "
            "router_logits separately",
            field=path,
        )
    (width,) = widths
    return width
