"""The engine's host: requests enter, their events find them, and all that they held comes back.

Invariants: what a request reserves (its id, its vectors, bank rows, slots) is given back exactly
once, and only after the engine has let go of it; once the engine is lost, every request in flight
ends and none enters.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

from rheostat_engine import CapacityLedger, Event, Plan, Shortage
from rheostat_server.admission import Admitted, Desk
from rheostat_server.config import ServerConfig
from rheostat_server.errors import (
    BankFull,
    CaptureOverflow,
    Draining,
    DuplicateRequest,
    EngineLost,
    QueueFull,
    Resource,
    RheostatError,
)
from rheostat_server.flight import Flight, Life
from rheostat_server.host import Backend
from rheostat_server.limits import WAITING_REQUESTS
from rheostat_server.loader import VectorLoader
from rheostat_server.prompts import Prompts

_LOG = logging.getLogger(__name__)

RELEASE_GRACE = 60.0
"""Seconds that the engine has to let go of a request that it has run."""

UNSCHEDULED_GRACE = 2.0
"""Seconds after which a request of which the engine said nothing counts as never scheduled."""

_RETRY = 1.0


@dataclass
class Counts:
    """Requests by how they ended."""

    admitted: int = 0
    completed: int = 0
    aborted: int = 0
    refused: int = 0
    failed: int = 0


class Drained(NamedTuple):
    """How requests ended while the host drained."""

    finished: int
    aborted: int


class EngineHost:
    """A running engine and the requests in it. Lives on the event loop."""

    def __init__(self, backend: Backend, prompts: Prompts, config: ServerConfig) -> None:
        """A host that serves nothing yet; see `start`."""
        self.backend = backend
        self.info = backend.info
        self.sites = backend.sites
        self.prompts = prompts
        self.loader = VectorLoader(backend, config.vector_store_bytes)
        self.store = self.loader.store
        self.counts = Counts()
        self.lost = ""
        self.draining = False
        self.ledger = CapacityLedger(
            bank_rows=self.sites.bank_rows,
            slots=self.sites.slots,
            capture_rows=self.sites.capture_rows,
        )
        self._config = config
        self._flights: dict[str, Flight] = {}
        self._routes: dict[str, tuple[Flight, int]] = {}
        self._turn = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._settling: set[asyncio.Task[None]] = set()
        self._on_lost: Callable[[], None] = lambda: None

    @property
    def desk(self) -> Desk:
        """What requests are checked against."""
        return Desk(self.info, self.sites, self.prompts, self.store)

    @property
    def open_requests(self) -> int:
        """Requests that hold something."""
        return len(self._flights)

    def start(self, on_lost: Callable[[], None]) -> None:
        """Takes events from the backend; `on_lost` is told once if the engine dies."""
        self._on_lost = on_lost
        self.backend.start(self._deliver, self._lose)

    @asynccontextmanager
    async def fly(self, admitted: Admitted) -> AsyncIterator[Flight]:
        """Runs a request for as long as the context lasts; leaving early aborts it.

        Raises:
            Draining, EngineLost: nothing enters any more.
            DuplicateRequest: a request with this id is in flight.
            QueueFull, BankFull, CaptureOverflow, StoreFull: there is no room.
        """
        self._check_open(admitted)
        flight = Flight(admitted, inline_bytes=self._config.inline_capture_bytes)
        self._flights[admitted.request_id] = flight
        pinned: list[bytes] = []
        try:
            for vector in admitted.vectors:
                self.store.pin(vector)
                pinned.append(vector.digest)
            await self.loader.ensure(admitted.vectors)
            await self._reserve(flight)
            self._check_serving()
            self.counts.admitted += 1
            flight.start(self.backend)
            yield flight
        except Exception:
            flight.failed = True
            raise
        finally:
            self._count(flight)
            flight.close()
            if flight.settled:
                self._give_back(flight, pinned)
            else:
                task = asyncio.create_task(self._settle(flight, pinned))
                self._settling.add(task)
                task.add_done_callback(self._settling.discard)

    def new_bank_rows(self, plan: Plan, prompt_len: int) -> int:
        """Bank rows that a plan would need beyond those that are held.

        Raises:
            BankFull, CaptureOverflow: it could never be admitted.
        """
        probe = Plan(f"{plan.request_id} probe", plan.additions, plan.captures)
        before = self.ledger.bank_rows_used
        shortage = self._admit(probe, prompt_len)
        if shortage is None:
            needed = self.ledger.bank_rows_used - before
            self.ledger.release(probe.request_id)
            return needed
        if not shortage.ever:
            raise _refusal(shortage, retry_after=None)
        return shortage.needed if shortage.resource == "bank rows" else len(plan.row_keys())

    async def drain(self, timeout: float | None) -> Drained:
        """Lets nothing in and waits for what runs; after `timeout` seconds aborts the rest."""
        self.draining = True
        running = len(self._flights)
        _LOG.info("draining, %d requests in flight", running)
        await self._notify()
        try:
            async with asyncio.timeout(timeout):
                await self._until_empty()
        except TimeoutError:
            left = list(self._flights.values())
            for flight in left:
                flight.abort()
            _LOG.info("drain: %d requests aborted", len(left))
            try:
                async with asyncio.timeout(RELEASE_GRACE):
                    await self._until_empty()
            except TimeoutError:
                _LOG.warning("drain: %d requests never ended", len(self._flights))
            return Drained(max(0, running - len(left)), len(left))
        return Drained(running, 0)

    def _check_open(self, admitted: Admitted) -> None:
        self._check_serving()
        request_id = admitted.request_id
        if request_id in self._flights:
            raise DuplicateRequest(
                "a running request has this id",
                field="request_id",
                resource=Resource("request", request_id),
            )
        samples = sum(len(flight.lives) for flight in self._flights.values())
        if samples >= self.info.running_samples + WAITING_REQUESTS:
            raise QueueFull(f"{samples} samples run or wait", retry_after=_RETRY)

    def _check_serving(self) -> None:
        if self.lost:
            raise EngineLost(self.lost)
        if self.draining:
            raise Draining("the server is ending; it admits nothing more")

    async def _reserve(self, flight: Flight) -> None:
        """Enters the ledger in turn, waiting for others to leave it if they must."""
        planned = [life for life in flight.lives if life.job.has_plan]
        if not planned:
            return
        shortage: Shortage | None = None
        try:
            async with asyncio.timeout(self._config.capacity_wait), self._turn, self._changed:
                while (shortage := self._enter(flight, planned)) is not None:
                    if not shortage.ever or self.ledger.requests == 0:
                        raise _refusal(shortage, retry_after=None)
                    await self._changed.wait()
                    self._check_serving()
        except TimeoutError as error:
            if shortage is None:
                raise BankFull(
                    "others wait for bank rows too; none came free in time", retry_after=_RETRY
                ) from error
            raise _refusal(shortage, retry_after=_RETRY) from error

    def _enter(self, flight: Flight, planned: list[Life]) -> Shortage | None:
        entered: list[str] = []
        for life in planned:
            shortage = self._admit(life.job.plan, flight.admitted.prompt_len)
            if shortage is not None:
                for plan_id in entered:
                    self.ledger.release(plan_id)
                return shortage
            entered.append(life.job.plan.request_id)
        for life in planned:
            self._routes[life.job.plan.request_id] = (flight, life.job.sample)
        return None

    def _admit(self, plan: Plan, prompt_len: int) -> Shortage | None:
        return self.ledger.admit(plan, prompt_len=prompt_len, max_step_tokens=self.info.step_tokens)

    def _deliver(self, event: Event) -> None:
        route = self._routes.get(event.request_id)
        if route is None:
            _LOG.warning("an event of %s, which nobody waits for", event.request_id)
            return
        flight, sample = route
        flight.deliver(sample, event)

    def _lose(self, reason: str) -> None:
        if self.lost:
            return
        self.lost = reason
        _LOG.error("the engine is lost: %s", reason)
        for flight in self._flights.values():
            flight.fail(EngineLost(reason))
            for life in flight.lives:
                life.released.set()
        self._on_lost()
        self._notify_soon()

    async def _settle(self, flight: Flight, pinned: list[bytes]) -> None:
        """Gives back what a request held once the engine has let go of it."""
        tasks = [life.task for life in flight.lives if life.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        held = [life for life in flight.lives if life.job.plan.request_id in self._routes]
        await asyncio.gather(*(_until_released(life) for life in held))
        self._give_back(flight, pinned)

    def _give_back(self, flight: Flight, pinned: list[bytes]) -> None:
        for life in flight.lives:
            if self._routes.pop(life.job.plan.request_id, None) is not None:
                self.ledger.release(life.job.plan.request_id)
        for digest in pinned:
            self.store.unpin(digest)
        del self._flights[flight.admitted.request_id]
        self._notify_soon()

    def _count(self, flight: Flight) -> None:
        if all(life.task is None for life in flight.lives):
            return
        if flight.completed and not flight.aborted:
            self.counts.completed += 1
        elif flight.failed:
            self.counts.failed += 1
        else:
            self.counts.aborted += 1

    async def _until_empty(self) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._flights)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _notify_soon(self) -> None:
        task = asyncio.create_task(self._notify())
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)


async def _until_released(life: Life) -> None:
    """Returns once the engine has let go of a sample, or can be taken to have done so."""
    if await _released_within(life, UNSCHEDULED_GRACE) or not life.installed:
        return
    if not await _released_within(life, RELEASE_GRACE):
        _LOG.error("the engine never released %s", life.job.plan.request_id)


async def _released_within(life: Life, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await life.released.wait()
    except TimeoutError:
        return False
    return True


def _refusal(shortage: Shortage, *, retry_after: float | None) -> RheostatError:
    text = f"the request needs {shortage.needed} more {shortage.resource}; {shortage.free} are free"
    if shortage.resource == "capture rows":
        return CaptureOverflow(
            f"{text}. Capture fewer sites or tokens, or raise the server's --capture-mib",
            field="captures",
            retry_after=retry_after,
        )
    if shortage.resource == "slots":
        advice = "Use fewer different combinations of interventions; the number of slots is fixed"
    else:
        advice = "Use fewer distinct configurations, or raise the server's --bank-mib"
    return BankFull(
        f"{text}. {advice}",
        field="steering",
        retry_after=retry_after,
    )
