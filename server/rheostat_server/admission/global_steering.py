"""Server-wide steering: a versioned policy of steering and of probes for its gates.

Invariants: it acts on every request, which cannot shed any of it. It is replaced as a whole. It
names vectors by digest, and its vectors stay in the store and the workers until it is replaced. A
request keeps the version that it was admitted under. Its probes have names of their own, and the
first columns of readings.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rheostat_engine import ModelSites, Plan, Site
from rheostat_server.admission.planning import check_ranges, compile_plan
from rheostat_server.admission.request_work import probes_work, steering_work
from rheostat_server.config import ModelInfo
from rheostat_server.engine.admission_queue import Reservation
from rheostat_server.engine.worker_vectors import WorkerVectorCache
from rheostat_server.errors import NotSupported, VersionConflict
from rheostat_server.selectors.selection import (
    EVERYTHING,
    Selection,
    SelectionContext,
    resolve_selector,
    typical_context,
)
from rheostat_server.steering.gates import (
    Probe,
    refuse_unused_probes,
    resolve_gate,
    resolve_probes,
)
from rheostat_server.steering.interventions import (
    INTERVENTION_PATH,
    Intervention,
    check_sums,
    resolve_steering,
)
from rheostat_server.steering.ops import ResolvedOp, vector_refs
from rheostat_server.tasks.offload import offload
from rheostat_server.tensors import FloatType
from rheostat_server.validation import field_path
from rheostat_server.vectors.store import Vector, VectorView
from rheostat_server.vectors.token_directions import with_directions
from rheostat_wire.v1 import (
    gate_pb2,
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
    """0 at startup; incremented by each change."""
    policy: steering_service_pb2.Policy = field(default_factory=_no_policy)
    """The message, with digests and the layers of rows in place of names and inline vectors."""
    ops: tuple[ResolvedOp, ...] = ()
    """One per intervention."""
    probes: tuple[Probe, ...] = ()
    """Its probes; the selections are those of a typical request."""
    sites: ModelSites | None = None
    """The model's sites, if it has gates."""
    set_time: float | None = None
    """Seconds since the epoch; None for version 0."""

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """Its vectors, each once."""
        vectors = [v for op in self.ops for v in op.vectors]
        vectors += [probe.vector for probe in self.probes]
        return tuple({v.digest: v for v in vectors}.values())

    @property
    def steering(self) -> steering_pb2.Steering:
        """Its steering."""
        return self.policy.steering

    @property
    def columns(self) -> int:
        """Columns of readings that its probes take in every request."""
        return sum(len(probe.sites) for probe in self.probes)

    def resolve(self, context: SelectionContext) -> "ServerWide":
        """Its interventions and probes in a request."""
        server_wide = replace(context, lenient=True)
        probes = {
            probe.name: replace(probe, selection=_selection(one, server_wide, probe.path))
            for one, probe in zip(self.policy.probes, self.probes, strict=True)
        }
        interventions = []
        for index, (one, op) in enumerate(zip(self.steering.interventions, self.ops, strict=True)):
            path = f"{INTERVENTION_PATH}[{index}]"
            gate = None
            if one.HasField("gate") and self.sites is not None:
                gate = resolve_gate(one, op.sites, probes, self.sites, server_wide, path)
            selection = _selection(one, server_wide, path)
            interventions.append(
                Intervention(receipt_pb2.ORIGIN_GLOBAL, index, op, selection, gate)
            )
        return ServerWide(tuple(interventions), tuple(probes.values()))


class ServerWide(NamedTuple):
    """The server-wide steering in a request."""

    interventions: tuple[Intervention, ...]
    probes: tuple[Probe, ...]


