"""CaptureSpecs resolved: which rows, under which names, in which dtype."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain

from rheostat._proto.v1 import capture_pb2, tensor_pb2
from rheostat_engine import Capture, ModelSites, Site, Spans
from rheostat_server import checks
from rheostat_server.checks import join
from rheostat_server.encodings import AS_THEY_ARE, Form
from rheostat_server.errors import InvalidValue, MissingField, NotSupported
from rheostat_server.limits import CAPTURES
from rheostat_server.selection import (
    EVERYTHING,
    Selection,
    SelectionContext,
    resolve_selector,
)
from rheostat_server.sinks import Sinks, encoding_of, group_targets
from rheostat_server.sinks import Target as SinkTarget
from rheostat_server.sites import resolve_sites
from rheostat_server.spans import clipped, length, united
from rheostat_server.tensors import FloatType, float_type


class Target(Enum):
    """Where a capture's rows go."""

    INLINE = "inline"
    SUBSCRIPTION = "subscription"
    SINK = "sink"


@dataclass(frozen=True, slots=True)
class ResolvedCapture:
    """A capture, resolved."""

    sites: tuple[Site, ...]
    """Every name under which rows come, by layer, then point."""
    selection: Selection
    """Which tokens. The engine copies every row within its reach; see `CaptureStream`."""
    kind: FloatType
    """Element type of the delivered rows, once decoded."""
    form: Form = AS_THEY_ARE
    """How they travel."""
    target: Target = Target.INLINE
    """Where they go."""
    subscription: str = ""
    """The subscription that they go to."""
    sink: SinkTarget | None = None
    """The sink that they go to."""
    overload: capture_pb2.Overload.ValueType = capture_pb2.OVERLOAD_FAIL
    """What happens when they come faster than they are taken; a subscription has its own."""
    width: int | None = None
    """Values of a row; None: as many as the stream has."""

    @property
    def indices(self) -> tuple[int, ...]:
        """The sites' indices, ascending, each once."""
        return tuple(sorted({site.index for site in self.sites}))

    def payload_bytes(self, *, row_end: int, width: int) -> int:
        """Bytes of payload if every position below `row_end` that is known is computed."""
        positions = length(clipped(self.selection.known, 0, row_end))
        return positions * len(self.sites) * self.form.row_bytes(self.width or width, self.kind)


def resolve_captures(
    specs: Sequence[capture_pb2.CaptureSpec],
    model: ModelSites,
    context: SelectionContext,
    sinks: Sinks | None = None,
) -> tuple[ResolvedCapture, ...]:
    """The captures of a request.

    Args:
        specs: as they came.
        model: its sites.
        context: what selectors are resolved against.
        sinks: those that there are.

    Raises:
        InvalidArgument: something is malformed.
        FailedPrecondition: something is not served.
    """
    checks.at_most(len(specs), CAPTURES, "captures", "captures")
    found = tuple(
        _aimed(resolve_capture(spec, model, context, path, _target(spec, path)), spec, sinks, path)
        for spec, path in ((spec, f"captures[{index}]") for index, spec in enumerate(specs))
    )
    sink_groups(found)
    return found


def sink_groups(
    captures: Sequence[ResolvedCapture],
) -> list[tuple[SinkTarget, dict[int, ResolvedCapture]]]:
    """The captures of a request that go to sinks, by index, in the groups that they keep together.

    Raises:
        InvalidValue: one group is to be kept in two ways.
    """
    aimed = [(index, one.sink) for index, one in enumerate(captures) if one.sink is not None]
    groups = []
    for target, indices in group_targets(aimed):
        members = {index: captures[index] for index in indices}
        for index, one in members.items():
            if one.overload != captures[indices[0]].overload:
                raise InvalidValue(
                    f"captures {indices[0]} and {index} go to one sink under one tag with "
                    "different overload policies: give them different tags",
                    field=f"captures[{index}].overload",
                )
        groups.append((target, members))
    return groups


def engine_captures(captures: Sequence[ResolvedCapture]) -> tuple[Capture, ...]:
    """What the engine has to copy: every row once, however many captures ask for it."""
    asking: dict[int, list[int]] = {}
    for number, capture in enumerate(captures):
        for index in capture.indices:
            asking.setdefault(index, []).append(number)
    alike: dict[tuple[int, ...], list[int]] = {}
    for index, numbers in asking.items():
        alike.setdefault(tuple(numbers), []).append(index)
    by_spans: dict[Spans, list[int]] = {}
    for together, indices in alike.items():
        spans = _reach([captures[number] for number in together])
        if spans:
            by_spans.setdefault(spans, []).extend(indices)
    found = [Capture(tuple(sorted(sites)), spans) for spans, sites in by_spans.items()]
    return tuple(sorted(found, key=lambda one: one.sites))


def _reach(captures: Sequence[ResolvedCapture]) -> Spans:
    first, *others = dict.fromkeys(capture.selection.reach for capture in captures)
    return united(chain(first, *others)) if others else first


