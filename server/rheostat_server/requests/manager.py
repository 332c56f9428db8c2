"""Runs requests: reserves what they need, routes the engine's events to them, and releases all.

Invariants: everything that a request reserves (its id, vectors, bank rows, slots) is released
exactly once, and only after the engine has released the request. Once the engine is lost, every
active request ends, and no request is admitted. Only this class changes its maps.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from rheostat_engine import (
    CapacityLedger,
    ControllerDisabled,
    Dropped,
    Event,
    Installed,
    Plan,
    Released,
    Rows,
    SignalRows,
)
from rheostat_server.admission.admit import AdmissionContext
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.admission.compiled_requests import CompiledRequests
from rheostat_server.admission.global_steering import GlobalSteeringState
from rheostat_server.admission.planning import compile_watch
from rheostat_server.admission.waiting import check_queue
from rheostat_server.config import ServerConfig
from rheostat_server.delivery.byte_budget import Budget, Share
from rheostat_server.delivery.counts import Counts, Drained
from rheostat_server.delivery.delivery_buffer import Deliveries
from rheostat_server.delivery.spill_directory import SpillDirectory
from rheostat_server.delivery.spill_manager import SpillManager
from rheostat_server.engine.admission_queue import AdmissionQueue, Reservation
from rheostat_server.engine.backend import Backend
from rheostat_server.engine.gain_updates import GainUpdates
from rheostat_server.engine.held_samples import HeldSamples
from rheostat_server.engine.pace import Pace
from rheostat_server.engine.persistent_vectors import PersistentVectorStore
from rheostat_server.engine.preparations import Preparations
from rheostat_server.engine.steering_updates import SteeringUpdates
from rheostat_server.engine.worker_vectors import WorkerVectorCache
from rheostat_server.errors import (
    BankFull,
    CacheSuspect,
    Defect,
    Draining,
    DuplicateRequest,
    EngineLost,
    Resource,
    RheostatError,
)
from rheostat_server.limits import RETRY_SECONDS, STATS_SECONDS
from rheostat_server.monitors.opening import WatchContext
from rheostat_server.monitors.parts import begin_watches
from rheostat_server.monitors.registry import Watches
from rheostat_server.prompts.prompts import Prompts
from rheostat_server.requests.active_request import ActiveRequest
from rheostat_server.requests.late_attachment import LateAttachment
from rheostat_server.requests.open_outputs import open_outputs
from rheostat_server.requests.policy_audit import PolicyAudit
from rheostat_server.requests.sequence import RELEASE_GRACE, EngineSequence, until_released
from rheostat_server.requests.signal_delivery import SignalDelivery
from rheostat_server.requests.steering_control import SteeringControl
from rheostat_server.requests.watched_requests import WatchedRequests
from rheostat_server.runs.store import RunStore
from rheostat_server.selectors.selection import typical_context
from rheostat_server.sinks.registry import Sinks
from rheostat_server.steering.controlled import Controllers
from rheostat_server.subscriptions.registry import Subscriptions
from rheostat_server.tasks.futures import keep
from rheostat_server.tasks.shared_query import SharedQuery
from rheostat_server.tasks.turns import Turns
from rheostat_server.vectors.store import Vector

_LOG = logging.getLogger(__name__)

_DISCARD_GRACE = 1.0
"""Seconds that a refused request waits for its sinks to discard it."""

_LAST_READS = 5.0
"""Seconds that clients get to read the end of requests that were aborted."""

_UNHANDLED = "the server could not handle what the request's probes have read"

_WAKE_TURNS = 8
"""The most readers of responses that wake in an iteration of the event loop. Each takes about
0.1 ms to send a token, and other work of the loop, such as gains, waits for all of them."""

_ROWS_TURNS = 8
"""The most requests that send rows in an iteration of the event loop. It is one while readers wait
for their turns. Tokens of the engine, which come between two iterations, wait for these rows. Rows
of 36 layers take as long as ten tokens."""

_ENDING = "the server is shutting down; it admits no more requests"


class RequestManager:
    """A running engine and its requests. Used on the event loop alone."""

    def __init__(
        self,
        backend: Backend,
        prompts: Prompts,
        config: ServerConfig,
        sinks: Sinks,
        spool: SpillDirectory | None,
    ) -> None:
        """Makes a manager without requests; see `start`."""
        self.sinks = sinks
        self.runs = RunStore(config.runs_bytes)
        self.deliveries = Deliveries()
        self.backend = backend
        self.info = backend.info
        step_tokens = self.info.step_tokens
        ring = config.ring_bytes(step_tokens)
        limit = config.request_limit_bytes(step_tokens)
        self.budget = Budget(config.buffers_bytes, limit, slack=ring)
        self.spill_manager = SpillManager(spool, ring) if spool is not None else None
        self.sites = backend.sites
        self.prompts = prompts
        self.worker_vectors = WorkerVectorCache(backend, config.vector_store_bytes)
        self.store = self.worker_vectors.store
        self.persistent_vectors = PersistentVectorStore(self.store)
        self._compiled = CompiledRequests(self.store)
        self.counts = Counts()
        self.lost = ""
        self.draining = False
        self.admission_queue = AdmissionQueue(
            self.sites.capacity,
            step_tokens=self.info.step_tokens,
            timeout=config.capacity_wait,
        )
        self.preparations = Preparations(backend, self.admission_queue)
        self.steering_updates = SteeringUpdates(backend)
        self.gain_updates = GainUpdates(backend)
        self._held_samples = HeldSamples(backend)
        self._audit = PolicyAudit()
        self.server_wide = GlobalSteeringState(
            self.info,
            self.sites,
            self.worker_vectors,
            self.admission_queue.check_ever_fits,
            self._compiled.set_version,
        )
        self.subscriptions = Subscriptions(
            self.info,
            self.sites,
            self.worker_vectors,
            buffer_bytes=config.subscriptions_bytes,
            resume_window=config.resume_window,
            heartbeat=config.heartbeat,
            deliveries=self.deliveries,
            spill_manager=self.spill_manager,
        )
        self.watches = Watches(
            WatchContext(
                self.sites,
                typical_context(self.info),
                self.store,
                self.info.no_gates,
                compile_watch,
                self._check_watch_fits,
            ),
            self.worker_vectors,
            self.subscriptions,
            resume_window=config.resume_window,
            heartbeat=config.heartbeat,
        )
        self.epoch = 0
        """Part of the cache keys of every plan. Incremented when cached blocks may be wrong."""
        self.config = config
        self.worker_stats = SharedQuery(backend.worker_stats, keep=STATS_SECONDS)
        self._active_requests: dict[str, ActiveRequest] = {}
        self.watched = WatchedRequests(self.watches, self._active_requests, self.gain_updates)
        self._pace = Pace()
        self._wake_turns = Turns(_WAKE_TURNS)
        self._row_turns = Turns(_ROWS_TURNS, after=self._wake_turns)
        self._foreground = 0
        """Number of active requests that are not in the background."""
        self._clients = 0
        """Number of active requests for whose tokens a client may wait."""
        self._samples = 0
        """Number of samples of all requests and their baselines."""
        self._prompt_tokens = 0
        """Prompt tokens of these samples, with one prompt for each sample."""
        self._routes: dict[str, tuple[ActiveRequest, EngineSequence]] = {}
        self._signal_delivery = SignalDelivery(self._routes)
        self.controllers = Controllers(config.controllers)
        self._admission = AdmissionContext(
            self.info,
            self.sites,
            self.prompts,
            self.store,
            self.server_wide.current,
            self.subscriptions,
            self.watches,
            self.sinks,
            self.spill_manager is not None,
            self.runs,
            self._compiled,
            self.controllers,
        )
        self.late_attachment = LateAttachment(
            backend,
            self.sites,
            self.subscriptions,
            self.admission_queue,
            self._active_requests,
            self._routes,
            self._add_route,
        )
        self._empty = asyncio.Event()
        """Set while no request is active."""
        self._empty.set()
        self._settling: set[asyncio.Task[None]] = set()
        self._on_lost: Callable[[], None] = lambda: None

    @property
    def admission(self) -> AdmissionContext:
        """Everything that requests are checked against."""
        current = self.server_wide.current
        if self._admission.server_wide is not current:
            self._admission = replace(self._admission, server_wide=current)
        return self._admission

    @property
    def ledger(self) -> CapacityLedger:
        """The engine's capacity that requests have reserved."""
        return self.admission_queue.ledger

    @property
    def open_requests(self) -> int:
        """Number of requests that have not released everything."""
        return len(self._active_requests)

    @property
    def foreground_requests(self) -> int:
        """Number of open requests that are not in the background."""
        return self._foreground

    @property
    def client_requests(self) -> int:
        """Number of open requests for whose tokens a client may wait."""
        return self._clients

    def _check_watch_fits(self, plan: Plan) -> None:
        prompt_len = typical_context(self.info).prompt_len
        self.admission_queue.check_ever_fits([Reservation(plan)], prompt_len)
        sums = plan.packed_acts.row_sums
        most = max(1, self.sites.capacity.row_sums // self.info.running_samples)
        if sums > most:
            raise BankFull(
                f"the watch reads {sums} numbers of mean rows; at most {most}, because each takes "
                "a sum of rows of every sample that runs: read means at fewer sites",
                field="open.probes",
            )

    def start(self, on_lost: Callable[[], None]) -> None:
        """Receives events from the backend. If the engine dies, `on_lost` is called once."""
        self._on_lost = on_lost
        self.backend.start(self._deliver, self._on_engine_lost)

    @asynccontextmanager
    async def run_request(self, admitted: AdmittedRequest) -> AsyncIterator[ActiveRequest]:
        """Runs a request for as long as the context lasts. Leaving the context early aborts it.

        Raises:
            Draining, EngineLost: the server admits no more requests.
            DuplicateRequest: an active request has this id.
            QueueFull, BankFull, CaptureOverflow, StoreFull: the request needs too much.
            WatchLost: a watch that had to read it was lost.
        """
        self._check_open(admitted)
        self.watched.announce_late(admitted)
        active = self._make_active(admitted, self.budget.share())
        if admitted.changeable:
            active.control = SteeringControl(active, self)
        self._active_requests[admitted.request_id] = active
        self._empty.clear()
        self._foreground += not admitted.background
        self._clients += admitted.of_client
        self._count(active, len(active.sequences))
        try:
            await self._prepare(active)
            active.watched = begin_watches(
                admitted.watch_parts,
                admitted.request_id,
                admitted.labels,
                admitted.sampling.samples,
                admitted.prompt_len,
            )
            await self.watched.until_not_held(active)
            for part in admitted.watch_parts:
                part.watch.check_not_lost()
        except BaseException as error:
            await self._discard(active, error)
            raise
        try:
            self.counts.admitted += 1
            await active.start(self.backend, epoch=self.epoch)
            yield active
        except Exception:
            active.failed = True
            raise
        finally:
            self.counts.end(completed=active.completed and not active.aborted, failed=active.failed)
            active.close()
            active.queue.close()
            if active.settled:
                self._remove(active)
            else:
                keep(self._settling, self._settle(active))

    def new_bank_row_count(self, admitted: AdmittedRequest) -> int:
        """Bank rows that a request, without its baseline, needs beyond those that are reserved.

        Raises:
            BankFull, CaptureOverflow: the engine could not run it even if it were empty.
        """
        active = self._make_active(admitted, Share(0, ""))
        active.unobserve()
        self.admission_queue.check_ever_fits(active.reservations, admitted.prompt_len)
        return self.ledger.additional_needs(admitted.plan)["bank_rows"]

    async def pin_vectors(self, active: ActiveRequest, vectors: Sequence[Vector]) -> None:
        """Pins vectors until a request ends. Returns once the workers have them.

        Raises:
            StoreFull: pinned and named vectors leave too little memory for them.
            EngineLost: the engine is gone.
        """
        pinned = self.store.pin(*vectors)
        try:
            await self.worker_vectors.ensure(vectors)
        except BaseException:
            self.store.unpin(pinned)
            raise
        active.pinned += pinned

    def add_sequence(self, active: ActiveRequest, sequence: EngineSequence) -> None:
        """Starts one more sequence of a request. The request has reserved all that it needs."""
        active.sequences.append(sequence)
        self._count(active, 1)
        if sequence.job.has_plan:
            self._add_route(active, sequence)
        active.start_later(self.backend, sequence, epoch=self.epoch)

    def release_engine(self, active: ActiveRequest) -> None:
        """Releases the engine's capacity if the engine has released all sequences.

        Sinks of the request may still be writing.
        """
        if all(sequence.released.is_set() for sequence in active.sequences):
            self._release(active)

    async def drain(self, timeout: float | None) -> Drained:
        """Admits no more requests, and waits for the active ones. Aborts them after `timeout`."""
        self.draining = True
        self.admission_queue.close(Draining(_ENDING))
        try:
            return await self._drained(timeout)
        finally:
            self._audit.flush()
            self.subscriptions.end(
                Draining("the server has ended, and the subscription with it: open another")
            )
            self.watches.end(Draining("the server has ended, and the watch with it: open another"))

    async def _drained(self, timeout: float | None) -> Drained:
        running = len(self._active_requests)
        _LOG.info("draining, %d requests are active", running)
        if await self._empty_within(timeout):
            return Drained(running, 0)
        aborted = list(self._active_requests.values())
        for active in aborted:
            active.abort()
        _LOG.info("drain: %d requests aborted", len(aborted))
        if not await self._empty_within(_LAST_READS):
            for active in aborted:
                active.interrupt(Draining(_ENDING))
            if not await self._empty_within(RELEASE_GRACE):
                _LOG.warning("drain: %d requests never ended", len(self._active_requests))
        return Drained(max(0, running - len(aborted)), len(aborted))

    def _make_active(self, admitted: AdmittedRequest, share: Share) -> ActiveRequest:
        return ActiveRequest(
            admitted,
            share,
            self._pace,
            self._wake_turns,
            self._row_turns,
            self._held_samples,
            self._audit,
        )

    async def _prepare(self, active: ActiveRequest) -> None:
        """Reserves all that a request needs, and opens the receivers of its rows."""
        admitted = active.admitted
        if admitted.vectors:
            await self.pin_vectors(active, admitted.vectors)
        self._check_serving()
        for reservation in await self._reserve(active):
            active.prepared.append(await self.preparations.prepare(reservation.plan))
        await self.late_attachment.catch_up(active)
        self._check_serving()
        if admitted.captures or admitted.observer_captures:
            await open_outputs(active, self)
        self._check_serving()

    async def _discard(self, active: ActiveRequest, error: BaseException) -> None:
        """Releases what a request that cannot start has reserved, before its client gets the error.

        The id of the request is released after its sinks have discarded it, which may take long.
        """
        active.failed = True
        active.close()
        active.queue.close()  # a watch may have ended samples that had not begun
        active.discard_outputs(
            error if isinstance(error, RheostatError) else Defect("the client went away")
        )
        self._release(active)
        await asyncio.wait({keep(self._settling, self._settle(active))}, timeout=_DISCARD_GRACE)

    def _check_open(self, admitted: AdmittedRequest) -> None:
        self._check_serving()
        request_id = admitted.request_id
        if request_id in self._active_requests:
            raise DuplicateRequest(
                "a running request has this id",
                field="request_id",
                resource=Resource("request", request_id),
            )
        check_queue(
            admitted,
            self.info.running_samples,
            samples=self._samples,
            prompt_tokens=self._prompt_tokens,
        )

    def _count(self, active: ActiveRequest, samples: int) -> None:
        """Counts more samples of a request, or fewer if the number is negative.

        Sums over all requests would make each admission as expensive as there are requests.
        """
        self._samples += samples
        self._prompt_tokens += samples * active.admitted.prompt_len

    def check_not_lost(self) -> None:
        """Raises EngineLost if the engine is gone."""
        if self.lost:
            raise EngineLost(self.lost)

    def _check_serving(self) -> None:
        self.check_not_lost()
        if self.draining:
            raise Draining(_ENDING)

    async def _reserve(self, active: ActiveRequest) -> Sequence[Reservation]:
        """Reserves and returns the capacity that a request needs, in order of arrival.

        If the engine cannot hold the captures of observers now, the request runs without them.
        """
        reservations = active.reservations
        if any(
            observer_capture.observed for observer_capture in active.admitted.observer_captures
        ) and not self.admission_queue.fits_now(
            reservations, active.admitted.prompt_len, background=active.admitted.background
        ):
            active.unobserve()
            reservations = active.reservations
        if reservations:
            await self.admission_queue.reserve(
                reservations,
                prompt_len=active.admitted.prompt_len,
                wait=active.admitted.waits,
                reserved=active.reserved,
                background=active.admitted.background,
            )
        active.capacity_reserved = True
        for sequence in active.sequences:
            if sequence.job.has_plan:
                self._add_route(active, sequence)
        return reservations

    def _add_route(self, active: ActiveRequest, sequence: EngineSequence) -> None:
        self._routes[sequence.plan_id] = (active, sequence)
        self._signal_delivery.forget()

    def _deliver(self, event: Event) -> None:
        if isinstance(event, SignalRows):
            self._signal_delivery.deliver(event)
            return
        if isinstance(event, Dropped) and isinstance(event.report, SignalRows):
            lost = replace(event.report, values=None)
            for request_id in lost.request_ids:
                if request_id in self._routes:
                    self._routes[request_id][0].fail(Defect(_UNHANDLED))
            self._signal_delivery.deliver(lost)
            return
        route = self._routes.get(event.request_id)
        if route is None:
            _LOG.warning("no request receives the event of %s", event.request_id)
        else:
            active, sequence = route
            if isinstance(event, Rows):
                active.outputs.add_rows(sequence.key, event)
                return
            if isinstance(event, ControllerDisabled):
                self.controllers.disable(event.controller, event.reason)
            active.deliver(sequence, event)
            if isinstance(event, Released) and active.released:
                self._release(active)  # even if its client does not read
        if isinstance(event, Installed) and event.error:
            self._invalidate_cache()

    def _invalidate_cache(self) -> None:
        """Stops the use of cached blocks, because some were computed without their plan.

        Later requests use other cache keys. Active requests that steer the KV cache fail, because
        they may have read such a block.
        """
        self.epoch += 1
        _LOG.warning("the prefix cache may be wrong and is not used any more: epoch %d", self.epoch)
        for active in self._active_requests.values():
            if active.touches_kv:
                active.fail(
                    CacheSuspect(
                        "the engine could not install the plan of another request; this one may "
                        "have read what that one left in the prefix cache. Send it again",
                        retry_after=RETRY_SECONDS,
                    )
                )

    def _on_engine_lost(self, reason: str) -> None:
        if self.lost:
            return
        self.lost = reason
        self.admission_queue.close(EngineLost(reason))
        _LOG.error("the engine is lost: %s", reason)
        self.subscriptions.lose(EngineLost(reason))
        self.watches.lose(EngineLost(reason))
        for active in self._active_requests.values():
            active.fail(EngineLost(reason))
            for sequence in active.sequences:
                sequence.released.set()
        self._on_lost()

    async def _settle(self, active: ActiveRequest) -> None:
        """Releases everything that a request has reserved, once the engine has released it."""
        await active.stopped()
        routed = [sequence for sequence in active.sequences if sequence.plan_id in self._routes]
        await until_released(routed, self.worker_stats)
        active.close_outputs()
        self._release(active)
        await active.outputs.settle()
        self._remove(active)

    def _remove(self, active: ActiveRequest) -> None:
        active.close_outputs()
        self._release(active)
        active.share.close()
        active.control = None  # it refers to the request, whose memory must be freed at once
        del self._active_requests[active.admitted.request_id]
        self._foreground -= not active.admitted.background
        self._clients -= active.admitted.of_client
        self._count(active, -len(active.sequences))
        if not self._active_requests:
            self.worker_stats.expire()  # older counts include this request
            self._empty.set()

    def _release(self, active: ActiveRequest) -> None:
        """Releases what a request has reserved of the engine and the store."""
        self.late_attachment.detach(active)
        for sequence in active.sequences:
            self._routes.pop(sequence.plan_id, None)
        self._signal_delivery.forget()
        self.store.unpin(active.pinned)
        active.pinned.clear()
        for preparation in active.prepared:
            if preparation is not None:
                self.preparations.release(preparation)
        active.prepared.clear()
        self.admission_queue.release(active.reserved)

    async def _empty_within(self, seconds: float | None) -> bool:
        """Waits until no request is active. Returns False after `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._empty.wait()
        return not self._active_requests
