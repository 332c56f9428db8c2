"""Checks and resolves the message that opens a watch, on a thread if that takes long."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from rheostat_engine import MAX_COLUMNS, MAX_GATES, ModelSites, Plan
from rheostat_server import validation
from rheostat_server.errors import InvalidValue, MissingField, NotSupported, RheostatError
from rheostat_server.limits import (
    INTERVENTIONS,
    REQUEST_RANGES,
    RULES,
    SUBSCRIPTION_SELECTOR_BYTES,
    WATCH_STEERED_SITES,
)
from rheostat_server.monitors.readings import Steered, WatchedReadings, table_of
from rheostat_server.monitors.watch import WatchSettings
from rheostat_server.selectors.prepared_selection import PreparedSelector
from rheostat_server.selectors.selection import EVERYTHING, SelectionContext
from rheostat_server.steering.estimates import estimate_probes, estimate_steering
from rheostat_server.steering.interventions import Intervention, check_sums
from rheostat_server.steering.probes import Probe, resolve_probes
from rheostat_server.steering.rules import (
    Rule,
    check_shared_gain,
    resolve_rule_steering,
    resolve_rules,
)
from rheostat_server.subscriptions.observed import observed_requests
from rheostat_server.subscriptions.opening import check_filter
from rheostat_server.tasks.offload import offload_plan
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import VectorStore, VectorView
from rheostat_server.vectors.token_directions import with_directions
from rheostat_wire.v1 import gate_pb2, monitor_service_pb2, steering_pb2

_pb = monitor_service_pb2

Compile: TypeAlias = Callable[[Sequence[Intervention], Collection[Probe], Sequence[Rule]], Plan]
"""Compiles probes and rules of a watch to a plan. Raises InvalidValue if no engine can run it."""


@dataclass(frozen=True, slots=True)
class WatchContext:
    """Everything that is needed to check the message that opens a watch."""

    sites: ModelSites
    """The model's sites."""
    typical: SelectionContext
    """A typical context, used in place of those of later requests."""
    store: VectorStore
    """The stored vectors."""
    no_gates: str
    """Why the model's engine reads no probes; empty if it does."""
    compile: Compile
    """May be called on a thread."""
    fits: Callable[[Plan], None]
    """Raises ResourceExhausted if even an idle engine has too little room for a plan, or if its
    sums of rows would leave none for other requests."""


async def check_opening(
    opened: monitor_service_pb2.WatchOpen, context: WatchContext
) -> WatchSettings:
    """Checks the message that opens a watch, except for `buffer_bytes`.

    Raises:
        InvalidArgument, FailedPrecondition: the message is malformed, or something in it is not
            supported.
        NotFound: a vector is not stored, or a name is unknown.
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
    length, vectors = context.typical.prompt_len, context.store.view()
    work = opened.filter.ByteSize() + estimate_probes(opened.probes, length, context.sites)
    for rule in opened.rules:
        work += rule.ByteSize() + estimate_steering(rule.steer, length, context.sites, vectors)
    readings, plan = await with_directions(
        context.store.directions,
        opened,
        lambda: offload_plan(work, _resolve, opened, context, context.store.view()),
    )
    if readings.steers or plan.packed_acts.row_sums:
        context.fits(plan)
    return WatchSettings(observed_requests(opened.filter), readings, report, on_lost, opened.steers)


def _check_selectors(opened: monitor_service_pb2.WatchOpen) -> None:
    selecting: list[tuple[str, gate_pb2.Probe | steering_pb2.Intervention]] = [
        (f"open.probes[{number}]", probe) for number, probe in enumerate(opened.probes)
    ]
    for number, rule in enumerate(opened.rules):
        path = f"open.rules[{number}].steer.interventions"
        validation.check_count(len(rule.steer.interventions), INTERVENTIONS, path, "interventions")
        selecting += [
            (f"{path}[{index}]", intervention)
            for index, intervention in enumerate(rule.steer.interventions)
        ]
    ranges = size = 0
    for path, part in selecting:
        ranges += len(part.where.include) + len(part.where.exclude)
        validation.check_count(ranges, REQUEST_RANGES, f"{path}.where", "ranges in the watch")
        size += part.where.ByteSize()
        most = SUBSCRIPTION_SELECTOR_BYTES
        validation.check_count(size, most, f"{path}.where", "bytes of selectors")


def _resolve(
    opened: monitor_service_pb2.WatchOpen, context: WatchContext, vectors: VectorView
) -> tuple[WatchedReadings, Plan]:
    """Checks the filter, and resolves probes and rules."""
    check_filter(opened.filter)
    try:
        lenient, sites = context.typical.lenient_copy, context.sites
        probes = resolve_probes(opened.probes, sites, lenient, vectors)
        rules = resolve_rules(opened.rules, probes, lenient)
        for number, rule in enumerate(opened.rules):
            check_shared_gain(rule, f"rules[{number}]")
        steered = resolve_rule_steering(opened.rules, rules, probes, sites, lenient, vectors, None)
        _check_steered(steered)
        check_sums(steered, FloatType(sites.dtype))
        plan = context.compile(steered, probes.values(), rules)
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
    selectors = tuple(map(_selector, opened.probes))
    ops = {(intervention.rule, intervention.index): intervention.op for intervention in steered}
    return (
        WatchedReadings(
            templates,
            selectors,
            tuple(opened.rules),
            tuple(
                tuple(
                    Steered(ops[rule.name, index], _selector(intervention))
                    for index, intervention in enumerate(rule.steer.interventions)
                )
                for rule in opened.rules
            ),
            table_of(templates),
            context.sites,
        ),
        plan,
    )


def _check_steered(steered: Sequence[Intervention]) -> None:
    """Limits the steering of rules, because each watched request is admitted with it."""
    total = 0
    for intervention in steered:
        total += len(intervention.op.sites)
        what = "sites of all interventions of the rules of a watch"
        validation.check_count(total, WATCH_STEERED_SITES, intervention.op.path, what)


def _selector(part: gate_pb2.Probe | steering_pb2.Intervention) -> PreparedSelector | None:
    """The selector of a probe or an intervention; None if it has none."""
    return PreparedSelector(part.where) if part.HasField("where") else None


def _template(probe: Probe) -> Probe:
    return replace(probe, selection=EVERYTHING, signals=True)
