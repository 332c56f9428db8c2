"""Subscriptions take part in requests that already run, and leave those that still do.

Invariants: a request neither waits for an observer nor is refused for one. What an observer wants
beside it needs room in the engine as everything that is captured; without, nothing of it is
captured, and the observer is told why. Changes reach the engine in the order of their numbers.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Protocol

from rheostat_engine import (
    OPEN_END,
    Attached,
    Capture,
    CaptureNeed,
    ModelSites,
    Plan,
    PlanTooLarge,
    capture_need,
    update_captures,
)
from rheostat_server.capture.engine_captures import engine_captures
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.capture.taps import Tap
from rheostat_server.errors import BankFull, CaptureOverflow, EngineLost
from rheostat_server.flight import Flight
from rheostat_server.host import Backend, CapturesUpdate
from rheostat_server.line import Line
from rheostat_server.offload import offload
from rheostat_server.planning import captures_work, plan_work
from rheostat_server.sequence import Life, Role
from rheostat_server.subscriptions.joined import Joined
from rheostat_server.subscriptions.joining import Awaited, Joining, Missed
from rheostat_server.subscriptions.registry import Subscriptions
from rheostat_server.subscriptions.subscription import Subscription
from rheostat_server.subscriptions.wishes import Wish, wishes, wishes_work
from rheostat_server.tensors import FloatType

_LOG = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds that a subscription's opening takes at most, about, for the requests that it joins."""

