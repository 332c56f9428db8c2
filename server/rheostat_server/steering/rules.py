"""Resolves rules, and what the client and the server get of a request's probes, gates and rules.

A rule is a gate that multiplies nothing: it is open at the tokens at which the rule fires. So the
engine decides where rules fire, as it decides gates, and the server acts on what it decides. What a
rule steers are interventions under gates with the rule's conditions, which the engine holds open.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine import Gate, Hold, Kind, ModelSites, Plan, Signals
from rheostat_server import validation
from rheostat_server.errors import InvalidValue, MissingField, NotSupported
from rheostat_server.limits import LABEL_VALUE_BYTES, RULES
from rheostat_server.runs.store import RunStore
from rheostat_server.selectors.selection import Selection, SelectionContext
from rheostat_server.selectors.sites import write_site
from rheostat_server.steering.gains import check_form, check_indices
from rheostat_server.steering.gates import Held, placed_gate, resolve_hold, resolve_rule_gate
from rheostat_server.steering.interventions import Intervention, RuleSteering, resolve_steering
from rheostat_server.steering.ops import ResolvedOp
from rheostat_server.steering.probes import Probe
from rheostat_server.validation import field_path
from rheostat_server.vectors.store import VectorView
from rheostat_wire.v1 import monitor_pb2, receipt_pb2


class Stop(NamedTuple):
    """The action of a rule that ends its sample."""

    drop_sampled: bool
    label: str
    all_samples: bool


class Rule(NamedTuple):
    """A resolved rule."""

    name: str
    gate: Gate
    """Open at the tokens at which it fires."""
    stop: Stop | None
    """None: it does not end a sample."""
    watch: str = ""
    """The id of the watch that it belongs to; empty: it is the request's own, or the policy's."""
    policy: int = 0
    """The version of the server-wide policy that it belongs to; 0: to none."""
    steers: bool = False
    """Whether it steers."""
    gains: bool = False
    """Whether it multiplies the request's own steering."""
    hold: Held = Held(Hold.REST)
    """How long it acts, if it steers or multiplies."""

    @property
    def held_gate(self) -> Gate:
        """Open as long as it acts."""
        return self.gate._replace(hold=self.hold.kind, tokens=self.hold.tokens)

    @property
    def action(self) -> str:
        """The name of its action."""
        if self.stop is not None:
            return "stop"
        return "steer" if self.steers else "gain" if self.gains else "observe"


def resolve_rules(
    rules: Sequence[monitor_pb2.Rule],
    probes: Mapping[str, Probe],
    context: SelectionContext,
) -> tuple[Rule, ...]:
    """Resolves the rules of a request.

    Args:
        rules: the messages.
        probes: the probes that they may read, by name.
        context: the request.

    Raises:
        InvalidArgument: something is malformed, or two rules have one name.
    """
    found: dict[str, Rule] = {}
    for index, message in enumerate(rules):
        path = f"rules[{index}]"
        name = validation.matches(message.name, validation.PROBE_NAME, field_path(path, "name"))
        if name in found:
            raise InvalidValue(
                f"another rule has the name {name!r}: give each its own",
                field=field_path(path, "name"),
            )
        stop = _stop(message, path)
        gate = resolve_rule_gate(message, probes, context, path)
        hold = resolve_hold(message, path, Hold.REST)
        steers, gains = message.HasField("steer"), message.HasField("gain")
        found[name] = Rule(name, gate, stop, steers=steers, gains=gains, hold=hold)
    return tuple(found.values())


def resolve_rule_steering(
    messages: Sequence[monitor_pb2.Rule],
    rules: Sequence[Rule],
    probes: Mapping[str, Probe],
    model: ModelSites,
    context: SelectionContext,
    vectors: VectorView,
    runs: RunStore | None,
) -> tuple[Intervention, ...]:
    """Resolves what the rules of a request steer.

    Args:
        messages: the rules.
        rules: the same, resolved.
        probes: the probes of the request, by name.
        model: the model's sites.
        context: the request.
        vectors: where vectors are looked up.
        runs: the stored runs. None: they cannot be used here.

    Raises:
        RheostatError: as `resolve_steering`.
        GateOrder: a rule acts at the token that was read, and not behind it.
    """
    found: list[Intervention] = []
    for index, (message, rule) in enumerate(zip(messages, rules, strict=True)):
        if not message.HasField("steer"):
            continue
        path = f"rules[{index}]"
        if not message.steer.interventions:
            raise MissingField(
                "at least one intervention is required",
                field=field_path(path, "steer.interventions"),
            )
        found += resolve_steering(
            message.steer,
            model,
            context,
            vectors,
            receipt_pb2.ORIGIN_RULE,
            runs,
            probes,
            RuleSteering(rule.name, path, message, rule.held_gate),
        )
    return tuple(found)


