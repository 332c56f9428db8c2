"""Server-wide steering: a versioned steering that acts on every request.

Invariants: it is replaced as a whole. It names vectors by digest, and its vectors stay in the store
and the workers until it is replaced. A request keeps the version that it was admitted under.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rheostat_engine import ModelSites, Plan
from rheostat_server.admission.planning import check_ranges, compile_plan
from rheostat_server.admission.request_work import steering_work
from rheostat_server.config import ModelInfo
from rheostat_server.engine.admission_queue import Reservation
from rheostat_server.engine.worker_vectors import WorkerVectorCache
from rheostat_server.errors import VersionConflict
from rheostat_server.selectors.selection import (
    EVERYTHING,
    SelectionContext,
    resolve_selector,
    typical_context,
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
from rheostat_server.vectors.store import Vector, VectorView
from rheostat_server.vectors.token_directions import with_directions
from rheostat_wire.v1 import receipt_pb2, steering_pb2

_LOG = logging.getLogger(__name__)

Fits = Callable[[Sequence[Reservation], int], None]
"""Raises ResourceExhausted if the engine, even empty, cannot hold plans for such a prompt."""


@dataclass(frozen=True, slots=True)
class GlobalSteering:
    """One version of the server-wide steering."""

    version: int = 0
    """0 at startup; incremented by each change."""
    steering: steering_pb2.Steering = field(default_factory=steering_pb2.Steering)
    """The message, with digests and the layers of rows in place of names and inline vectors."""
    ops: tuple[ResolvedOp, ...] = ()
    """One per intervention."""
    set_time: float | None = None
    """Seconds since the epoch; None for version 0."""

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """Its vectors, each once."""
        return tuple({v.digest: v for op in self.ops for v in op.vectors}.values())

    def resolve(self, context: SelectionContext) -> tuple[Intervention, ...]:
        """Its interventions in a request."""
        server_wide = replace(context, lenient=True)
        return tuple(
            Intervention(
                receipt_pb2.ORIGIN_GLOBAL,
                index,
                op,
                resolve_selector(one.where, server_wide, f"{INTERVENTION_PATH}[{index}].where")
                if one.HasField("where")
                else EVERYTHING,
            )
            for index, (one, op) in enumerate(
                zip(self.steering.interventions, self.ops, strict=True)
            )
        )


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
        self, steering: steering_pb2.Steering, expected_version: int | None
    ) -> GlobalSteering:
        """Replaces the steering, for requests that are admitted from then on.

        Args:
            steering: the new steering.
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
            ops = await self._check(steering)
            after = GlobalSteering(
                before.version + 1, _spelled_out(steering, ops), ops, time.time()
            )
            store = self._loader.store
            store.retain(after.vectors)
            unused = after.vectors
            try:
                await self._loader.ensure(after.vectors)
                unused, self.current = before.vectors, after
                self._on_change(after.version)
            finally:
                store.release(unused)
            _LOG.info("server-wide steering: version %d, %d interventions", after.version, len(ops))
            return after

    async def _check(self, steering: steering_pb2.Steering) -> tuple[ResolvedOp, ...]:
        """The ops of a steering, after all checks in the context of a typical request."""
        check_ranges(steering)
        context, vectors = typical_context(self._info), self._loader.store.view()
        work = steering_work(steering, context.prompt_len, self._sites, vectors)
        interventions, plan = await with_directions(
            self._loader.store.directions,
            steering,
            lambda: offload(work, self._compile, steering, context, vectors),
        )
        self._fits([Reservation(plan)], context.prompt_len)
        return tuple(intervention.op for intervention in interventions)

    def _compile(
        self, steering: steering_pb2.Steering, context: SelectionContext, vectors: VectorView
    ) -> tuple[tuple[Intervention, ...], Plan]:
        origin = receipt_pb2.ORIGIN_REQUEST
        interventions = resolve_steering(steering, self._sites, context, vectors, origin)
        check_sums(interventions, FloatType(self._sites.dtype))
        return interventions, compile_plan("server-wide", interventions, ()).plan


def _spelled_out(
    steering: steering_pb2.Steering, ops: Sequence[ResolvedOp]
) -> steering_pb2.Steering:
    """The steering with digests in place of names, and with an end for every range of layers."""
    written = steering_pb2.Steering()
    written.CopyFrom(steering)
    for intervention, op in zip(written.interventions, ops, strict=True):
        layers = intervention.sites.range
        if intervention.sites.HasField("range") and not layers.HasField("stop"):
            layers.stop = 1 + max(site.layer for site in op.sites)
        refs = [ref for _, ref in vector_refs(intervention)]
        # A mask, or a Replace by zeros, has a vector without a reference.
        for ref, vector, row_layers in zip(refs, op.vectors, op.row_layers, strict=False):
            if ref is not None:
                ref.digest = vector.digest
                if row_layers:  # a name has them, a digest does not
                    ref.row_layers.layers[:] = row_layers
    return written
