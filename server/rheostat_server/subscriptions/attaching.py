"""Subscriptions take part in requests that already run, and leave those that still do.

Invariant: a request neither waits for an observer nor is refused for one. What an observer wants
beside it needs room in the engine as everything that is captured; without, nothing of it is
captured, and the observer is told why.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Protocol

from rheostat_engine import Capture, ModelSites, Plan
from rheostat_server.capture.specs import engine_captures
from rheostat_server.capture.taps import Tap
from rheostat_server.errors import BankFull, CaptureOverflow, EngineLost
from rheostat_server.flight import Flight, Life, Role
from rheostat_server.host import Backend
from rheostat_server.line import Line, Room
from rheostat_server.offload import offload
from rheostat_server.selection import selector_work
from rheostat_server.subscriptions.joining import Joining, Missed
from rheostat_server.subscriptions.registry import Subscriptions, Wish
from rheostat_server.subscriptions.subscription import Subscription
from rheostat_server.tensors import FloatType

PATIENCE = 1.0
"""Seconds that a subscription's opening waits for the next steps of the requests that it joins."""

_Changes = dict[str, tuple[int, Sequence[Capture]] | None]


class Engine(Protocol):
    """What it takes."""

    backend: Backend
    sites: ModelSites
    subscriptions: Subscriptions
    line: Line


class Attaching:
    """Changes what is captured of requests in flight. Lives on the event loop."""

    def __init__(
        self,
        host: Engine,
        flights: Mapping[str, Flight],
        routes: dict[str, tuple[Flight, Life]],
    ) -> None:
        """Nothing has changed.

        Args:
            host: the engine's host.
            flights: the requests in flight, by id.
            routes: to whom the engine's events go, by the id of a plan.
        """
        self._host = host
        self._flights = flights
        self._routes = routes
        self._tasks: set[asyncio.Task[None]] = set()

    async def attach(self, subscription: Subscription) -> None:
        """Lets a new subscription take part in the requests that it selects and that run.

        Returns once each of them has come to its next step, or after `PATIENCE`.

        Raises:
            EngineLost: the engine is gone.
        """
        subscription.on_left = lambda: self._soon(self._leave(subscription))
        running = [flight for flight in self._flights.values() if _selects(subscription, flight)]
        joined = await self._join(subscription, running)
        if joined:
            waiting = [asyncio.ensure_future(one.told.wait()) for one in joined]
            _, late = await asyncio.wait(waiting, timeout=PATIENCE)
            for one in late:
                one.cancel()

    async def catch_up(self, flight: Flight) -> None:
        """Lets those subscriptions take part that were opened while the request was admitted.

        Raises:
            EngineLost: the engine is gone.
        """
        admitted = flight.admitted
        known = {wish.subscription for wish in admitted.wishes}
        selecting = self._host.subscriptions.selecting(admitted.request_id, admitted.labels)
        for subscription in selecting:
            if subscription not in known:
                await self._join(subscription, [flight])

    def forget(self, flight: Flight) -> None:
        """A flight has ended; changes that it did not live to see wait no more."""
        waiting = [life.plan_id for life in flight.lives if life.joining]
        if waiting:
            self._soon(self._recapture(dict.fromkeys(waiting)))

    async def _join(self, subscription: Subscription, flights: Sequence[Flight]) -> list[Joining]:
        """Lets a subscription take part in requests."""
        wishes = [(flight, await self._wish(subscription, flight)) for flight in flights]
        taps: list[Tap] = []
        missed: list[Missed] = []
        joined: list[Joining] = []
        changes: _Changes = {}
        for flight, wish in wishes:
            lives = _running(flight)
            reason = self._reserve(flight, wish, lives)
            if reason:
                missed.append(Missed(flight.admitted.request_id, reason))
                continue
            tap = subscription.tap(
                flight.admitted.request_id,
                flight.admitted.prompt.token_ids,
                wish.captures,
                FloatType(self._host.sites.dtype),
                fail=None,
            )
            taps.append(tap)
            flight.outlets.add(tap, {})
            flight.joined.append(wish)
            changes |= self._changes(flight, lives)
            for life in lives:
                tap.join(life.track, life.tokens)
                life.joining.append(Joining(life.changes, tap, _refusing(subscription)))
                joined.append(life.joining[-1])
                self._routes[life.plan_id] = (flight, life)
                if not life.job.has_plan:
                    life.released.clear()
        subscription.attached = (*subscription.attached, *taps)
        subscription.missed = (*subscription.missed, *missed)
        if changes:
            await self._host.backend.recapture(changes)
        return joined

    async def _wish(self, subscription: Subscription, flight: Flight) -> Wish:
        context = flight.admitted.context
        specs = subscription.specs
        size = sum(spec.ByteSize() for spec in specs)
        size += selector_work([spec.where for spec in specs], context)
        wishes = self._host.subscriptions.wishes
        (wish,) = await offload(size, wishes, [subscription], context)
        return wish

    def _reserve(self, flight: Flight, wish: Wish, lives: Sequence[Life]) -> str:
        """Reserves what a wish needs of the engine; why that cannot be, or nothing."""
        if not lives or not wish.subscription.taking:
            return "it is about to end"
        name = flight.plan_id(f"joined{len(flight.joined)}")
        plan = Plan(name, (), engine_captures(list(wish.captures.values())))
        try:
            self._host.line.enter_now(
                Room(plan, len(lives)),
                prompt_len=flight.admitted.prompt_len,
                held=flight.reserved,
            )
        except (BankFull, CaptureOverflow) as error:
            return f"the engine has no room for its rows: {error.message}"
        return ""

    def _changes(self, flight: Flight, lives: Sequence[Life]) -> _Changes:
        """What is captured of some samples from now on."""
        beside = [
            capture
            for wish in _observing(flight)
            if wish.subscription.taking
            for number, capture in wish.captures.items()
            if number not in wish.own
        ]
        captures = engine_captures([*flight.admitted.captures, *beside])
        changes: _Changes = {}
        for life in lives:
            life.changes += 1
            changes[life.plan_id] = (life.changes, captures)
        return changes

    async def _leave(self, subscription: Subscription) -> None:
        """Nothing more is copied for a subscription that takes nothing any more."""
        changes: _Changes = {}
        for flight in self._flights.values():
            if any(wish.subscription is subscription for wish in _observing(flight)):
                changes |= self._changes(flight, _running(flight))
        await self._recapture(changes)

    async def _recapture(self, changes: _Changes) -> None:
        if changes:
            with contextlib.suppress(EngineLost):
                await self._host.backend.recapture(changes)

    def _soon(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _selects(subscription: Subscription, flight: Flight) -> bool:
    return subscription.selects(flight.admitted.request_id, flight.admitted.labels)


def _observing(flight: Flight) -> list[Wish]:
    """What is captured of a flight, or was, for those of which it does not know."""
    observed = () if flight.unobserved else flight.admitted.wishes
    return [*(wish for wish in observed if wish.observed), *flight.joined]


def _running(flight: Flight) -> list[Life]:
    """The samples of a flight of which something may still be captured."""
    if flight.closed:
        return []
    return [life for life in flight.lives if life.role is not Role.SCORE and not life.ended]


def _refusing(subscription: Subscription) -> Callable[[Tap, str], None]:
    """What a subscription does where the engine cannot capture for it."""
    return lambda tap, _: subscription.refuse(tap, frozenset(tap.captures))
