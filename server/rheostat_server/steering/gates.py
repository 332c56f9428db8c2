"""Resolves gates: steering that acts as far as probes say.

The engine computes both in the forward pass. Therefore a gate's probes must read at sites before
all sites at which its interventions act, unless it is decided by the prompt and acts on later
tokens; see `placed_gate`.
"""

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeVar

from google.protobuf.message import Message

from rheostat_engine import (
    MAX_CONDITIONS,
    MAX_TERMS,
    NEVER,
    Combine,
    Form,
    Gate,
    GateCondition,
    Hold,
    ModelSites,
    Point,
    Pool,
    Site,
)
from rheostat_server import validation
from rheostat_server.errors import GateOrder, InvalidValue, MissingField
from rheostat_server.limits import GATE_TOKENS, ID_BYTES
from rheostat_server.selectors.selection import SelectionContext
from rheostat_server.steering.probes import Probe
from rheostat_server.validation import field_path
from rheostat_wire.v1 import gate_pb2, monitor_pb2, steering_pb2

_POOL = {
    gate_pb2.POOL_LAST: Pool.LAST,
    gate_pb2.POOL_MEAN: Pool.MEAN,
    gate_pb2.POOL_MAX: Pool.MAX,
}
_COMBINE = {
    gate_pb2.COMBINE_ALL: Combine.ALL,
    gate_pb2.COMBINE_ANY: Combine.ANY,
    gate_pb2.COMBINE_SUM: Combine.SUM,
    gate_pb2.COMBINE_VOTE: Combine.VOTE,
}
Wire = TypeVar("Wire", bound=int)
Own = TypeVar("Own")

_BOUNDS = ("above", "below", "for_tokens", "stays_above", "stays_below")
"""Fields of a condition that take a value as 0 or 1."""

_PER_LAYER = 4
"""Sites of a layer; see `rheostat_engine.plan.points`."""


class Held(NamedTuple):
    """How long what opened or fired acts."""

    kind: Hold
    tokens: int = 0
    """Of `Hold.TOKENS`."""


def resolve_gate(
    intervention: steering_pb2.Intervention,
    sites: Sequence[Site],
    probes: Mapping[str, Probe],
    model: ModelSites,
    context: SelectionContext,
    path: str,
) -> Gate:
    """The gate of an intervention.

    Args:
        intervention: an intervention with a gate.
        sites: the sites at which it acts.
        probes: the probes of its request.
        model: the model's sites.
        context: the request.
        path: the intervention's path.

    Raises:
        InvalidArgument: something is malformed, or a probe is read too late for its sites.
        NotSupported: something is not served yet.
    """
    message, path = intervention.gate, field_path(path, "gate")
    hold = resolve_hold(message, path, Hold.TOKEN)
    conditions, combine = _evidence(message, probes, context, path, "gate")
    form, a, b = _form(message, path, summed=_is_sum(conditions, combine))
    gate = Gate(conditions, combine, form, a, b, hold.kind, hold.tokens, message.invert)
    return placed_gate(gate, message, sites, probes, model, context, path)


def gate_probe_names(message: gate_pb2.Gate) -> tuple[str, ...]:
    """The names of the probes of a gate, each once; none of a message that is not set."""
    return tuple(dict.fromkeys(condition.probe_name for condition in message.conditions))


def resolve_rule_gate(
    message: monitor_pb2.Rule, probes: Mapping[str, Probe], context: SelectionContext, path: str
) -> Gate:
    """The gate that is open at the tokens at which a rule fires.

    Args:
        message: the rule.
        probes: the probes of its request.
        context: the request.
        path: the rule's path.

    Raises:
        InvalidArgument: something is malformed.
    """
    conditions, combine = _evidence(message, probes, context, path, "rule")
    threshold = _threshold(message, path, required=_is_sum(conditions, combine))
    return Gate(conditions, combine, Form.STEP, threshold, 0.0, Hold.TOKEN)


def _evidence(
    message: gate_pb2.Gate | monitor_pb2.Rule,
    probes: Mapping[str, Probe],
    context: SelectionContext,
    path: str,
    what: str,
) -> tuple[tuple[GateCondition, ...], Combine]:
    """The conditions of a gate or a rule, and how they are combined."""
    field = field_path(path, "conditions")
    if not message.conditions:
        raise MissingField("at least one condition is required", field=field)
    validation.check_count(len(message.conditions), MAX_CONDITIONS, field, "conditions")
    conditions, terms = [], 0
    for index, condition in enumerate(message.conditions):
        place = f"{field}[{index}]"
        probe = _probe_of(condition, probes, place)
        terms += len(probe.sites)
        validation.check_count(
            terms, MAX_TERMS, field_path(place, "probe_name"), f"readings of one {what}"
        )
        conditions.append(_condition(condition, probe, context, place))
    combine = Combine.ALL
    if message.HasField("combine"):
        combine = _enum(message.combine, _COMBINE, field_path(path, "combine"))
    return tuple(conditions), combine


