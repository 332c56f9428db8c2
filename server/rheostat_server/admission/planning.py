"""Compiles interventions and captures to plans, and checks that an engine can run them.

Invariant: a plan of `compile_plan` can be composed, and costs a worker no more than the engine's
limits. Plans are packed here, so that the ledger later only adds arrays. These functions may take
long. Callers run them on a thread unless `estimates` says that the request is small.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from rheostat_engine import (
    MAX_COLUMNS,
    MAX_PLAN_COST,
    NO_SIGNALS,
    Act,
    Kind,
    Plan,
    PlanTooLarge,
    Signals,
)
from rheostat_server import validation
from rheostat_server.capture.engine_captures import engine_captures
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.errors import InvalidValue
from rheostat_server.limits import CAPTURES, INTERVENTIONS, OBSERVERS_PLAN_COST, REQUEST_RANGES
from rheostat_server.steering.interventions import INTERVENTION_PATH, Intervention
from rheostat_server.steering.probes import Probe
from rheostat_server.steering.rules import Rule, signals_of
from rheostat_server.subscriptions.observer_captures import FRAGMENTED, ObserverCapture
from rheostat_server.subscriptions.subscription import Subscription
from rheostat_server.vectors.store import Vector
from rheostat_wire.v1 import capture_pb2, gate_pb2, monitor_pb2, receipt_pb2, steering_pb2

_OBSERVED_PLANS = 8
"""The most plans with captures of observers that are kept for a request and a first observer."""

_TOO_MUCH = (
    "the selectors cut the request into too many different combinations of interventions, captures "
    "and sites, or name too many token ids; use fewer"
)


class Compiled(NamedTuple):
    """A plan, and the vectors that the workers must load before they run it."""

    plan: Plan
    """The acts of the interventions in order, those of the probes, and the captures."""
    vectors: tuple[Vector, ...]
    """Every vector that the plan needs, each once."""


class GoingOn(NamedTuple):
    """The readings and signals of a running request, which a change of its steering keeps."""

    reads: tuple[Act, ...] = ()
    signals: Signals = NO_SIGNALS

    @classmethod
    def of(cls, plan: Plan) -> "GoingOn":
        """All that reads in a packed plan, and its gates with their states."""
        gates = plan.packed_acts.gates
        reads = tuple(act for act in plan.acts if act.kind is Kind.READ)
        return cls(reads, plan.signals._replace(kept=gates, means_kept=True))


def compile_plan(
    request_id: str,
    interventions: Sequence[Intervention],
    captures: Sequence[ResolvedCapture],
    probes: Collection[Probe] = (),
    rules: Sequence[Rule] = (),
    going_on: GoingOn | None = None,
) -> Compiled:
    """Compiles interventions, in their order, then probes, captures, and rules to a plan.

    Args:
        request_id: the id of the plan.
        interventions: in order.
        captures: in order.
        probes: all that read.
        rules: the rules that read them.
        going_on: of an update, what reads and decides already, in place of probes and rules.

    Raises:
        InvalidValue: no engine can run it.
    """
    acts: list[Act] = []
    own: list[Act] = []
    vectors: dict[bytes, Vector] = {}
    for intervention in interventions:
        if intervention.acts:
            acts += intervention.acts
            used = intervention.acts[0].vectors
            vectors |= {v.digest: v for v in intervention.op.vectors if v.digest in used}
            if intervention.origin != receipt_pb2.ORIGIN_GLOBAL:
                own += intervention.acts
    reads = tuple(act for probe in probes for act in probe.acts)
    signals = signals_of(interventions, probes, rules) if probes else NO_SIGNALS
    if going_on is not None:
        reads, signals = going_on
    vectors |= {probe.vector.digest: probe.vector for probe in probes if probe.acts}
    plan = Plan(request_id, (*acts, *reads), engine_captures(captures), signals=signals)
    try:
        plan = plan.pack()
    except ValueError as error:
        problem = problem_of(error)
        # The text names the server-wide steering only if the request alone is not the problem.
        if len(own) < len(acts) and _packs(Plan(request_id, (*own, *reads), plan.captures)):
            problem = f"together with the server-wide steering: {problem}"
        raise InvalidValue(problem, field="steering") from error
    return Compiled(plan, tuple(vectors.values()))


def compile_watch(
    steered: Sequence[Intervention], probes: Collection[Probe], rules: Sequence[Rule]
) -> Plan:
    """The plan of what a watch reads and steers in a request that has nothing else.

    Raises:
        InvalidValue: no engine can run it.
    """
    try:
        return compile_plan("watch", steered, (), probes, rules).plan
    except InvalidValue as error:
        error.field = "rules"
        raise


_ObservedKey = tuple[tuple[object, ...], ...]
"""For each observer, in order: its name, and the identities of its captures in a request."""


class _ObservedPlan(NamedTuple):
    plan: Plan
    names: frozenset[str]
    """The observers whose captures the plan has."""
    beside: tuple[ResolvedCapture, ...]
    """The captures of the observers. Their identities are the key, so they must stay in memory."""


ObservedPlans = WeakKeyDictionary[Subscription, dict[_ObservedKey, _ObservedPlan]]
"""The plans with captures of observers of one request, kept for requests that are observed alike.

