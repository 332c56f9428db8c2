"""The probes, rules and steering that watches add to one request.

A watch does not make a request fail: if it cannot read the request, or its rules cannot multiply
the request's steering, the request runs without the watch, and the watch gets the reason.
Exception: if a rule of the watch may stop the request, it is refused; see `refuse_unwatched`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine import MAX_COLUMNS, MAX_GATES, Gate, ModelSites, SignalsWait
from rheostat_server.errors import GateOrder, InvalidValue, NotSupported
from rheostat_server.monitors.readings import ResolvedReadings
from rheostat_server.monitors.signal_buffer import WatchedRequest
from rheostat_server.monitors.watch import Watch
from rheostat_server.selectors.prepared_selection import TooFragmented
from rheostat_server.selectors.selection import SelectionContext
from rheostat_server.steering.controlled import CONTROLLED
from rheostat_server.steering.interventions import Intervention
from rheostat_server.steering.probes import Probe
from rheostat_server.steering.rules import Rule, SignalPlan, refuse_gained_sums, with_rule_gains
from rheostat_wire.v1 import monitor_service_pb2

_FRAGMENTED = "the watch's selectors are too fragmented in this request: use fewer, longer ranges"
_UNGAINED = "a rule of the watch cannot multiply its steering"
_CROWDED = (
    f"the request and its other watches leave too little of the {MAX_COLUMNS} readings and "
    f"{MAX_GATES} gates and rules that a request may have: read or decide less"
)


class WatchPart(NamedTuple):
    """The probes, rules and steering of one watch in a request."""

    watch: Watch
    first_column: int
    """The column of its first reading."""
    probes: tuple[Probe, ...] = ()
    rules: tuple[Rule, ...] = ()
    """Each with the id of the watch, so that it does not equal a rule of another watch."""
    steered: tuple[Intervention, ...] = ()
    """The interventions of its rules."""
    missed: str = ""
    """Why the watch does not read the request; empty if it does."""
    gates: npt.NDArray[np.intp] = np.zeros(0, np.intp)
    """[rules]: the number of each rule's gate in the request's plan; -1: the rule cannot fire."""

    @property
    def steers(self) -> bool:
        """Whether the watch may change the request's steering."""
        return self.watch.settings.steers and not self.missed

    def without(self, reason: str) -> "WatchPart":
        """A copy for a watch that does not read the request, with the reason."""
        return WatchPart(self.watch, self.first_column, missed=self.missed or reason)

    def with_gates_of(self, signals: SignalPlan | None) -> "WatchPart":
        """A copy with the numbers of its gates in the request's plan."""
        numbers: dict[Rule, int] = {}
        if signals is not None:
            numbers |= zip(signals.rules, signals.rule_gates.tolist(), strict=True)
        return self._replace(
            gates=np.array([numbers.get(rule, -1) for rule in self.rules], np.intp)
        )


def signals_wait(
    signals: SignalPlan | None, parts: Sequence[WatchPart], *, held_back: bool
) -> SignalsWait:
    """How many steps of a request's signals the workers may send together.

    Many if they are only used for summaries. A few if the client reads none and all watches only
    observe: there are no rules, and no watch has `reads_at_once`.

    Args:
        signals: the signals; None if there are none.
        parts: the watches that select the request.
        held_back: whether its tokens are held back, so that a watch can stop it in time.
    """
    if signals is None or not signals.for_watches:
        return SignalsWait.NEVER
    reading = [part.watch for part in parts if not part.missed]
    reports = {watch.settings.report for watch in reading}
    if reports == {monitor_service_pb2.WATCH_REPORT_SUMMARY}:
        return SignalsWait.MANY_STEPS
    if held_back or any(watch.reads_at_once for watch in reading):
        return SignalsWait.NEVER
    return SignalsWait.FEW_STEPS if reading else SignalsWait.NEVER


class WatchedPart(NamedTuple):
    """A watch's part in a request that was announced to it."""

    part: WatchPart
    watched: WatchedRequest