def _is_sum(conditions: Sequence[GateCondition], combine: Combine) -> bool:
    """Whether conditions together may give any number, and not only one from 0 to 1."""
    return Combine.SUM in (combine, *(condition.combine for condition in conditions))


def refuse_unused_probes(probes: Mapping[str, Probe], gates: Sequence[Gate | None]) -> None:
    """Refuses probes that are neither sent nor read, because nothing would show what they read.

    Args:
        probes: the probes of a request.
        gates: its gates, and those of its rules.

    Raises:
        InvalidValue: there is such a probe.
    """
    used = {column for gate in gates if gate is not None for column in gate.columns}
    for probe in probes.values():
        if not probe.signals and used.isdisjoint(probe.columns):
            raise InvalidValue(
                f"no gate and no rule reads the probe {probe.name!r}: set `signals` to get what it "
                "reads, or remove it",
                field=probe.path,
            )


def _probe_of(condition: gate_pb2.Condition, probes: Mapping[str, Probe], path: str) -> Probe:
    if condition.probe_name in probes:
        return probes[condition.probe_name]
    field = field_path(path, "probe_name")
    validation.text_bytes(condition.probe_name, ID_BYTES, field)
    if not probes:
        raise InvalidValue(
            f"the request has no probes, so none is named {condition.probe_name!r}: gates read the "
            "probes of a GenerateRequest; sweeps, lenses and calls that store runs are not gated",
            field=field,
        )
    names = ", ".join(map(repr, probes))
    raise InvalidValue(
        f"the request has no probe {condition.probe_name!r}; it has {names:.400}", field=field
    )


def _is_before(last: Site, first: Site, model: ModelSites) -> bool:
    """Whether the last site of a probe is before the first one at which an intervention acts.

    In a block whose branches run in parallel, neither `attn_out` nor `mlp_out` is before the other.
    """
    parallel = (
        Point.RESID_MID in model.refused
        and last.index // _PER_LAYER == first.index // _PER_LAYER
        and last.index % _PER_LAYER != 0
    )
    return last.index < first.index and not parallel


def placed_gate(
    gate: Gate,
    message: gate_pb2.Gate | monitor_pb2.Rule,
    sites: Sequence[Site],
    probes: Mapping[str, Probe],
    model: ModelSites,
    context: SelectionContext,
    path: str,
) -> Gate:
    """A gate that multiplies what acts at some sites; late if a probe is not read before them.

    Args:
        gate: how it is open, wherever it acts.
        message: the gate, or the rule that it belongs to.
        sites: the sites at which the intervention acts.
        probes: the probes of its request.
        model: the model's sites.
        context: the request.
        path: the message's path.

    Raises:
        GateOrder: a probe is read too late for the token that is read, and the gate acts there, or
            is not open or shut at each token.
    """
    first = min(sites, key=attrgetter("index"))
    for index, condition in enumerate(message.conditions):
        probe = probes[condition.probe_name]
        last = max(probe.sites, key=attrgetter("index"))
        if _is_before(last, first, model):
            continue
        problem = (
            f"the probe {probe.name!r} reads at {last.point.value} {last.layer}, which is not "
            f"before {first.point.value} {first.layer}, where the intervention acts"
        )
        advice = "read earlier sites, or act at later ones"
        field = field_path(path, f"conditions[{index}].probe_name")
        if gate.hold is Hold.TOKEN:
            raise GateOrder(
                f"{problem}, at the token that is read: {advice}; or hold it for later tokens",
                field=field,
            )
        late = gate._replace(late=context.prompt_len)
        if not late.recorded:
            return late
        if gate.form is not Form.STEP:
            raise GateOrder(
                f"{problem}. Such a gate is open or shut: use the form `step`, or decide once by "
                f"the prompt (after_prompt); or {advice}",
                field=field,
            )
        return late._replace(end=context.row_end)
    return gate


