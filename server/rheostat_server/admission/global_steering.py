"""Server-wide steering: a versioned policy of steering, rules, and probes for its gates and rules.

Invariants: it acts on every request, which cannot remove any part. It is replaced as a whole. It
names vectors by digest, and its vectors stay in the store and the workers until it is replaced. A
request keeps the version that it was admitted under. Its probes have names of their own, and the
first columns of readings.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rheostat_engine import ModelSites, Plan, Site
from rheostat_server.admission.planning import check_ranges, compile_plan
from rheostat_server.config import ModelInfo
from rheostat_server.engine.admission_queue import Reservation
from rheostat_server.engine.worker_vectors import WorkerVectorCache
from rheostat_server.errors import (
    GateOrder,
    InvalidValue,
    NotSupported,
    RheostatError,
    VersionConflict,
)
from rheostat_server.selectors.selection import SelectionContext, resolve_where, typical_context
from rheostat_server.steering.estimates import PromptWork, estimate_parts
from rheostat_server.steering.gates import gate_probe_names, refuse_unused_probes, resolve_gate
from rheostat_server.steering.interventions import (
    INTERVENTION_PATH,
    Intervention,
    check_sums,
    resolve_steering,
)
from rheostat_server.steering.ops import ResolvedOp, vector_refs
from rheostat_server.steering.probes import Probe, resolve_probes
from rheostat_server.steering.rules import (
    Rule,
    check_rule_count,
    check_shared_gain,
    refuse_gained_sums,
    resolve_rule_steering,
    resolve_rules,
    steered_by,
    with_rule_gains,
)
from rheostat_server.tasks.offload import offload_plan
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import Vector, VectorView
from rheostat_server.vectors.token_directions import with_directions
from rheostat_wire.v1 import (
    receipt_pb2,
    steering_pb2,
    steering_service_pb2,
    types_pb2,
)

_LOG = logging.getLogger(__name__)

Fits = Callable[[Sequence[Reservation], int], None]
"""Raises ResourceExhausted if the engine, even empty, cannot hold plans for such a prompt."""


def _no_policy() -> steering_service_pb2.Policy:
    return steering_service_pb2.Policy(steering=steering_pb2.Steering())


@dataclass(frozen=True, slots=True)
class GlobalSteering:
    """One version of the server-wide steering."""

    version: int = 0
    """0 at startup, or the version of the policy file; incremented by each change."""
    policy: steering_service_pb2.Policy = field(default_factory=_no_policy)
    """The message, with digests and the layers of rows in place of names and inline vectors."""
    ops: tuple[ResolvedOp, ...] = ()
    """One per intervention."""
    rule_ops: tuple[tuple[ResolvedOp, ...], ...] = ()
    """For each rule, one per intervention that it steers."""
    probes: tuple[Probe, ...] = ()
    """Its probes; the selections are those of a typical request."""
    sites: ModelSites | None = None
    """The model's sites, if it has gates."""
    set_time: float | None = None
    """Seconds since the epoch; None for version 0."""
    work: PromptWork = field(default_factory=PromptWork)
    """Bytes that `offload` counts for it in the admission of a request."""

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """Its vectors, each once."""
        vectors = [v for ops in (self.ops, *self.rule_ops) for op in ops for v in op.vectors]
        vectors += [probe.vector for probe in self.probes]
        return tuple({v.digest: v for v in vectors}.values())

    @property
    def empty(self) -> bool:
        """Whether it neither steers nor reads."""
        return not (self.ops or self.rule_ops or self.probes)

    @property
    def steerings(self) -> tuple[steering_pb2.Steering, ...]:
        """Its steering, and what its rules steer, where there is any."""
        every = (self.policy.steering, *(rule.steer for rule in self.policy.rules))
        return tuple(steering for steering in every if steering.interventions)

    @property
    def columns(self) -> int:
        """Columns of readings that its probes take in every request."""
        return sum(len(probe.sites) for probe in self.probes)

    def resolve(self, context: SelectionContext) -> "ServerWide":
        """Its interventions, probes and rules in a request."""
        server_wide = context.lenient_copy
        probes = {}
        for message, probe in zip(self.policy.probes, self.probes, strict=True):
            selection = resolve_where(message, server_wide, probe.path)
            column = probe.reading.column
            probes[probe.name] = probe.in_request(selection, context.prompt_len, column)
        interventions = []
        for index, (intervention, op) in enumerate(
            zip(self.policy.steering.interventions, self.ops, strict=True)
        ):
            path = f"{INTERVENTION_PATH}[{index}]"
            gate = None
            if intervention.HasField("gate") and self.sites is not None:
                gate = resolve_gate(intervention, op.sites, probes, self.sites, server_wide, path)
            selection = resolve_where(intervention, server_wide, path)
            names = gate_probe_names(intervention.gate)
            interventions.append(
                Intervention(
                    receipt_pb2.ORIGIN_GLOBAL, index, op, selection, gate, gate_probes=names
                )
            )
        resolved = resolve_rules(self.policy.rules, probes, server_wide)
        rules = tuple([rule._replace(policy=self.version) for rule in resolved])
        for number, (rule, ops) in enumerate(zip(rules, self.rule_ops, strict=True)):
            interventions += self._rule_steering(number, rule, ops, probes, server_wide)
        return ServerWide(tuple(interventions), tuple(probes.values()), rules)

    def with_gains(
        self, own: tuple[Intervention, ...], here: "ServerWide", context: SelectionContext
    ) -> tuple[Intervention, ...]:
        """A request's own steering, multiplied as the rules of the policy say.

        Args:
            own: the interventions of `GenerateRequest.steering`.
            here: the server-wide steering in the request.
            context: the request.

        Raises:
            NotSupported: a rule cannot multiply them. The request cannot run without the rule.
        """
        if self.sites is None or not own or not any(rule.gains for rule in here.rules):
            return own
        probes = {probe.name: probe for probe in here.probes}
        try:
            own = with_rule_gains(own, self.policy.rules, here.rules, probes, self.sites, context)
            refuse_gained_sums((*here.interventions, *own))
        except (InvalidValue, GateOrder, NotSupported) as error:
            raise NotSupported(
                "a rule of the server's policy multiplies the steering of every request, and "
                f"cannot multiply this one: {error.message}",
                field="steering",
            ) from error
        return own

    def _rule_steering(
        self,
        number: int,
        rule: Rule,
        ops: Sequence[ResolvedOp],
        probes: Mapping[str, Probe],
        context: SelectionContext,
    ) -> tuple[Intervention, ...]:
        """What a rule steers in a request."""
        message, path = self.policy.rules[number], f"rules[{number}]"
        assert self.sites is not None  # because rules have probes
        selections = [
            resolve_where(intervention, context, f"{path}.steer.interventions[{index}]")
            for index, intervention in enumerate(message.steer.interventions)
        ]
        steered = list(zip(ops, selections, strict=True))
        origin = receipt_pb2.ORIGIN_GLOBAL
        return steered_by(rule, message, path, steered, origin, probes, self.sites, context)