def begin_watches(
    parts: Sequence[WatchPart],
    request_id: str,
    labels: Mapping[str, str],
    samples: int,
    prompt_len: int,
) -> tuple[WatchedPart, ...]:
    """Announces a request to its watches; returns those that read it."""
    begun: list[WatchedPart] = []
    for part in parts:
        if part.missed:
            part.watch.miss(request_id, part.missed)
        elif part.watch.taking:
            watched = part.watch.begin(request_id, labels, samples, prompt_len)
            begun.append(WatchedPart(part, watched))
    return tuple(begun)


def refuse_unwatched(parts: Sequence[WatchPart], *, with_baseline: bool) -> None:
    """Refuses a request if a watch with a rule that stops would not read all of it.

    Args:
        parts: the watches that select the request.
        with_baseline: whether the request also runs without its steering and rules.

    Raises:
        NotSupported: there is such a watch.
    """
    for part in parts:
        if not part.watch.stops:
            continue
        if with_baseline:
            raise NotSupported(
                "a watch may stop this request and does not read its baseline: send it without one",
                field="with_baseline",
            )
        if part.missed:
            raise NotSupported(f"a watch may stop this request, but {part.missed}")


class SteeredRequest(NamedTuple):
    """The steering of a request, to which its watches add."""

    server_wide: tuple[Intervention, ...]
    own: tuple[Intervention, ...]
    """From `GenerateRequest.steering`. The gains of rules multiply these."""
    beside: tuple[Intervention, ...]
    """The interventions of its own rules."""
    rules: tuple[Rule, ...]
    """Its own rules."""
    model: ModelSites
    context: SelectionContext
    controlled: bool
    """Whether a controller sets its gains."""

    @property
    def gates(self) -> set[Gate]:
        """Its own gates."""
        every = [part.gate for part in (*self.own, *self.beside)]
        return {gate for gate in (*every, *(rule.gate for rule in self.rules)) if gate is not None}


def watch_parts(
    watches: Sequence[Watch], request: SteeredRequest, first_column: int
) -> tuple[tuple[WatchPart, ...], tuple[Intervention, ...]]:
    """The parts of a request's watches, and its own steering with the gains of their rules.

    Args:
        watches: the watches that select the request.
        request: the request.
        first_column: the column after the request's own readings.
    """
    column, beside = first_column, set[Gate]()
    parts = []
    for watch in watches:
        readings = watch.settings.readings
        if request.controlled and (watch.settings.steers or readings.steers):
            parts.append(WatchPart(watch, column, missed=CONTROLLED))
            continue
        try:
            resolved = readings.resolve(request.context, column, watch.name)
            own = _with_gains(watch, resolved, request)
        except TooFragmented:
            parts.append(WatchPart(watch, column, missed=_FRAGMENTED))
            continue
        except (InvalidValue, GateOrder, NotSupported) as error:
            parts.append(WatchPart(watch, column, missed=f"{_UNGAINED}: {error.message}"))
            continue
        steered = [part.gate for part in resolved.steered if part.gate is not None]
        wanted = {*beside, *(rule.gate for rule in resolved.rules), *steered}
        gained = request._replace(own=own)
        columns = readings.columns
        if column + columns > MAX_COLUMNS or len(gained.gates | wanted) > MAX_GATES:
            parts.append(WatchPart(watch, column, missed=_CROWDED))
            continue
        parts.append(WatchPart(watch, column, resolved.probes, resolved.rules, resolved.steered))
        column, beside, request = column + columns, wanted, gained
    return tuple(parts), request.own


def _with_gains(
    watch: Watch, resolved: ResolvedReadings, request: SteeredRequest
) -> tuple[Intervention, ...]:
    """A request's own steering, with the gains of a watch's rules.

    Raises:
        InvalidValue, GateOrder, NotSupported: a rule cannot multiply it.
    """
    readings = watch.settings.readings
    if not readings.gains or not request.own:
        return request.own
    probes = {probe.name: probe for probe in resolved.probes}
    own = with_rule_gains(
        request.own, readings.rules, resolved.rules, probes, request.model, request.context
    )
    refuse_gained_sums((*request.server_wide, *own))
    return own