def _selection(
    part: steering_pb2.Intervention | gate_pb2.Probe, context: SelectionContext, path: str
) -> Selection:
    if not part.HasField("where"):
        return EVERYTHING
    return resolve_selector(part.where, context, field_path(path, "where"))


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
            ops, probes = await self._check(policy)
            written = _spelled_out(policy, ops, probes)
            sites = self._sites if probes else None
            after = GlobalSteering(before.version + 1, written, ops, probes, sites, time.time())
            store = self._loader.store
            store.retain(after.vectors)
            unused = after.vectors
            try:
                await self._loader.ensure(after.vectors)
                unused, self.current = before.vectors, after
                self._on_change(after.version)
            finally:
                store.release(unused)
            _LOG.info(
                "server-wide steering: version %d, %d interventions, %d probes",
                after.version,
                len(ops),
                len(probes),
            )
            return after

    async def _check(
        self, policy: steering_service_pb2.Policy
    ) -> tuple[tuple[ResolvedOp, ...], tuple[Probe, ...]]:
        """The ops and probes of a policy, after all checks in the context of a typical request."""
        if policy.probes and self._info.no_gates:
            raise NotSupported(self._info.no_gates, field="probes")
        check_ranges(policy.steering, probes=policy.probes)
        _refuse_signals(policy)
        context, vectors = typical_context(self._info), self._loader.store.view()
        work = steering_work(policy.steering, context.prompt_len, self._sites, vectors)
        work += probes_work(policy.probes, context.prompt_len, self._sites)
        interventions, probes, plan = await with_directions(
            self._loader.store.directions,
            policy,
            lambda: offload(work, self._compile, policy, context, vectors),
        )
        self._fits([Reservation(plan)], context.prompt_len)
        return tuple(intervention.op for intervention in interventions), probes

    def _compile(
        self,
        policy: steering_service_pb2.Policy,
        context: SelectionContext,
        vectors: VectorView,
    ) -> tuple[tuple[Intervention, ...], tuple[Probe, ...], Plan]:
        probes = resolve_probes(policy.probes, self._sites, context, vectors)
        interventions = resolve_steering(
            policy.steering,
            self._sites,
            context,
            vectors,
            receipt_pb2.ORIGIN_REQUEST,
            probes=probes,
        )
        refuse_unused_probes(probes, [intervention.gate for intervention in interventions])
        check_sums(interventions, FloatType(self._sites.dtype))
        read = tuple(probes.values())
        return interventions, read, compile_plan("server-wide", interventions, (), read).plan


def _refuse_signals(policy: steering_service_pb2.Policy) -> None:
    """Refuses signals, because they would go to clients that have not asked for them."""
    fields = [f"probes[{i}].signals" for i, probe in enumerate(policy.probes) if probe.signals]
    fields += [
        f"{INTERVENTION_PATH}[{index}].gate.signals"
        for index, one in enumerate(policy.steering.interventions)
        if one.HasField("gate") and one.gate.signals
    ]
    if fields:
        raise NotSupported("signals of the server-wide steering are not sent", field=fields[0])


def _spelled_out(
    policy: steering_service_pb2.Policy, ops: Sequence[ResolvedOp], probes: Sequence[Probe]
) -> steering_service_pb2.Policy:
    """The policy with digests in place of names, and with an end for every range of layers."""
    written = steering_service_pb2.Policy()
    written.CopyFrom(policy)
    written.steering.SetInParent()
    for message, probe in zip(written.probes, probes, strict=True):
        _end_layers(message.sites, probe.sites)
        message.read.vector.digest = probe.vector.digest
        if probe.row_layers:  # as below
            message.read.vector.row_layers.layers[:] = probe.row_layers
    for intervention, op in zip(written.steering.interventions, ops, strict=True):
        _end_layers(intervention.sites, op.sites)
        refs = [ref for _, ref in vector_refs(intervention)]
        # A mask, or a Replace by zeros, has a vector without a reference.
        for ref, vector, row_layers in zip(refs, op.vectors, op.row_layers, strict=False):
            if ref is not None:
                ref.digest = vector.digest
                if row_layers:  # a name has them, a digest does not
                    ref.row_layers.layers[:] = row_layers
    return written


def _end_layers(message: types_pb2.SiteSet, sites: Sequence[Site]) -> None:
    if message.HasField("range") and not message.range.HasField("stop"):
        message.range.stop = 1 + max(site.layer for site in sites)