class ServerWide(NamedTuple):
    """The server-wide steering in a request."""

    interventions: tuple[Intervention, ...]
    probes: tuple[Probe, ...]
    rules: tuple[Rule, ...]


def name_policy_field(error: RheostatError) -> None:
    """Prefixes the field of an error, if it is one of a policy, with the field of the policy."""
    if error.field.startswith(("steering", "probes", "rules")):
        error.field = f"policy.{error.field}"


class GlobalSteeringState:
    """The current server-wide steering. Used on the event loop alone."""

    def __init__(
        self,
        info: ModelInfo,
        sites: ModelSites,
        loader: WorkerVectorCache,
        fits: Fits,
        on_change: Callable[[int], None],
    ) -> None:
        """No server-wide steering is set.

        Args:
            info: the model whose requests are steered.
            sites: the sites that may be steered.
            loader: sends vectors to the workers.
            fits: refuses plans that the engine can never hold.
            on_change: is called with each new version.
        """
        self.current = GlobalSteering()
        self._info = info
        self._sites = sites
        self._loader = loader
        self._fits = fits
        self._on_change = on_change
        self._turn = asyncio.Lock()
        self._from_file = ""
        """The policy of the file, in words; empty if the server has none."""

    async def start_with(
        self, policy: steering_service_pb2.Policy, version: int, path: str
    ) -> GlobalSteering:
        """Puts the policy of a file in force, before the server serves.

        Args:
            policy: the policy.
            version: its version, at least 1.
            path: the file, for the log.

        Raises:
            RheostatError: as `set`, without VersionConflict.
        """
        async with self._turn:
            after = await self._replace(policy, version)
            self._from_file = f"version {version} of --policy {path}"
            _LOG.info("server-wide steering: %s is in force", self._from_file)
            return after

    async def set(
        self, policy: steering_service_pb2.Policy, expected_version: int | None
    ) -> GlobalSteering:
        """Replaces the policy, for requests that are admitted from then on.

        Args:
            policy: the new policy.
            expected_version: the version to be replaced; None: any.

        Raises:
            VersionConflict: the current version is another.
            InvalidArgument, FailedPrecondition, NotFound: no request can be steered like this.
            ResourceExhausted: its vectors or its plan need too much memory.
            EngineLost: the engine is gone.
        """
        async with self._turn:
            before = self.current
            if expected_version is not None and expected_version != before.version:
                raise VersionConflict(
                    f"the steering has version {before.version}, not {expected_version}",
                    field="expected_version",
                    metadata={"version": str(before.version)},
                )
            after = await self._replace(policy, before.version + 1)
            if self._from_file:
                _LOG.warning(
                    "server-wide steering: version %d replaces %s, which a restart of the server "
                    "puts in force again",
                    after.version,
                    self._from_file,
                )
            return after

    async def _replace(self, policy: steering_service_pb2.Policy, version: int) -> GlobalSteering:
        """Puts a policy in force. Raises as `set`, without VersionConflict."""
        before = self.current
        checked = await self._check(policy)
        written = _spelled_out(policy, checked)
        after = replace(checked, version=version, policy=written, set_time=time.time())
        store = self._loader.store
        store.retain(after.vectors)
        unused = after.vectors
        try:
            await self._loader.ensure(after.vectors)
            unused, self.current = before.vectors, after
            self._on_change(version)
        finally:
            store.release(unused)
        _LOG.info(
            "server-wide steering: version %d, %d interventions, %d probes, %d rules",
            version,
            len(after.ops),
            len(after.probes),
            len(after.rule_ops),
        )
        return after

    async def _check(self, policy: steering_service_pb2.Policy) -> GlobalSteering:
        """A policy that is not in force, after all checks in the context of a typical request."""
        check_rule_count(policy.rules)
        if (policy.probes or policy.rules) and self._info.no_gates:
            field = "probes" if policy.probes else "rules"
            raise NotSupported(self._info.no_gates, field=field)
        check_ranges(policy.steering, probes=policy.probes, rules=policy.rules)
        _refuse_signals(policy)
        _check_gains(policy)
        context, vectors = typical_context(self._info), self._loader.store.view()
        work = PromptWork.of(lambda length: estimate_parts(policy, length, self._sites, vectors))
        size = work.at(context.prompt_len)
        checked, plan = await with_directions(
            self._loader.store.directions,
            policy,
            lambda: offload_plan(size, self._compile, policy, context, vectors),
        )
        self._fits([Reservation(plan)], context.prompt_len)
        return replace(checked, work=work)

    def _compile(
        self,
        policy: steering_service_pb2.Policy,
        context: SelectionContext,
        vectors: VectorView,
    ) -> tuple[GlobalSteering, Plan]:
        probes = resolve_probes(policy.probes, self._sites, context, vectors)
        interventions = resolve_steering(
            policy.steering,
            self._sites,
            context,
            vectors,
            receipt_pb2.ORIGIN_REQUEST,
            probes=probes,
        )
        rules = resolve_rules(policy.rules, probes, context)
        steered = resolve_rule_steering(
            policy.rules, rules, probes, self._sites, context, vectors, None
        )
        gates = [
            *(intervention.gate for intervention in interventions),
            *(rule.gate for rule in rules),
        ]
        refuse_unused_probes(probes, gates)
        every = (*interventions, *steered)
        check_sums(every, FloatType(self._sites.dtype))
        checked = GlobalSteering(
            ops=tuple(intervention.op for intervention in interventions),
            rule_ops=tuple(
                tuple(intervention.op for intervention in steered if intervention.rule == rule.name)
                for rule in rules
            ),
            probes=tuple(probes.values()),
            sites=self._sites if probes else None,
        )
        plan = compile_plan("server-wide", every, (), checked.probes, rules).plan
        return checked, plan


