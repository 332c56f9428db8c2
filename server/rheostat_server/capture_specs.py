"""CaptureSpecs resolved: which rows, under which names, in which dtype."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from rheostat._proto.v1 import capture_pb2, tensor_pb2
from rheostat_engine import Capture, ModelSites, Site, Spans
from rheostat_server import checks
from rheostat_server.checks import join
from rheostat_server.errors import InvalidValue, MissingField, NotSupported
from rheostat_server.limits import CAPTURES
from rheostat_server.selection import (
    EVERYTHING,
    Selection,
    SelectionContext,
    resolve_selector,
)
from rheostat_server.sites import resolve_sites
from rheostat_server.spans import clipped, length, united
from rheostat_server.tensors import FloatType, float_type


@dataclass(frozen=True, slots=True)
class ResolvedCapture:
    """A capture, resolved."""

    sites: tuple[Site, ...]
    """Every name under which rows come, by layer, then point."""
    selection: Selection
    """Which tokens. The engine copies every row within its reach; see `CaptureStream`."""
    kind: FloatType
    """Element type of the delivered rows."""

    @property
    def indices(self) -> tuple[int, ...]:
        """The sites' indices, ascending, each once."""
        return tuple(sorted({site.index for site in self.sites}))

    def payload_bytes(self, *, row_end: int, width: int) -> int:
        """Bytes of payload if every position below `row_end` that is known is computed."""
        positions = length(clipped(self.selection.known, 0, row_end))
        return positions * len(self.sites) * width * self.kind.itemsize


def resolve_captures(
    specs: Sequence[capture_pb2.CaptureSpec], model: ModelSites, context: SelectionContext
) -> tuple[ResolvedCapture, ...]:
    """The captures of a request.

    Raises:
        InvalidArgument: something is malformed.
        FailedPrecondition: something is not served.
    """
    checks.at_most(len(specs), CAPTURES, "captures", "captures")
    return tuple(
        _resolve(spec, model, context, f"captures[{index}]") for index, spec in enumerate(specs)
    )


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


def _resolve(
    spec: capture_pb2.CaptureSpec, model: ModelSites, context: SelectionContext, path: str
) -> ResolvedCapture:
    if not spec.HasField("sites"):
        raise MissingField("sites are required", field=join(path, "sites"))
    _check_target(spec, path)
    _check_encoding(spec, path)
    _check_enum_options(spec, path)
    sites = resolve_sites(spec.sites, model, join(path, "sites")).sites
    selection = EVERYTHING
    if spec.HasField("where"):
        selection = resolve_selector(spec.where, context, join(path, "where"))
    kind = FloatType(model.dtype)
    if spec.HasField("dtype"):
        kind = float_type(spec.dtype, join(path, "dtype"))
    return ResolvedCapture(sites, selection, kind)


def _check_target(spec: capture_pb2.CaptureSpec, path: str) -> None:
    target = checks.required(spec.WhichOneof("to"), path, "inline, subscription, sink and run")
    if target != "inline":
        raise NotSupported(
            f"captures into a {target} are not served yet; inline ones are",
            field=join(path, target),
        )


def _check_encoding(spec: capture_pb2.CaptureSpec, path: str) -> None:
    if spec.HasField("encoding"):
        field = join(path, "encoding")
        checks.known_enum(spec.encoding, tensor_pb2.Encoding.values(), field)
        if spec.encoding != tensor_pb2.ENCODING_RAW:
            raise NotSupported("only ENCODING_RAW is served yet", field=field)
    for name in ("kept", "seed"):
        if spec.HasField(name):
            raise InvalidValue("has no meaning for ENCODING_RAW", field=join(path, name))
    if spec.HasField("projection"):
        raise NotSupported(
            "projections are not served yet; capture whole rows", field=join(path, "projection")
        )


def _check_enum_options(spec: capture_pb2.CaptureSpec, path: str) -> None:
    if spec.HasField("sharding"):
        checks.known_enum(spec.sharding, capture_pb2.Sharding.values(), join(path, "sharding"))
    if spec.HasField("overload"):
        field = join(path, "overload")
        checks.known_enum(spec.overload, capture_pb2.Overload.values(), field)
        if spec.overload != capture_pb2.OVERLOAD_FAIL:
            raise NotSupported("only OVERLOAD_FAIL is served yet", field=field)
