"""Checks and resolves the message that opens a watch, on a thread."""

import asyncio
from dataclasses import dataclass, replace

from rheostat_engine import MAX_COLUMNS, MAX_GATES, ModelSites
from rheostat_server import validation
from rheostat_server.errors import InvalidValue, MissingField, NotSupported, RheostatError
from rheostat_server.limits import REQUEST_RANGES, RULES, SUBSCRIPTION_SELECTOR_BYTES
from rheostat_server.monitors.readings import WatchedReadings, table_of
from rheostat_server.monitors.watch import WatchSettings
from rheostat_server.selectors.prepared_selection import PreparedSelector
from rheostat_server.selectors.selection import EVERYTHING, SelectionContext
from rheostat_server.steering.gates import Probe, resolve_probes
from rheostat_server.steering.rules import resolve_rules
from rheostat_server.subscriptions.observed import observed_requests
from rheostat_server.subscriptions.opening import check_filter
from rheostat_server.vectors.store import VectorStore, VectorView
from rheostat_server.vectors.token_directions import with_directions
from rheostat_wire.v1 import monitor_service_pb2

_pb = monitor_service_pb2


@dataclass(frozen=True, slots=True)
class WatchContext:
    """Everything that the opening of a watch is checked against."""

    sites: ModelSites
    """The model's sites."""
    typical: SelectionContext
    """A context that stands for later requests."""
    store: VectorStore
    """The stored vectors."""
    no_gates: str
    """Why the model's engine reads no probes; empty if it does."""


async def check_opening(
    opened: monitor_service_pb2.WatchOpen, context: WatchContext
) -> WatchSettings:
    """Checks the message that opens a watch, except for the memory that it asks for.

    Raises:
        InvalidArgument, FailedPrecondition: the message is malformed, or the server does not
            support what it asks for.
        NotFound: a vector is not stored, or a name not known.
    """
    if not opened.HasField("filter"):
        raise MissingField("a filter is required", field="open.filter")
    if context.no_gates:
        raise NotSupported(context.no_gates, field="open.probes")
    if not opened.probes:
        raise MissingField("at least one probe is required", field="open.probes")
    validation.check_count(len(opened.probes), MAX_COLUMNS, "open.probes", "probes")
    validation.check_count(len(opened.rules), min(RULES, MAX_GATES), "open.rules", "rules")
    _check_selectors(opened)
    report = opened.report if opened.HasField("report") else _pb.WATCH_REPORT_EVERY
    validation.known_enum(report, _pb.WatchReport.values(), "open.report")
    on_lost = opened.on_lost if opened.HasField("on_lost") else _pb.WATCH_LOST_CONTINUE
    validation.known_enum(on_lost, _pb.WatchLost.values(), "open.on_lost")
    readings = await with_directions(
        context.store.directions,
        opened,
        lambda: asyncio.to_thread(_resolve, opened, context, context.store.view()),
    )
    return WatchSettings(observed_requests(opened.filter), readings, report, on_lost, opened.steers)


def _check_selectors(opened: monitor_service_pb2.WatchOpen) -> None:
    ranges = size = 0
    for number, probe in enumerate(opened.probes):
        path = f"open.probes[{number}].where"
        ranges += len(probe.where.include) + len(probe.where.exclude)
        validation.check_count(ranges, REQUEST_RANGES, path, "ranges in the watch")
        size += probe.where.ByteSize()
        validation.check_count(size, SUBSCRIPTION_SELECTOR_BYTES, path, "bytes of selectors")


def _resolve(
    opened: monitor_service_pb2.WatchOpen, context: WatchContext, vectors: VectorView
) -> WatchedReadings:
    """Checks the filter, and resolves probes and rules."""
    check_filter(opened.filter)
    try:
        lenient = replace(context.typical, lenient=True)
        probes = resolve_probes(opened.probes, context.sites, lenient, vectors)
        resolve_rules(opened.rules, probes, lenient)
    except RheostatError as error:
        if error.field:
            error.field = f"open.{error.field}"
        raise
    for number, rule in enumerate(opened.rules):
        if rule.WhichOneof("action") == "stop" and rule.stop.all_samples:
            raise InvalidValue(
                "a watch stops the sample that was read; its other samples are read too",
                field=f"open.rules[{number}].stop.all_samples",
            )
    templates = tuple(_template(probe) for probe in probes.values())
    selectors = tuple(
        PreparedSelector(probe.where) if probe.HasField("where") else None
        for probe in opened.probes
    )
    return WatchedReadings(templates, selectors, tuple(opened.rules), table_of(templates))


def _template(probe: Probe) -> Probe:
    return replace(probe, selection=EVERYTHING, signals=True)
