"""Resolves steering to interventions, of which acts for the engine are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from rheostat_engine import Act, Gate, ModelSites, Site
from rheostat_engine.cached_property import cached_property
from rheostat_server import validation
from rheostat_server.errors import InvalidValue, NonFinite, NotSupported
from rheostat_server.limits import INTERVENTIONS
from rheostat_server.runs.store import RunStore
from rheostat_server.selectors.selection import Selection, SelectionContext, resolve_where
from rheostat_server.selectors.sites import write_site
from rheostat_server.steering.directions import check_directions
from rheostat_server.steering.gates import gate_probe_names, placed_gate, resolve_gate
from rheostat_server.steering.ops import SERVED, ResolvedOp, resolve_op, vector_refs
from rheostat_server.steering.probes import Probe, stream_sites
from rheostat_server.steering.replacements import OpContext
from rheostat_server.tensors import FloatType
from rheostat_server.validation import field_path
from rheostat_server.vectors.store import VectorView
from rheostat_wire.v1 import monitor_pb2, receipt_pb2, steering_pb2

INTERVENTION_PATH = "steering.interventions"

_EXACT = 16
"""Additions with more spans are checked as if they had one span."""


@dataclass(frozen=True)
class Intervention:
    """A resolved intervention of the server-wide steering, a request or an update."""

    origin: receipt_pb2.Origin.ValueType
    index: int
    """Index in the list of its origin."""
    op: ResolvedOp
    selection: Selection
    gate: Gate | None = None
    """Multiplies its effect; None: 1."""
    rule: str = ""
    """The name of the rule that it belongs to: of `ORIGIN_RULE`, or a server-wide rule."""
    gained_by: str = ""
    """The path of the rule whose gain its gate is; empty: its gate is no gain."""
    signals: bool = False
    """Whether the client gets how far the gate is open."""
    update_id: int = 0
    """The update of a session or of a watch that brought it; 0: none did."""
    watch_id: str = ""
    """The watch that brought it; empty: none did."""
    gate_probes: tuple[str, ...] = ()
    """The names of the probes of its own gate, each once; empty: it has none."""

    @property
    def source(self) -> tuple[str, int]:
        """The watch and the update that brought it; ("", 0): the request itself, or the server."""
        return self.watch_id, self.update_id

    @property
    def own(self) -> bool:
        """Whether it belongs to the request's own steering."""
        return self.origin in (receipt_pb2.ORIGIN_REQUEST, receipt_pb2.ORIGIN_UPDATE)

    @property
    def largest_gain(self) -> float:
        """By what the gain of a rule multiplies it at most; 1 if no rule has one."""
        return max(1.0, self.gate.factor) if self.gate is not None and self.gained_by else 1.0

    @cached_property
    def acts(self) -> tuple[Act, ...]:
        """The acts for the engine; none if it would not change a bit."""
        acts = self.op.acts(self.selection)
        if self.gate is None:
            return acts
        return tuple(replace(act, gate=self.gate) for act in acts)

    def with_gate(self, gate: Gate) -> "Intervention":
        """A copy under another gate, which reads the same probes."""
        other = replace(self, gate=gate)
        # Neither the sites nor the receipt depend on the gate.
        other.__dict__.update(
            acts=tuple([act.with_gate(gate) for act in self.acts]),
            acting_sites=self.acting_sites,
            site_indices=self.site_indices,
            site_fields=self.site_fields,
            receipt=self.receipt,
            receipt_heads=self.receipt_heads,
        )
        return other

    @cached_property
    def acting_sites(self) -> frozenset[int]:
        """The indices of the sites at which its acts change something."""
        return frozenset(site for act in self.acts[:1] for site, _ in act.rows)

    @cached_property
    def site_indices(self) -> tuple[int, ...]:
        """The index of each of its sites, in their order."""
        return tuple(site.index for site in self.op.sites)

    @cached_property
    def site_fields(self) -> tuple[bytes, ...]:
        """The name of each of its sites as the only field of an `AppliedSite`, serialized."""
        fields = []
        for site in self.op.sites:
            message = receipt_pb2.AppliedSite()
            write_site(message.site, site)
            fields.append(message.SerializeToString())
        return tuple(fields)

    @cached_property
    def receipt_heads(self) -> dict[int, tuple[bytes, ...]]:
        """Parts of receipts that `generation.receipts` keeps here, by the number of rows."""
        return {}

    @cached_property
    def receipt(self) -> bytes:
        """All that receipts of any request report of it, but its sites: a serialized message."""
        message = receipt_pb2.AppliedIntervention(
            intervention=self.ref, digests=[vector.digest for vector in self.op.vectors]
        )
        if self.op.replacement is not None:
            self.op.replacement.write_source(message.source)
        return message.SerializeToString()

    @property
    def ref(self) -> receipt_pb2.InterventionRef:
        """The reference to it in receipts."""
        return receipt_pb2.InterventionRef(
            origin=self.origin,
            index=self.index,
            op=self.op.op,
            update_id=self.update_id,
            rule_name=self.rule,
            watch_id=self.watch_id,
            gate_probe_names=self.gate_probes,
        )


class RuleSteering(NamedTuple):
    """The rule to which a steering belongs."""

    name: str
    path: str
    """The path of the rule."""
    message: monitor_pb2.Rule
    gate: Gate
    """Open as long as the rule acts, wherever it acts."""