def resolve_capture(
    spec: capture_pb2.CaptureSpec,
    model: ModelSites,
    context: SelectionContext,
    path: str,
    target: Target,
) -> ResolvedCapture:
    """A capture, apart from where it says that its rows go.

    Raises:
        InvalidArgument: something is malformed.
        FailedPrecondition: something is not served.
    """
    if not spec.HasField("sites"):
        raise MissingField("sites are required", field=join(path, "sites"))
    sites = resolve_sites(spec.sites, model, join(path, "sites")).sites
    width = _width(sites, model, join(path, "sites"))
    form = _form(spec, width, path)
    _check_enum_options(spec, path)
    selection = EVERYTHING
    if spec.HasField("where"):
        selection = resolve_selector(spec.where, context, join(path, "where"))
    kind = FloatType(model.dtype)
    if spec.HasField("dtype"):
        kind = float_type(spec.dtype, join(path, "dtype"))
    overload = spec.overload if spec.HasField("overload") else capture_pb2.OVERLOAD_FAIL
    return ResolvedCapture(sites, selection, kind, form, target, overload=overload, width=width)


def _width(sites: Sequence[Site], model: ModelSites, path: str) -> int:
    """How many values every row has."""
    widths = {model.width_of(site): site for site in sites}
    if len(widths) > 1:
        parts = ", ".join(f"{site.point.value} {site.layer} {n}" for n, site in widths.items())
        raise InvalidValue(
            f"rows of a capture have one width, these have several ({parts} values): name "
            "router_logits in a capture of its own",
            field=path,
        )
    (width,) = widths
    return width


def _target(spec: capture_pb2.CaptureSpec, path: str) -> Target:
    target = checks.required(spec.WhichOneof("to"), path, "inline, subscription, sink and run")
    if target not in {one.value for one in Target}:
        raise NotSupported(
            f"captures into a {target} are not served yet; inline ones and those into a "
            "subscription or a sink are",
            field=join(path, target),
        )
    if target == "subscription" and spec.HasField("overload"):
        raise InvalidValue("the subscription's own policy holds", field=join(path, "overload"))
    return Target(target)


def _aimed(
    capture: ResolvedCapture, spec: capture_pb2.CaptureSpec, sinks: Sinks | None, path: str
) -> ResolvedCapture:
    """A capture with where it goes, which is there."""
    if capture.target is Target.SUBSCRIPTION:
        return replace(capture, subscription=spec.subscription)
    if capture.target is Target.INLINE:
        if capture.overload != capture_pb2.OVERLOAD_FAIL:
            raise NotSupported(
                "inline rows are served with OVERLOAD_FAIL alone; send them to a subscription",
                field=join(path, "overload"),
            )
        return capture
    if sinks is None:
        raise NotSupported("sinks are not served here", field=join(path, "sink"))
    encoding_of(capture.form.encoding, join(path, "encoding"))
    return replace(capture, sink=sinks.check(spec.sink, join(path, "sink")))


_LOSSY = (tensor_pb2.ENCODING_RP8, tensor_pb2.ENCODING_TOPK8)
"""Encodings that keep K numbers of each row."""


def _form(spec: capture_pb2.CaptureSpec, width: int, path: str) -> Form:
    if spec.HasField("projection"):
        raise NotSupported(
            "projections are not served yet; capture whole rows", field=join(path, "projection")
        )
    encoding = spec.encoding if spec.HasField("encoding") else tensor_pb2.ENCODING_RAW
    checks.known_enum(encoding, tensor_pb2.Encoding.values(), join(path, "encoding"))
    name = tensor_pb2.Encoding.Name(encoding)
    if spec.HasField("seed") and encoding != tensor_pb2.ENCODING_RP8:
        raise InvalidValue(f"has no meaning for {name}", field=join(path, "seed"))
    if encoding not in _LOSSY:
        if spec.HasField("kept"):
            raise InvalidValue(f"has no meaning for {name}", field=join(path, "kept"))
        return Form(encoding)
    if not spec.HasField("kept"):
        raise MissingField(f"{name} wants to know how many", field=join(path, "kept"))
    if not 1 <= spec.kept <= width:
        raise InvalidValue(f"must be 1 to {width}", field=join(path, "kept"))
    return Form(encoding, spec.kept, spec.seed)


def _check_enum_options(spec: capture_pb2.CaptureSpec, path: str) -> None:
    if spec.HasField("sharding"):
        checks.known_enum(spec.sharding, capture_pb2.Sharding.values(), join(path, "sharding"))
    if spec.HasField("overload"):
        field = join(path, "overload")
        checks.known_enum(spec.overload, capture_pb2.Overload.values(), field)
        if spec.overload == capture_pb2.OVERLOAD_SPILL:
            raise NotSupported("OVERLOAD_SPILL is not served yet", field=field)