def steered_by(
    rule: Rule,
    message: monitor_pb2.Rule,
    path: str,
    steered: Sequence[tuple[ResolvedOp, Selection]],
    origin: receipt_pb2.Origin.ValueType,
    probes: Mapping[str, Probe],
    model: ModelSites,
    context: SelectionContext,
) -> tuple[Intervention, ...]:
    """What a rule of many requests steers in one of them.

    Args:
        rule: the rule.
        message: its message.
        path: its path.
        steered: the op and the selection of each intervention.
        origin: the origin of the interventions.
        probes: the probes that the rule may read, by name.
        model: the model's sites.
        context: the request.

    Raises:
        GateOrder: the rule acts at the token that was read, and not behind it.
    """
    found = []
    for index, (op, selection) in enumerate(steered):
        gate = placed_gate(rule.held_gate, message, op.sites, probes, model, context, path)
        found.append(Intervention(origin, index, op, selection, gate, rule.name))
    return tuple(found)


def with_rule_gains(
    own: Sequence[Intervention],
    messages: Sequence[monitor_pb2.Rule],
    rules: Sequence[Rule],
    probes: Mapping[str, Probe],
    model: ModelSites,
    context: SelectionContext,
) -> tuple[Intervention, ...]:
    """A request's own steering, with the gates by which rules multiply it.

    Args:
        own: the interventions.
        messages: the rules, of the request, the policy or a watch.
        rules: the same, resolved.
        probes: the probes that they may read, by name.
        model: the model's sites.
        context: the request.

    Raises:
        MissingField, NonFinite, InvalidValue: a gain is malformed.
        GateOrder: a rule acts at the token that was read, and not behind it.
        NotSupported: two gates or gains would multiply one intervention.
    """
    found = list(own)
    for number, (message, rule) in enumerate(zip(messages, rules, strict=True)):
        if not message.HasField("gain"):
            continue
        path = f"rules[{number}]"
        field = field_path(path, "gain")
        check_form(message.gain, field)
        if not own and (rule.policy or rule.watch):
            continue  # another's rule, and nothing to multiply
        check_indices(message.gain, len(own), field)
        for index in sorted(set(message.gain.interventions or range(len(own)))):
            intervention = found[index]
            if intervention.gate is not None:
                raise NotSupported(
                    f"intervention {index} has a gate, or the gain of another rule: the gain of a "
                    "rule multiplies interventions without either",
                    field=field,
                )
            sites = intervention.op.sites
            gate = placed_gate(rule.held_gate, message, sites, probes, model, context, path)
            gate = gate._replace(invert=True, factor=message.gain.factor)
            found[index] = replace(intervention, gate=gate, gained_by=path)
    return tuple(found)


def refuse_gained_sums(interventions: Sequence[Intervention]) -> None:
    """Refuses gains of rules on additions that meet others.

    Additions at a site and token are summed and rounded once. With a gain of its own, an addition
    is rounded apart, so that the request would change although no rule fires. Whether two select
    one token is judged by their first and last positions.

    Args:
        interventions: the server-wide ones and the request's, in order.

    Raises:
        NotSupported: there is such an addition.
    """
    if not any(intervention.gained_by for intervention in interventions):
        return
    at_site: dict[int, list[tuple[int, int, Intervention]]] = {}
    for intervention in interventions:
        adds = intervention.op.op == receipt_pb2.OP_ADD and (
            intervention.gate is None or intervention.gained_by
        )
        reach = intervention.selection.reach
        for site in intervention.acting_sites if adds and reach else ():
            at_site.setdefault(site, []).append((reach[0][0], reach[-1][1], intervention))
    for found in at_site.values():
        end = gained_end = 0
        gained = ""
        for first, last, intervention in sorted(found, key=itemgetter(0)):
            gained = intervention.gained_by or gained
            if first < (end if intervention.gained_by else gained_end):
                raise NotSupported(
                    f"{intervention.op.path} meets another addition at a site, with which it is "
                    "summed and rounded once. The gain of a rule multiplies additions that meet no "
                    "other: add the sum of the vectors, or at different sites",
                    field=field_path(gained, "gain"),
                )
            end = max(end, last)
            gained_end = max(gained_end, last) if intervention.gained_by else gained_end