def resolve_steering(
    steering: steering_pb2.Steering,
    model: ModelSites,
    context: SelectionContext,
    vectors: VectorView,
    origin: receipt_pb2.Origin.ValueType,
    runs: RunStore | None = None,
    probes: Mapping[str, Probe] | None = None,
    rule: RuleSteering | None = None,
) -> tuple[Intervention, ...]:
    """Resolves a steering. Each intervention is checked alone; see `check_sums` for their sums.

    Args:
        steering: the message.
        model: the model's sites.
        context: what selectors are resolved against; with the prompt's text if one looks for text.
        vectors: where vectors are looked up.
        origin: the origin of the interventions.
        runs: the stored runs. None: they cannot be used here.
        probes: the probes of the request, by name. None: gates cannot be used here.
        rule: the rule that it belongs to, whose gates its interventions have; None: to none.

    Raises:
        InvalidArgument: something is malformed.
        FailedPrecondition: something is not served, or a run lacks rows.
        NotFound: a vector is not stored, a name not known, or there is no such run.
        MessageTooLarge: an inline vector is too large.
    """
    path = INTERVENTION_PATH
    if rule is not None:
        path = field_path(rule.path, "steer.interventions")
    validation.check_count(len(steering.interventions), INTERVENTIONS, path, "interventions")
    found: list[Intervention] = []
    for index, message in enumerate(steering.interventions):
        here = f"{path}[{index}]"
        validation.required(message.WhichOneof("op"), here, ", ".join(SERVED))
        _check_gated(message, here, probes, rule)
        sites = stream_sites(message, model, here)
        selection = resolve_where(message, context, here)
        op = resolve_op(message, OpContext(sites, selection, context, model, vectors, runs), here)
        check_directions(op, [field_path(op.path, where) for where, _ in vector_refs(message)])
        gate = None
        if rule is not None:
            assert probes is not None  # a rule has conditions, which read probes
            gate = placed_gate(rule.gate, rule.message, op.sites, probes, model, context, rule.path)
        elif message.HasField("gate"):
            assert probes is not None  # see `_check_gated`
            gate = resolve_gate(message, op.sites, probes, model, context, here)
        found.append(
            Intervention(
                origin,
                index,
                op,
                selection,
                gate,
                "" if rule is None else rule.name,
                signals=message.gate.signals,
                gate_probes=gate_probe_names(message.gate),
            )
        )
    return tuple(found)


def check_sums(interventions: Sequence[Intervention], kind: FloatType) -> None:
    """Refuses additions whose sum could overflow the model's dtype.

    Additions to different tokens are not summed. An addition of more than `_EXACT` spans counts as
    if it selected every position from its first to its last.

    Raises:
        NonFinite: a sum could overflow. The error names the addition that exceeds the range.
    """
    adding: dict[int, list[_Addend]] = {}
    for number, intervention in enumerate(interventions):
        op = intervention.op
        if op.op == receipt_pb2.OP_ADD:
            (vector,) = op.vectors
            for site, (row,) in zip(op.sites, op.rows, strict=True):
                peak = abs(op.scale) * vector.peaks[row] * intervention.largest_gain
                addend = _Addend(number, intervention, site, peak)
                adding.setdefault(site.index, []).append(addend)
    largest = kind.largest
    excesses = [
        _excess(addends, largest) for addends in adding.values() if not _sum(addends) < largest
    ]
    if not any(excesses):
        return
    addends = min(filter(None, excesses), key=lambda addends: addends[-1].number)
    last = addends[-1]
    included = ""
    if last.own and not all(addend.own for addend in addends):
        included = " (server-wide steering included)"
    raise NonFinite(
        f"the additions at {last.site.point.value} {last.site.layer} reach {_sum(addends):.4g}"
        f"{included}, which is not finite in the model's {kind.value}",
        field=field_path(last.intervention.op.path, "scale"),
    )


class _Addend(NamedTuple):
    """An addition at a site."""

    number: int
    """Index of the intervention."""
    intervention: Intervention
    site: Site
    peak: float
    """The largest magnitude that it adds."""

    @property
    def own(self) -> bool:
        """Whether it belongs to the request, not to the server-wide steering."""
        return self.intervention.origin != receipt_pb2.ORIGIN_GLOBAL


def _sum(addends: Sequence[_Addend]) -> float:
    return sum(addend.peak for addend in addends)


def _excess(addends: Sequence[_Addend], largest: float) -> list[_Addend]:
    """The first additions, in order, whose sum at some position reaches `largest`."""
    edges: list[tuple[int, bool, _Addend]] = []
    for addend in addends:
        reach = addend.intervention.selection.reach
        if len(reach) > _EXACT:
            reach = ((reach[0][0], reach[-1][1]),)
        for start, end in reach:
            edges += [(end, False, addend), (start, True, addend)]
    active: dict[int, _Addend] = {}
    total = 0.0
    for _, begins, addend in sorted(edges, key=itemgetter(0, 1)):
        if not begins:
            total -= active.pop(addend.number).peak
            continue
        active[addend.number] = addend
        total += addend.peak
        if not total < largest:
            in_order = [active[number] for number in sorted(active)]
            sums = accumulate(addend.peak for addend in in_order)
            below = sum(1 for partial in sums if partial < largest)
            return in_order[: below + 1]
    return []


def _check_gated(
    intervention: steering_pb2.Intervention,
    path: str,
    probes: Mapping[str, Probe] | None,
    rule: RuleSteering | None,
) -> None:
    """Refuses a gate where there can be none; see `resolve_steering`."""
    if not intervention.HasField("gate"):
        return
    field = field_path(path, "gate")
    if rule is not None:
        raise InvalidValue(
            "what a rule steers has no gate of its own: the rule decides when it acts", field=field
        )
    if probes is None:
        raise NotSupported(
            "gates are served in the steering of a GenerateRequest and of the server alone: not in "
            "updates, or in the background of a sweep",
            field=field,
        )
