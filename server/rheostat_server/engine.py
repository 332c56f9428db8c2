"""The engine's host: requests enter, their events find them, and all that they held comes back.

Invariants: what a request reserves (its id, its vectors, bank rows, slots) is given back exactly
once, and only after the engine has let go of it; once the engine is lost, every request in flight
ends and none enters.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress

from rheostat_engine import CapacityLedger, Event, Installed, Released
from rheostat_server.admission import AdmissionContext, AdmittedRequest, check_queue
from rheostat_server.capture.budget import Budget, Share
from rheostat_server.capture.counts import Counts, Drained
from rheostat_server.capture.deliveries import Deliveries
from rheostat_server.capture.opening import open_outlets
from rheostat_server.capture.spillway import Spillway
from rheostat_server.capture.spool import Spool
from rheostat_server.compiled_requests import CompiledRequests
from rheostat_server.config import ServerConfig
from rheostat_server.errors import (
    CacheSuspect,
    Defect,
    Draining,
    DuplicateRequest,
    EngineLost,
    Resource,
    RheostatError,
)
from rheostat_server.flight import Flight
from rheostat_server.global_steering import ServerWide
from rheostat_server.host import Backend
from rheostat_server.keeper import VectorKeeper
from rheostat_server.limits import LARGE_REQUESTS, STATS_SECONDS
from rheostat_server.line import RETRY, Line
from rheostat_server.loader import VectorLoader
from rheostat_server.pacing import Pace
from rheostat_server.preparations import Preparations
from rheostat_server.prompts import Prompts
from rheostat_server.release import RELEASE_GRACE, until_released
from rheostat_server.runs.store import Runs
from rheostat_server.sequence import Life
from rheostat_server.shared_query import SharedQuery
from rheostat_server.sinks import Sinks
from rheostat_server.steering_updates import SteeringUpdates
from rheostat_server.subscriptions.attaching import Attaching
from rheostat_server.subscriptions.registry import Subscriptions
from rheostat_server.vectors import Vector

_LOG = logging.getLogger(__name__)

_DISCARD_GRACE = 1.0
"""Seconds that a refused request waits for its sinks to forget it."""

_LAST_READS = 5.0
"""Seconds that clients get to read the end of requests that were aborted."""

_ENDING = "the server is ending; it admits nothing more"


class EngineHost:
    """A running engine and the requests in it. Lives on the event loop."""

    def __init__(
        self,
        backend: Backend,
        prompts: Prompts,
        config: ServerConfig,
        sinks: Sinks | None = None,
        spool: Spool | None = None,
    ) -> None:
        """A host that serves nothing yet; see `start`."""
        self.sinks = sinks or Sinks([])
        self.runs = Runs(config.runs_bytes)
        self.deliveries = Deliveries()
        self.budget = Budget(
            config.buffers_bytes, config.request_buffer_bytes, slack=config.capture_bytes
        )
        self.spillway = Spillway(spool, config.capture_bytes) if spool is not None else None
        self.backend = backend
        self.info = backend.info
        self.sites = backend.sites
        self.prompts = prompts
        self.loader = VectorLoader(backend, config.vector_store_bytes)
        self.store = self.loader.store
        self.keeper = VectorKeeper(self.store)
        self.counts = Counts()
        self.lost = ""
        self.draining = False
        self.line = Line(
            self.sites.capacity,
            step_tokens=self.info.step_tokens,
            patience=config.capacity_wait,
        )
        self.preparations = Preparations(backend, self.line)
        self.steering_updates = SteeringUpdates(backend)
        self.server_wide = ServerWide(
            self.info, self.sites, self.loader, self.line.refuse_what_never_fits
        )
        self.subscriptions = Subscriptions(
            self.info,
            self.sites,
            self.loader,
            buffer_bytes=config.subscriptions_bytes,
            resume_window=config.resume_window,
            heartbeat=config.heartbeat,
            deliveries=self.deliveries,
            spillway=self.spillway,
        )
        self.epoch = 0
        """Part of every plan that starts; raised when the prefix cache may hold what it should
        not."""
        self.config = config
        self.worker_stats = SharedQuery(backend.worker_stats, keep=STATS_SECONDS)
        self._flights: dict[str, Flight] = {}
        self._pace = Pace()
        self._samples = 0
        """Samples of all requests, with baselines."""
        self._prompt_tokens = 0
        """Their prompt tokens, with one prompt for each sample."""
        self._routes: dict[str, tuple[Flight, Life]] = {}
        self._compiled = CompiledRequests(self.store)
        self._large = asyncio.Semaphore(LARGE_REQUESTS)
        self.attaching = Attaching(self, self._flights, self._routes)
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
            self.spillway is not None,
            self.runs,
            self._compiled,
            self._large,
        )

    @property
    def ledger(self) -> CapacityLedger:
        """What requests hold of the engine's capacity."""
        return self.line.ledger

    @property
    def open_requests(self) -> int:
        """Requests that hold something."""
        return len(self._flights)

    def start(self, on_lost: Callable[[], None]) -> None:
        """Takes events from the backend; `on_lost` is told once if the engine dies."""
        self._on_lost = on_lost
        self.backend.start(self._deliver, self._lose)

    @asynccontextmanager
    async def fly(self, admitted: AdmittedRequest) -> AsyncIterator[Flight]:
        """Runs a request for as long as the context lasts; leaving early aborts it.

        Raises:
            Draining, EngineLost: nothing enters any more.
            DuplicateRequest: a request with this id is in flight.
            QueueFull, BankFull, CaptureOverflow, StoreFull: there is no room.
        """
        self._check_open(admitted)
        flight = Flight(admitted, self.budget.share(), self._pace)
        self._flights[admitted.request_id] = flight
        self._count(flight, len(flight.lives))
        try:
            await self._prepare(flight)
        except BaseException as error:
            await self._discard(flight, error)
            raise
        try:
            self.counts.admitted += 1
            flight.start(self.backend, flight.lives, epoch=self.epoch)
            with self._pace.counting(len(flight.own)):
                yield flight
        except Exception:
            flight.failed = True
            raise
        finally:
            self.counts.end(completed=flight.completed and not flight.aborted, failed=flight.failed)
            flight.close()
            flight.queue.close()
            if flight.settled:
                self._give_back(flight)
            else:
                self._keep(self._settle(flight))

    def new_bank_row_count(self, admitted: AdmittedRequest) -> int:
        """Bank rows that a request, without its baseline, would need beyond those that are held.

        Raises:
            BankFull, CaptureOverflow: it could never run.
        """
        flight = Flight(admitted, Share(0, ""))
        flight.unobserve()
        self.line.refuse_what_never_fits(flight.rooms, admitted.prompt_len)
        return self.ledger.lacks(admitted.plan)["bank_rows"]

    async def hold(self, flight: Flight, vectors: Sequence[Vector]) -> None:
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
            await self.loader.ensure(vectors)
        except BaseException:
            for digest in pinned:
                self.store.unpin(digest)
            raise
        flight.pinned += pinned

    def launch(self, flight: Flight, life: Life) -> None:
        """Runs something more in a flight, which needs nothing that the flight does not hold."""
        flight.lives.append(life)
        self._count(flight, 1)
        self._route(flight, life)
        flight.start(self.backend, [life], epoch=self.epoch)

    def leave_engine(self, flight: Flight) -> None:
        """Gives back what a flight holds of an engine that has let go; its sinks may write on."""
        if all(life.released.is_set() for life in flight.lives):
            self._free(flight)

    async def drain(self, timeout: float | None) -> Drained:
        """Lets nothing in and waits for what runs; after `timeout` seconds aborts the rest."""
        self.draining = True
        self.line.close(Draining(_ENDING))
        try:
            return await self._drained(timeout)
        finally:
            self.subscriptions.end(
                Draining("the server has ended, and the subscription with it: open another")
            )

    async def _drained(self, timeout: float | None) -> Drained:
        running = len(self._flights)
        _LOG.info("draining, %d requests in flight", running)
        if await self._empty_within(timeout):
            return Drained(running, 0)
        left = list(self._flights.values())
        for flight in left:
            flight.abort()
        _LOG.info("drain: %d requests aborted", len(left))
        if not await self._empty_within(_LAST_READS):
            for flight in left:
                flight.interrupt(Draining(_ENDING))
            if not await self._empty_within(RELEASE_GRACE):
                _LOG.warning("drain: %d requests never ended", len(self._flights))
        return Drained(max(0, running - len(left)), len(left))

    async def _prepare(self, flight: Flight) -> None:
        """Reserves all that a request needs, and opens what its rows go to."""
        await self.hold(flight, flight.admitted.vectors)
        self._check_serving()
        await self._reserve(flight)
        for room in flight.rooms:
            flight.prepared.append(await self.preparations.prepare(room.plan))
        await self.attaching.catch_up(flight)
        self._check_serving()
        await open_outlets(flight, self)
        self._check_serving()

    async def _discard(self, flight: Flight, error: BaseException) -> None:
        """Releases what a request held that could not start, before its caller gets the status.

        Only the request's id waits for its sinks, which may take long.
        """
        flight.failed = True
        flight.close()
        flight.abandon(error if isinstance(error, RheostatError) else Defect("it went away"))
        self._free(flight)
        await asyncio.wait({self._keep(self._settle(flight))}, timeout=_DISCARD_GRACE)

    def _check_open(self, admitted: AdmittedRequest) -> None:
        self._check_serving()
        request_id = admitted.request_id
        if request_id in self._flights:
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

    def _count(self, flight: Flight, samples: int) -> None:
        """Counts more samples of a request, or fewer if the number is negative.

        Sums over all requests would make each admission as expensive as there are requests.
        """
        self._samples += samples
        self._prompt_tokens += samples * flight.admitted.prompt_len

    def _check_serving(self) -> None:
        if self.lost:
            raise EngineLost(self.lost)
        if self.draining:
            raise Draining(_ENDING)

    async def _reserve(self, flight: Flight) -> None:
        """Reserves what a flight needs of the engine, in turn."""
        rooms = flight.rooms
        if any(wish.observed for wish in flight.admitted.wishes) and not self.line.fits_now(
            rooms, flight.admitted.prompt_len
        ):
            flight.unobserve()
            rooms = flight.rooms
        if rooms:
            await self.line.enter(
                rooms,
                prompt_len=flight.admitted.prompt_len,
                wait=flight.admitted.waits,
                held=flight.reserved,
            )
        flight.entered = True
        for life in flight.lives:
            self._route(flight, life)

    def _route(self, flight: Flight, life: Life) -> None:
        if life.job.has_plan:
            self._routes[life.plan_id] = (flight, life)

    def _deliver(self, event: Event) -> None:
        route = self._routes.get(event.request_id)
        if route is None:
            _LOG.warning("an event of %s, which nobody waits for", event.request_id)
        else:
            flight, life = route
            flight.deliver(life, event)
            if isinstance(event, Released) and flight.over:
                self._free(flight)  # whether its client reads or not
        if isinstance(event, Installed) and event.error:
            self._doubt_cache()

    def _doubt_cache(self) -> None:
        """Lets nobody use blocks that were computed while their plan was not in force.

        Later requests look under other keys. Those that run may have read such a block already.
        """
        self.epoch += 1
        _LOG.warning("the prefix cache is in doubt: epoch %d", self.epoch)
        for flight in self._flights.values():
            if flight.touches_kv:
                flight.fail(
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
        self.line.close(EngineLost(reason))
        _LOG.error("the engine is lost: %s", reason)
        self.subscriptions.lose(EngineLost(reason))
        for flight in self._flights.values():
            flight.fail(EngineLost(reason))
            for life in flight.lives:
                life.released.set()
        self._on_lost()
        self._notify_soon()

    async def _settle(self, flight: Flight) -> None:
        """Gives back what a request held once the engine has let go of it."""
        await flight.stopped()
        held = [life for life in flight.lives if life.plan_id in self._routes]
        await asyncio.gather(*(until_released(life, self.worker_stats) for life in held))
        flight.close_outlets()
        self._free(flight)
        await flight.outlets.settle()
        self._give_back(flight)

    def _give_back(self, flight: Flight) -> None:
        flight.close_outlets()
        self._free(flight)
        flight.share.close()
        del self._flights[flight.admitted.request_id]
        self._count(flight, -len(flight.lives))
        if not self._flights:
            self.worker_stats.expire()  # an older answer has what this request held
        self._notify_soon()

    def _free(self, flight: Flight) -> None:
        """Gives back what a flight holds of the engine and the store."""
        self.attaching.forget(flight)
        for life in flight.lives:
            self._routes.pop(life.plan_id, None)
        for digest in flight.pinned:
            self.store.unpin(digest)
        flight.pinned.clear()
        for one in flight.prepared:
            if one is not None:
                self.preparations.release(one)
        flight.prepared.clear()
        self.line.leave(flight.reserved)

    async def _empty_within(self, seconds: float | None) -> bool:
        """Whether no request is left after so many seconds, or earlier."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: not self._flights)
        return not self._flights

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