def check_rule_count(rules: Sequence[monitor_pb2.Rule]) -> None:
    """Limits the rules, before any other check.

    Raises:
        InvalidValue: there are too many.
    """
    validation.check_count(len(rules), RULES, "rules", "rules")


def check_shared_gain(message: monitor_pb2.Rule, path: str) -> None:
    """Checks the gain of a rule of many requests, before any of them is known.

    Raises:
        MissingField, NonFinite, InvalidValue: it is malformed.
    """
    if message.HasField("gain"):
        check_form(message.gain, field_path(path, "gain"))


def _stop(message: monitor_pb2.Rule, path: str) -> Stop | None:
    action = message.WhichOneof("action")
    if action is None:
        raise MissingField("one of observe, stop, steer and gain is required", field=path)
    if action in ("steer", "gain"):
        return None
    if message.HasField("hold"):
        raise InvalidValue(
            f"only steer and gain are held, {action} is not: leave it out",
            field=field_path(path, "hold"),
        )
    if action == "observe":
        return None
    stop = message.stop
    validation.text_bytes(stop.label, LABEL_VALUE_BYTES, field_path(path, "stop.label"))
    dropped = stop.drop_sampled if stop.HasField("drop_sampled") else True
    return Stop(dropped, stop.label, stop.all_samples)


def signals_of(
    interventions: Sequence[Intervention], probes: Collection[Probe], rules: Sequence[Rule]
) -> Signals:
    """What the workers send of a request."""
    sent = [probe for probe in probes if probe.signals]
    gates = [
        intervention.gate
        for intervention in interventions
        if intervention.signals and intervention.gate is not None
    ]
    gates += [rule.gate for rule in rules]
    return Signals(
        readings=max((column + 1 for probe in sent for column in probe.columns), default=0),
        gates=tuple(dict.fromkeys(gates)),
        openness=bool(gates),
    )


@dataclass(frozen=True, slots=True)
class SignalPlan:
    """What the server gets from the workers at each token of a request, and does with it."""

    readings: tuple[int, ...]
    """The columns of readings that the client gets, in its order."""
    gates: tuple[int, ...]
    """The numbers of the gates whose openness the client gets, after the readings."""
    rules: tuple[Rule, ...]
    rule_gates: npt.NDArray[np.intp]
    """[rules]: the numbers of their gates."""
    table: monitor_pb2.SignalTable
    """What the columns are."""

    @property
    def own_rules(self) -> int:
        """The number of the request's own rules, which come before all others."""
        return sum(not (rule.watch or rule.policy) for rule in self.rules)

    @property
    def policy_rules(self) -> int:
        """The number of the policy's rules, between its own and those of watches."""
        return sum(rule.policy > 0 for rule in self.rules)

    @property
    def reported(self) -> bool:
        """Whether the client gets signals."""
        return bool(self.columns or self.own_rules)

    @property
    def for_watches(self) -> bool:
        """Whether only watches use the signals: the client gets none, and there are no rules."""
        return not (self.columns or self.rules)

    @property
    def columns(self) -> int:
        """The number of columns that the client gets."""
        return len(self.readings) + len(self.gates)

    @property
    def stops(self) -> bool:
        """Whether a rule may end a sample."""
        return any(rule.stop is not None for rule in self.rules)


def signal_plan(
    plan: Plan,
    interventions: Sequence[Intervention],
    probes: Collection[Probe],
    rules: Sequence[Rule],
) -> SignalPlan | None:
    """What is done with the signals of a packed plan; None if there are none.

    Args:
        plan: the plan.
        interventions: those of the request.
        probes: its own probes, in order.
        rules: its own rules, in order, then those of the policy, then those of watches.
    """
    if not plan.signals.any:
        return None
    read = any(act.kind is Kind.READ for act in plan.acts)
    # Without a token that is read, no worker sends anything, and no rule can fire.
    number = {gate: n for n, gate in enumerate(plan.packed_acts.gates)} if read else {}
    message = monitor_pb2.SignalTable()
    readings: list[int] = []
    gates: list[int] = []
    for probe in probes:
        for column, site in zip(probe.columns if probe.signals else (), probe.sites, strict=False):
            readings.append(column)
            entry = message.columns.add(probe_name=probe.name)
            write_site(entry.site, site)
    for intervention in interventions:
        if intervention.signals and intervention.gate in number:
            gates.append(number[intervention.gate])
            message.columns.add(gate=intervention.ref)
    acting = [rule for rule in rules if rule.gate in number]
    return SignalPlan(
        tuple(readings),
        tuple(gates),
        tuple(acting),
        np.array([number[rule.gate] for rule in acting], np.intp),
        message,
    )