def _condition(
    message: gate_pb2.Condition, probe: Probe, context: SelectionContext, path: str
) -> GateCondition:
    pool, combine = Pool.LAST, Combine.ANY
    if message.HasField("pool"):
        pool = _enum(message.pool, _POOL, field_path(path, "pool"))
    if message.HasField("combine_sites"):
        combine = _enum(message.combine_sites, _COMBINE, field_path(path, "combine_sites"))
    for_tokens = 1
    bounded = [field.name for field, _ in message.ListFields() if field.name in _BOUNDS]
    if combine is Combine.SUM and bounded:
        raise InvalidValue(
            "COMBINE_SUM takes the values as they are: leave this out, and give the gate a form "
            "with a threshold",
            field=field_path(path, bounded[0]),
        )
    above = validation.optional_number(message, "above", path, -math.inf)
    below = validation.optional_number(message, "below", path, math.inf)
    if message.HasField("for_tokens"):
        for_tokens = _tokens(message.for_tokens, field_path(path, "for_tokens"))
        if probe.reads_once and for_tokens > 1:
            raise InvalidValue(
                f"the probe {probe.name!r} reads one number, of the mean of a prompt's rows",
                field=field_path(path, "for_tokens"),
            )
    if combine is not Combine.SUM and not {"above", "below"}.intersection(bounded):
        raise MissingField("at least one of above and below is required", field=path)
    if above >= below:
        raise InvalidValue(
            f"no value is above {above:g} and below {below:g}", field=field_path(path, "below")
        )
    return GateCondition(
        probe.columns,
        pool,
        combine,
        above,
        below,
        for_tokens,
        decided_at=context.prompt_len - 1 if message.after_prompt else NEVER,
        stays_above=_stays(message, "above", path),
        stays_below=_stays(message, "below", path),
    )


def _stays(message: Message, bound: str, path: str) -> float | None:
    """The bound within which a condition that holds keeps holding; None if it is not given."""
    name = f"stays_{bound}"
    if not message.HasField(name):
        return None
    field = field_path(path, name)
    if not message.HasField(bound):
        raise InvalidValue(f"needs the bound `{bound}`", field=field)
    number, first = validation.finite(getattr(message, name), field), getattr(message, bound)
    side = "below" if bound == "above" else "above"
    if not (number < first if side == "below" else number > first):
        raise InvalidValue(f"must be {side} the bound `{bound}`, {first:g}", field=field)
    return number


def _form(message: gate_pb2.Gate, path: str, *, summed: bool) -> tuple[Form, float, float]:
    """The form of a gate, and its two numbers. `summed`: whether the evidence may be any number."""
    match message.WhichOneof("form"):
        case "sigmoid":
            sigmoid, path = message.sigmoid, field_path(path, "sigmoid")
            sharpness = _required_number(sigmoid, "sharpness", path)
            if not sharpness > 0:
                raise InvalidValue("must be above 0", field=field_path(path, "sharpness"))
            return Form.SIGMOID, _threshold(sigmoid, path, required=False), sharpness
        case "ramp":
            ramp, path = message.ramp, field_path(path, "ramp")
            low, high = (_required_number(ramp, name, path) for name in ("low", "high"))
            if not 0 < high - low <= _MOST:
                raise InvalidValue(
                    f"must be above low, which is {low:g}, by a number that float32 has",
                    field=field_path(path, "high"),
                )
            return Form.RAMP, low, high
        case _:
            path = field_path(path, "step")
            return Form.STEP, _threshold(message.step, path, required=summed), 0.0


_MOST = 3.4e38
"""Nearly the largest float32."""


def _threshold(
    message: gate_pb2.Step | gate_pb2.Sigmoid | monitor_pb2.Rule, path: str, *, required: bool
) -> float:
    field = field_path(path, "threshold")
    if message.HasField("threshold"):
        return validation.finite(message.threshold, field)
    if required:
        raise MissingField(
            "a sum (COMBINE_SUM) is any number, so say above which it counts: give a threshold; a "
            "gate may have the form sigmoid or ramp instead",
            field=field,
        )
    return 0.5


def _required_number(message: Message, name: str, path: str) -> float:
    field = field_path(path, name)
    if not message.HasField(name):
        raise MissingField("a number is required", field=field)
    return validation.finite(getattr(message, name), field)


def resolve_hold(message: gate_pb2.Gate | monitor_pb2.Rule, path: str, default: Hold) -> Held:
    """How long a gate stays open, or a rule acts.

    Raises:
        MissingField: the message says it in part.
        InvalidValue: the number of tokens is out of range.
    """
    if not message.HasField("hold"):
        return Held(default)
    path = field_path(path, "hold")
    options = "token, next_token, tokens, rest and until_read"
    kind = validation.required(message.hold.WhichOneof("kind"), path, options)
    if kind == "tokens":
        return Held(Hold.TOKENS, _tokens(message.hold.tokens, field_path(path, "tokens")))
    return Held(Hold[kind.upper()])


def _tokens(count: int, path: str) -> int:
    if not 1 <= count <= GATE_TOKENS:
        raise InvalidValue(f"must be 1 to {GATE_TOKENS}", field=path)
    return count


def _enum(value: Wire, known: Mapping[Wire, Own], path: str) -> Own:
    validation.known_enum(value, known, path)
    return known[value]