_ENDING = "it is about to end"
_LATE = "the server could not look at it in time: too much runs, or the captures are too fragmented"
_FRAGMENTED = "what is captured of it together would be too fragmented: use fewer, longer spans"


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
        self._changed: dict[Flight, None] = {}
        """Of which something else is to be captured, and the engine does not know."""
        self._gone: set[str] = set()
        """Plans of samples that have ended; changes wait for them in vain."""
        self._sending: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def attach(self, subscription: Subscription) -> None:
        """Lets a new subscription take part in the requests that it selects and that run.

        Requests that wait for room are left to `catch_up`: what is captured for an observer must
        not take the room for which they wait.

        Returns once each of them has come to its next step, or after `PATIENCE`.
        """
        subscription.on_left = partial(self._left, subscription)
        running = [
            flight
            for flight in self._flights.values()
            if flight.entered and _selects(subscription, flight)
        ]
        for flight in running:
            flight.asked.add(subscription.name)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + PATIENCE
        joined: list[Joining] = []
        for flight in running:
            if loop.time() > deadline:
                _miss(subscription, flight, _LATE)
                continue
            joined += await self._join(subscription, flight, named=True)
            await asyncio.sleep(0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                for one in joined:
                    await one.told.wait()

    async def catch_up(self, flight: Flight) -> None:
        """Lets those subscriptions take part that were opened while the request was admitted.

        To be called once the request has the room that it needs.
        """
        admitted = flight.admitted
        known = {wish.subscription.name for wish in admitted.wishes} | flight.asked
        for subscription in self._host.subscriptions.selecting(
            admitted.request_id, admitted.labels
        ):
            if subscription.name not in known:
                await self._join(subscription, flight, named=False)
        if flight.unobserved and any(life.changes for life in flight.lives):
            self._change(flight, _running(flight))

    def forget(self, flight: Flight) -> None:
        """A flight has ended; changes that it did not live to see wait no more."""
        for life in flight.lives:
            life.let_go()
            if life.changes > life.told:
                life.told = life.changes
                self._gone.add(life.plan_id)
        if self._gone:
            self._send()

    async def _join(
        self, subscription: Subscription, flight: Flight, *, named: bool
    ) -> list[Joining]:
        """Lets a subscription take part in a request; what it waits for then."""
        wish = await self._wish(subscription, flight)
        async with flight.capture_lock:
            need, reason = await self._need(flight, wish)
            lives = _running(flight)
            reason = wish.missed or reason
            reason = reason or self._reserve(flight, wish, lives, need)
            if reason and named:
                _miss(subscription, flight, reason)
                return []
            if not subscription.taking or flight.closed:
                return []
            return self._add(flight, wish, lives, reason, named=named)

    def _add(
        self, flight: Flight, wish: Wish, lives: Sequence[Life], reason: str, *, named: bool
    ) -> list[Joining]:
        """Adds a tap to a request; `reason` says why the engine captures nothing for it."""
        subscription = wish.subscription
        tap = subscription.tap(
            flight.admitted.request_id,
            flight.admitted.prompt.token_ids,
            wish.captures,
            FloatType(self._host.sites.dtype),
            fail=None,
        )
        flight.outlets.add(tap, {})
        if wish.missed:
            subscription.miss(tap, reason)
            return []
        if reason:
            _refuse(subscription, tap, reason)
            return []
        subscription.attached = (*subscription.attached, tap)
        flight.joined.append(Joined(wish, tap, named))
        self._change(flight, lives)
        joined: list[Joining] = []
        for life in lives:
            tap.join(life.track, life.tokens)
            joined.append(Joining(life.changes, tap, partial(_refuse, subscription)))
            life.joining.append(joined[-1])
        return joined

    async def _wish(self, subscription: Subscription, flight: Flight) -> Wish:
        context, one = flight.admitted.context, [subscription]
        spent = sum(wish.subscription.captures.cost for wish in _observing(flight))
        (wish,) = await offload(wishes_work(one, context.prompt_len), wishes, one, context, spent)
        return wish

    async def _need(self, flight: Flight, wish: Wish | None = None) -> tuple[CaptureNeed, str]:
        """What a sample needs beside its own plan with all that is captured of it, and a wish.

        The second is why no engine could capture all of it, or nothing.
        """
        captures = self._captured(flight)
        if wish is not None:
            captures += wish.captures.values()
        plan = flight.lives[0].job.plan
        return await offload(
            captures_work(captures) + plan_work(plan),
            _looked_through,
            plan,
            captures,
            _computed(flight),
            flight.admitted.prompt_len,
            self._host.line.step_tokens,
        )

    def _reserve(self, flight: Flight, wish: Wish, lives: Sequence[Life], need: CaptureNeed) -> str:
        """Reserves what samples need with a wish; why that cannot be, or nothing.

        What is reserved already stays, because the engine may not know of earlier changes yet.
        """
        if not lives or not wish.subscription.taking:
            return _ENDING
        line, name = self._host.line, _reservation(flight)
        before = line.ledger.observed(name)
        rows, sites = max(before.rows, len(lives) * need.rows), max(before.sites, need.sites)
        try:
            line.observe(name, CaptureNeed(rows, sites), flight.reserved)
        except (BankFull, CaptureOverflow) as error:
            return f"the engine has no room for its rows: {error.message}"
        return ""

    def _captured(self, flight: Flight) -> list[ResolvedCapture]:
        """What is to be captured of a flight now."""
        beside = (
            capture
            for wish in _observing(flight)
            if wish.subscription.taking
            for number, capture in wish.captures.items()
            if number not in wish.own
        )
        return [*flight.admitted.captures, *beside]

    def _left(self, subscription: Subscription) -> None:
        """Nothing more is copied for a subscription that takes nothing any more."""
        subscription.on_left = lambda: None
        for flight in self._flights.values():
            if all(one.subscription is not subscription for one in _observing(flight)):
                continue
            joined = [one for one in flight.joined if one.wish.subscription is subscription]
            for one in joined:
                flight.outlets.remove(one.tap)
            flight.joined = [
                one for one in flight.joined if one.wish.subscription is not subscription
            ]
            self._change(flight, _running(flight))
            if joined:
                self._soon(self._give_back(flight))

    async def _give_back(self, flight: Flight) -> None:
        """Gives back what nobody wants of a request any more, once the engine copies none of it."""
        while changes := _awaiting(flight):
            for one in changes:
                await one.told.wait()
        async with flight.capture_lock:
            name = _reservation(flight)
            need, lives = CaptureNeed(0, 0), _running(flight)
            if flight.joined and lives:
                need, _ = await self._need(flight)
            if name in flight.reserved and not _awaiting(flight):
                rows = len(lives) * need.rows
                self._host.line.observe(name, need._replace(rows=rows), flight.reserved)

    def _change(self, flight: Flight, lives: Sequence[Life]) -> None:
        """Something else is to be captured of some samples of a flight from now on."""
        for life in lives:
            life.changes += 1
            self._routes[life.plan_id] = (flight, life)
            if not life.job.has_plan:
                life.released.clear()
        if lives:
            self._changed[flight] = None
            self._send()

    def _send(self) -> None:
        """Lets the engine know of all changes."""
        if self._sending is None or self._sending.done():
            self._sending = self._soon(self._send_all())

    async def _send_all(self) -> None:
        while self._changed or self._gone:
            changes: dict[str, CapturesUpdate | None] = {}
            while self._changed:
                if changes:
                    await asyncio.sleep(0)
                flight = next(iter(self._changed))
                del self._changed[flight]
                changes |= await self._changes(flight)
            changes |= dict.fromkeys(self._gone)
            self._gone.clear()
            if not changes:  # what should have changed has ended
                continue
            try:
                await self._host.backend.update_captures(changes)
            except EngineLost:
                return  # all who wait hear of that
            except Exception as error:  # a task's end: whatever it is, who waits must hear of it
                _LOG.error("the engine was not told what to capture", exc_info=error)
                self._fail({name: one.number for name, one in changes.items() if one is not None})

    async def _changes(self, flight: Flight) -> dict[str, CapturesUpdate]:
        """What the engine is told of a flight; nothing where that cannot be made."""
        numbers = {life.plan_id: life.changes for life in _running(flight)}
        try:
            captures, first = self._captured(flight), _computed(flight)
            made = await offload(captures_work(captures), _captures_from, captures, first)
        except Exception as error:  # whatever it is, who waits must hear of it, and others go on
            name = flight.admitted.request_id
            _LOG.error("what to capture of %s was not told to the engine", name, exc_info=error)
            self._fail(numbers)
            return {}
        return {name: CapturesUpdate(number, made, first) for name, number in numbers.items()}

    def _fail(self, numbers: Mapping[str, int]) -> None:
        """Of some changes, by the id of a plan, the engine does not hear."""
        for name, number in numbers.items():
            route = self._routes.get(name)
            if route is not None:
                route[1].answer(Attached(name, number, OPEN_END, "it could not be told"))

    def _soon(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _selects(subscription: Subscription, flight: Flight) -> bool:
    return subscription.selects(flight.admitted.request_id, flight.admitted.labels)


def _miss(subscription: Subscription, flight: Flight, reason: str) -> None:
    missed = Missed(flight.admitted.request_id, reason)
    subscription.missed = (*subscription.missed, missed)


def _observing(flight: Flight) -> list[Wish]:
    """What is captured of a flight, or was, for those of which it does not know."""
    observed = () if flight.unobserved else flight.admitted.wishes
    return [*(wish for wish in observed if wish.observed), *(one.wish for one in flight.joined)]


def _running(flight: Flight) -> list[Life]:
    """The samples of a flight of which something may still be captured.

    The engine may have released a sample whose last token has not arrived yet. It would never
    answer a change of that sample.
    """
    if flight.closed:
        return []
    own = (life for life in flight.lives if life.role is not Role.SCORE)
    return [life for life in own if not life.ended and not life.left]


def _awaiting(flight: Flight) -> list[Awaited]:
    """Changes of samples in the engine of which it has not said what became of them."""
    found: list[Awaited] = []
    for life in flight.lives:
        held = life.role is not Role.SCORE and not (life.ended and life.released.is_set())
        if held and life.told < life.changes:
            found.append(Awaited(life.changes))
            life.joining.append(found[-1])
    return found


def _reservation(flight: Flight) -> str:
    """Under which the ledger holds room for what is captured of a request beside its plan."""
    return flight.plan_id("observed")


def _computed(flight: Flight) -> int:
    """A position before which every sample that runs has computed everything."""
    tokens = min((len(life.tokens) for life in _running(flight)), default=0)
    return flight.admitted.prompt_len + tokens - 1 if tokens else 0


def _captures_from(captures: Sequence[ResolvedCapture], first: int) -> tuple[Capture, ...]:
    """What the engine has to copy from a position on."""
    return update_captures(Plan(""), engine_captures(captures), first).captures


def _looked_through(
    plan: Plan,
    captures: Sequence[ResolvedCapture],
    first: int,
    prompt_len: int,
    step_tokens: int,
) -> tuple[CaptureNeed, str]:
    """What captures from a position on need beside a plan, and why no engine could do them."""
    together = Plan("", (), _captures_from(captures, first))
    try:
        own, all_of_it = (
            capture_need(one.packed_captures, prompt_len=prompt_len, max_step_tokens=step_tokens)
            for one in (plan, together)
        )
    except PlanTooLarge:
        return CaptureNeed(0, 0), _FRAGMENTED
    if all_of_it.rows <= own.rows and all_of_it.sites <= own.sites:
        return CaptureNeed(0, 0), ""
    return CaptureNeed(max(0, all_of_it.rows - own.rows), all_of_it.sites), ""


def _refuse(subscription: Subscription, tap: Tap, reason: str) -> None:
    """What a subscription does where the engine cannot capture for it."""
    if subscription.taking:
        what = f"the engine cannot capture from a request that runs: {reason}. Capture less"
        subscription.refuse(tap, frozenset(tap.captures), what)