A plan is kept no longer than its first observer. Captures with a projection are not kept, because
their vectors may take much memory.
"""


def observe(
    plan: Plan,
    captures: Sequence[ResolvedCapture],
    observer_captures: Sequence[ObserverCapture],
    plans: ObservedPlans,
) -> tuple[Plan, tuple[ObserverCapture, ...]]:
    """Adds the captures of observers to a plan, as long as it stays affordable.

    Args:
        plan: the request's own plan.
        captures: the request's own captures.
        observer_captures: the captures of each subscription that observes the request.
        plans: keeps the result for the next request with this plan and these captures.

    Returns:
        The packed plan, and `observer_captures`. An observer that the request cannot afford
        observes nothing.
    """
    observing = [
        observer_capture for observer_capture in observer_captures if observer_capture.observed
    ]
    if not observing:
        return plan, tuple(observer_captures)
    key = tuple(
        (observer_capture.subscription.name, *map(id, observer_capture.beside))
        for observer_capture in observing
    )
    known = plans.setdefault(observing[0].subscription, {})
    observed = known.get(key)
    if observed is None:
        together, kept = _affordable(plan, captures, observing)
        observed = _ObservedPlan(
            together,
            frozenset(observer_capture.subscription.name for observer_capture in kept),
            tuple(capture for observer_capture in observing for capture in observer_capture.beside),
        )
        if all(capture.projection is None for capture in observed.beside):
            if len(known) == _OBSERVED_PLANS:
                known.clear()
            known[key] = observed
    names = observed.names
    return observed.plan, tuple(
        observer_capture.unobserved(FRAGMENTED)
        if observer_capture.observed and observer_capture.subscription.name not in names
        else observer_capture
        for observer_capture in observer_captures
    )


def _affordable(
    plan: Plan, captures: Sequence[ResolvedCapture], observing: Sequence[ObserverCapture]
) -> tuple[Plan, Sequence[ObserverCapture]]:
    """The plan with captures for as many observers as fit the limits of cost and intervals."""
    most = plan.packed_captures.plan_cost + OBSERVERS_PLAN_COST
    kept = sorted(observing, key=_spans)
    while kept:
        beside = [capture for observer_capture in kept for capture in observer_capture.beside]
        try:
            together = plan.with_captures(engine_captures([*captures, *beside]))
            if together.packed_captures.plan_cost <= most:
                together.packed_captures.build()
                return together, kept
        except PlanTooLarge:  # handled like a plan that costs too much
            pass
        kept = kept[: len(kept) // 2]
    return plan, ()


def _spans(observer_capture: ObserverCapture) -> int:
    return sum(capture.selection.span_count for capture in observer_capture.beside)


def check_affordable(spent: int, plan: Plan) -> int:
    """The cost of a session that applies one more packed plan.

    Raises:
        InvalidValue: it exceeds the limit.
    """
    total = spent + plan.packed_acts.plan_cost
    if total > MAX_PLAN_COST:
        raise InvalidValue(
            f"together with what the session did before: {_TOO_MUCH}. It costs {total}; at most "
            f"{MAX_PLAN_COST} is allowed",
            field="steering",
        )
    return total


def check_ranges(
    steering: steering_pb2.Steering,
    captures: Sequence[capture_pb2.CaptureSpec] = (),
    probes: Sequence[gate_pb2.Probe] = (),
    rules: Sequence[monitor_pb2.Rule] = (),
) -> None:
    """Limits the interventions, captures and probes, and the ranges of all selectors.

    Runs before any other check, because a message may hold 500,000 captures.

    Raises:
        InvalidValue: there are too many. For ranges, the error names the selector that exceeds the
            limit.
    """
    steered = [
        (f"rules[{index}].steer.interventions", rule.steer.interventions)
        for index, rule in enumerate(rules)
    ]
    own = (INTERVENTION_PATH, steering.interventions)
    for path, interventions in (own, *steered):
        validation.check_count(len(interventions), INTERVENTIONS, path, "interventions")
    validation.check_count(len(captures), CAPTURES, "captures", "captures")
    validation.check_count(len(probes), MAX_COLUMNS, "probes", "probes")
    selecting: Sequence[
        tuple[str, Sequence[steering_pb2.Intervention | capture_pb2.CaptureSpec | gate_pb2.Probe]]
    ] = (own, ("captures", captures), ("probes", probes), *steered)
    total = 0
    for path, parts in selecting:
        for index, part in enumerate(parts):
            total += len(part.where.include) + len(part.where.exclude)
            field = f"{path}[{index}].where"
            validation.check_count(total, REQUEST_RANGES, field, "ranges in the request")


def _packs(plan: Plan) -> bool:
    """Whether an engine can run a plan."""
    try:
        plan.pack()
    except ValueError:
        return False
    return True


def problem_of(error: ValueError) -> str:
    """The error text for a plan that cannot be packed."""
    return f"{_TOO_MUCH}. {error}" if isinstance(error, PlanTooLarge) else str(error)
