"""The engine's manager: requests enter, their events find them, and all that they held comes back.

Invariants: what a request reserves (its id, its vectors, bank rows, slots) is given back exactly
once, and only after the engine has let go of it; once the engine is lost, every request in flight
ends and none enters.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress

from rheostat_engine import CapacityLedger, Event, Installed, Released
from rheostat_server.admission.admit import AdmissionContext, AdmittedRequest, check_queue
from rheostat_server.admission.compiled_requests import CompiledRequests
from rheostat_server.admission.global_steering import GlobalSteeringState
from rheostat_server.config import ServerConfig
from rheostat_server.delivery.byte_budget import Budget, Share
from rheostat_server.delivery.counts import Counts, Drained
from rheostat_server.delivery.deliveries import Deliveries
from rheostat_server.delivery.spill_directory import SpillDirectory
from rheostat_server.delivery.spill_manager import SpillManager
from rheostat_server.engine.admission_queue import RETRY, AdmissionQueue
from rheostat_server.engine.backend import Backend
from rheostat_server.engine.persistent_vectors import PersistentVectorStore
from rheostat_server.engine.preparations import Preparations
from rheostat_server.engine.steering_updates import SteeringUpdates
from rheostat_server.engine.worker_vectors import WorkerVectorCache
from rheostat_server.errors import (
    CacheSuspect,
    Defect,
    Draining,
    DuplicateRequest,
    EngineLost,
    Resource,
    RheostatError,
)
from rheostat_server.limits import LARGE_REQUESTS, STATS_SECONDS
from rheostat_server.prompts.prompts import Prompts
from rheostat_server.requests.active_request import ActiveRequest
from rheostat_server.requests.late_attachment import LateAttachment
from rheostat_server.requests.open_outputs import open_outputs
from rheostat_server.requests.pacing import Pace
from rheostat_server.requests.release import RELEASE_GRACE, until_released
from rheostat_server.requests.sequence import EngineSequence
from rheostat_server.runs.store import Runs
from rheostat_server.sinks import Sinks
from rheostat_server.subscriptions.registry import Subscriptions
from rheostat_server.tasks.shared_query import SharedQuery
from rheostat_server.vectors.store import Vector

_LOG = logging.getLogger(__name__)

_DISCARD_GRACE = 1.0
"""Seconds that a refused request waits for its sinks to forget it."""

_LAST_READS = 5.0
"""Seconds that clients get to read the end of requests that were aborted."""

_ENDING = "the server is ending; it admits nothing more"


class RequestManager:
    """A running engine and the requests in it. Lives on the event loop."""

    def __init__(
        self,
        backend: Backend,
        prompts: Prompts,
        config: ServerConfig,
        sinks: Sinks | None = None,
        spool: SpillDirectory | None = None,
    ) -> None:
        """A manager that serves nothing yet; see `start`."""
        self.sinks = sinks or Sinks([])
        self.runs = Runs(config.runs_bytes)
        self.deliveries = Deliveries()
        self.budget = Budget(
            config.buffers_bytes, config.request_buffer_bytes, slack=config.capture_bytes
        )
        self.spill_manager = (
            SpillManager(spool, config.capture_bytes) if spool is not None else None
        )
        self.backend = backend
        self.info = backend.info
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
        self.epoch = 0
        """Part of every plan that starts; raised when the prefix cache may hold what it should
        not."""
        self.config = config
        self.worker_stats = SharedQuery(backend.worker_stats, keep=STATS_SECONDS)
        self._active_requests: dict[str, ActiveRequest] = {}
        self._pace = Pace()
        self._samples = 0
        """Samples of all requests, with baselines."""
        self._prompt_tokens = 0
        """Their prompt tokens, with one prompt for each sample."""
        self._routes: dict[str, tuple[ActiveRequest, EngineSequence]] = {}
        self._large = asyncio.Semaphore(LARGE_REQUESTS)
        self.late_attachment = LateAttachment(self, self._active_requests, self._routes)
        self._changed = asyncio.Condition()
        self._settling: set[asyncio.Task[None]] = set()
        self._on_lost: Callable[[], None] = lambda: None

    @property
    def admission(self) -> AdmissionContext:
        """What requests are checked against."""
        return AdmissionContext(
            self.info,
            self.sites,
            self.prompts,
            self.store,
            self.server_wide.current,
            self.subscriptions,
            self.sinks,
            self.spill_manager is not None,
            self.runs,
            self._compiled,
            self._large,
        )

    @property
    def ledger(self) -> CapacityLedger:
        """What requests hold of the engine's capacity."""
        return self.admission_queue.ledger

    @property
    def open_requests(self) -> int:
        """Requests that hold something."""
        return len(self._active_requests)

    def start(self, on_lost: Callable[[], None]) -> None:
        """Takes events from the backend; `on_lost` is told once if the engine dies."""
        self._on_lost = on_lost
        self.backend.start(self._deliver, self._lose)

    @asynccontextmanager
    async def run_request(self, admitted: AdmittedRequest) -> AsyncIterator[ActiveRequest]:
        """Runs a request for as long as the context lasts; leaving early aborts it.

        Raises:
            Draining, EngineLost: nothing enters any more.
            DuplicateRequest: a request with this id is in flight.
            QueueFull, BankFull, CaptureOverflow, StoreFull: there is no room.
        """
        self._check_open(admitted)
        active = ActiveRequest(admitted, self.budget.share(), self._pace)
        self._active_requests[admitted.request_id] = active
        self._count(active, len(active.sequences))
        try:
            await self._prepare(active)
        except BaseException as error:
            await self._discard(active, error)
            raise
        try:
            self.counts.admitted += 1
            active.start(self.backend, active.sequences, epoch=self.epoch)
            with self._pace.counting(len(active.own_samples)):
                yield active
        except Exception:
            active.failed = True
            raise
        finally:
            self.counts.end(completed=active.completed and not active.aborted, failed=active.failed)
            active.close()
            active.queue.close()
            if active.settled:
                self._give_back(active)
            else:
                self._keep(self._settle(active))

    def new_bank_row_count(self, admitted: AdmittedRequest) -> int:
        """Bank rows that a request, without its baseline, would need beyond those that are held.

        Raises:
            BankFull, CaptureOverflow: it could never run.
        """
        active = ActiveRequest(admitted, Share(0, ""))
        active.unobserve()
        self.admission_queue.check_ever_fits(active.reservations, admitted.prompt_len)
        return self.ledger.lacks(admitted.plan)["bank_rows"]

    async def pin_vectors(self, active: ActiveRequest, vectors: Sequence[Vector]) -> None:
        """Keeps vectors in the store until a flight ends; returns once the workers have them.

        Raises:
            StoreFull: there is no room for them.
            EngineLost: the engine is gone.
        """
        pinned: list[bytes] = []
        try:
            for vector in vectors:
                self.store.pin(vector)
                pinned.append(vector.digest)
            await self.worker_vectors.ensure(vectors)
        except BaseException:
            for digest in pinned:
                self.store.unpin(digest)
            raise
        active.pinned += pinned

    def add_sequence(self, active: ActiveRequest, sequence: EngineSequence) -> None:
        """Runs something more in a flight, which needs nothing that the flight does not hold."""
        active.sequences.append(sequence)
        self._count(active, 1)
        self._route(active, sequence)
        active.start(self.backend, [sequence], epoch=self.epoch)

    def release_engine(self, active: ActiveRequest) -> None:
        """Gives back what a flight holds of an engine that has let go; its sinks may write on."""
        if all(sequence.released.is_set() for sequence in active.sequences):
            self._free(active)

    async def drain(self, timeout: float | None) -> Drained:
        """Lets nothing in and waits for what runs; after `timeout` seconds aborts the rest."""
        self.draining = True
        self.admission_queue.close(Draining(_ENDING))
        try:
            return await self._drained(timeout)
        finally:
            self.subscriptions.end(
                Draining("the server has ended, and the subscription with it: open another")
            )

    async def _drained(self, timeout: float | None) -> Drained:
        running = len(self._active_requests)
        _LOG.info("draining, %d requests in flight", running)
        if await self._empty_within(timeout):
            return Drained(running, 0)
        left = list(self._active_requests.values())
        for active in left:
            active.abort()
        _LOG.info("drain: %d requests aborted", len(left))
        if not await self._empty_within(_LAST_READS):
            for active in left:
                active.interrupt(Draining(_ENDING))
            if not await self._empty_within(RELEASE_GRACE):
                _LOG.warning("drain: %d requests never ended", len(self._active_requests))
        return Drained(max(0, running - len(left)), len(left))

    async def _prepare(self, active: ActiveRequest) -> None:
        """Reserves all that a request needs, and opens what its rows go to."""
        await self.pin_vectors(active, active.admitted.vectors)
        self._check_serving()
        await self._reserve(active)
        for reservation in active.reservations:
            active.prepared.append(await self.preparations.prepare(reservation.plan))
        await self.late_attachment.catch_up(active)
        self._check_serving()
        await open_outputs(active, self)
        self._check_serving()

    async def _discard(self, active: ActiveRequest, error: BaseException) -> None:
        """Releases what a request held that could not start, before its caller gets the status.

        Only the request's id waits for its sinks, which may take long.
        """
        active.failed = True
        active.close()
        active.discard_outputs(
            error if isinstance(error, RheostatError) else Defect("it went away")
        )
        self._free(active)
        await asyncio.wait({self._keep(self._settle(active))}, timeout=_DISCARD_GRACE)

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

    def _check_serving(self) -> None:
        if self.lost:
            raise EngineLost(self.lost)
        if self.draining:
            raise Draining(_ENDING)

    async def _reserve(self, active: ActiveRequest) -> None:
        """Reserves what a flight needs of the engine, in turn."""
        reservations = active.reservations
        if any(
            observer_capture.observed for observer_capture in active.admitted.observer_captures
        ) and not self.admission_queue.fits_now(reservations, active.admitted.prompt_len):
            active.unobserve()
            reservations = active.reservations
        if reservations:
            await self.admission_queue.reserve(
                reservations,
                prompt_len=active.admitted.prompt_len,
                wait=active.admitted.waits,
                reserved=active.reserved,
            )
        active.capacity_reserved = True
        for sequence in active.sequences:
            self._route(active, sequence)

    def _route(self, active: ActiveRequest, sequence: EngineSequence) -> None:
        if sequence.job.has_plan:
            self._routes[sequence.plan_id] = (active, sequence)

    def _deliver(self, event: Event) -> None:
        route = self._routes.get(event.request_id)
        if route is None:
            _LOG.warning("an event of %s, which nobody waits for", event.request_id)
        else:
            active, sequence = route
            active.deliver(sequence, event)
            if isinstance(event, Released) and active.released:
                self._free(active)  # whether its client reads or not
        if isinstance(event, Installed) and event.error:
            self._doubt_cache()

    def _doubt_cache(self) -> None:
        """Lets nobody use blocks that were computed while their plan was not in force.

        Later requests look under other keys. Those that run may have read such a block already.
        """
        self.epoch += 1
        _LOG.warning("the prefix cache is in doubt: epoch %d", self.epoch)
        for active in self._active_requests.values():
            if active.touches_kv:
                active.fail(
                    CacheSuspect(
                        "the engine could not take up the plan of another request; this one may "
                        "have read what that one left in the prefix cache. Send it again",
                        retry_after=RETRY,
                    )
                )

    def _lose(self, reason: str) -> None:
        if self.lost:
            return
        self.lost = reason
        self.admission_queue.close(EngineLost(reason))
        _LOG.error("the engine is lost: %s", reason)
        self.subscriptions.lose(EngineLost(reason))
        for active in self._active_requests.values():
            active.fail(EngineLost(reason))
            for sequence in active.sequences:
                sequence.released.set()
        self._on_lost()
        self._notify_soon()

    async def _settle(self, active: ActiveRequest) -> None:
        """Gives back what a request held once the engine has let go of it."""
        await active.stopped()
        held = [sequence for sequence in active.sequences if sequence.plan_id in self._routes]
        await asyncio.gather(*(until_released(sequence, self.worker_stats) for sequence in held))
        active.close_outputs()
        self._free(active)
        await active.outputs.settle()
        self._give_back(active)

    def _give_back(self, active: ActiveRequest) -> None:
        active.close_outputs()
        self._free(active)
        active.share.close()
        del self._active_requests[active.admitted.request_id]
        self._count(active, -len(active.sequences))
        if not self._active_requests:
            self.worker_stats.expire()  # an older answer has what this request held
        self._notify_soon()

    def _free(self, active: ActiveRequest) -> None:
        """Gives back what a flight holds of the engine and the store."""
        self.late_attachment.forget(active)
        for sequence in active.sequences:
            self._routes.pop(sequence.plan_id, None)
        for digest in active.pinned:
            self.store.unpin(digest)
        active.pinned.clear()
        for one in active.prepared:
            if one is not None:
                self.preparations.release(one)
        active.prepared.clear()
        self.admission_queue.release(active.reserved)

    async def _empty_within(self, seconds: float | None) -> bool:
        """Whether no request is left after so many seconds, or earlier."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: not self._active_requests)
        return not self._active_requests

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _notify_soon(self) -> None:
        self._keep(self._notify())

    def _keep(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Runs work in a task, and holds the task until it is done, as the event loop does not."""
        task = asyncio.create_task(work)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        return task