def _refuse_signals(policy: steering_service_pb2.Policy) -> None:
    """Refuses signals, because they would go to clients that have not asked for them."""
    fields = [f"probes[{i}].signals" for i, probe in enumerate(policy.probes) if probe.signals]
    fields += [
        f"{INTERVENTION_PATH}[{index}].gate.signals"
        for index, intervention in enumerate(policy.steering.interventions)
        if intervention.HasField("gate") and intervention.gate.signals
    ]
    if fields:
        raise NotSupported("signals of the server-wide steering are not sent", field=fields[0])


def _check_gains(policy: steering_service_pb2.Policy) -> None:
    """Checks the gains of rules, which multiply all own steering of every request."""
    for number, rule in enumerate(policy.rules):
        check_shared_gain(rule, f"rules[{number}]")
        if rule.gain.interventions:
            raise InvalidValue(
                "a rule of the server multiplies all steering of a request, because requests "
                "differ: name no interventions",
                field=f"rules[{number}].gain.interventions",
            )


def _spelled_out(
    policy: steering_service_pb2.Policy, checked: GlobalSteering
) -> steering_service_pb2.Policy:
    """The policy with digests in place of names, and with an end for every range of layers."""
    written = steering_service_pb2.Policy()
    written.CopyFrom(policy)
    written.steering.SetInParent()
    for message, probe in zip(written.probes, checked.probes, strict=True):
        _end_layers(message.sites, probe.sites)
        message.read.vector.digest = probe.vector.digest
        if probe.row_layers:  # as below
            message.read.vector.row_layers.layers[:] = probe.row_layers
    _spell_out_steering(written.steering, checked.ops)
    for rule, ops in zip(written.rules, checked.rule_ops, strict=True):
        _spell_out_steering(rule.steer, ops)
    return written


def _spell_out_steering(message: steering_pb2.Steering, ops: Sequence[ResolvedOp]) -> None:
    for intervention, op in zip(message.interventions, ops, strict=True):
        _end_layers(intervention.sites, op.sites)
        refs = [ref for _, ref in vector_refs(intervention)]
        # A mask, or a Replace by zeros, has a vector without a reference.
        for ref, vector, row_layers in zip(refs, op.vectors, op.row_layers, strict=False):
            if ref is not None:
                ref.digest = vector.digest
                if row_layers:  # a name has them, a digest does not
                    ref.row_layers.layers[:] = row_layers


def _end_layers(message: types_pb2.SiteSet, sites: Sequence[Site]) -> None:
    if message.HasField("range") and not message.range.HasField("stop"):
        message.range.stop = 1 + max(site.layer for site in sites)
