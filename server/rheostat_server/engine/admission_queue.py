"""Room in the engine: who enters, and when.

Invariants: nothing enters without room for all of it; first come, first served: as long as one
waits, nobody who came later takes anything new, however little it needs.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rheostat_engine import Capacity, CapacityLedger, CaptureNeed, Plan, Shortage
from rheostat_server.errors import BankFull, CaptureOverflow, RheostatError

RETRY = 1.0
"""Seconds after which another attempt makes sense where nobody can know."""


class Reservation(NamedTuple):
    """What a request needs."""

    plan: Plan
    """What it does."""
    runs: int = 1
    """How many of the engine's requests do it at the same time."""


@dataclass(eq=False)
class _QueuedRequest:
    """A request that waits."""

    rooms: Sequence[Reservation]
    prompt_len: int
    held: list[str]
    granted: asyncio.Future[None]
    shortage: Shortage | None = None
    used: int = 0
    """How much was held of what is short when it was found to be."""


class AdmissionQueue:
    """The ledger of what the engine can hold, and the requests that wait for it, in turn."""

    def __init__(self, capacity: Capacity, *, step_tokens: int, patience: float) -> None:
        """Nothing is held and nobody waits.

        Args:
            capacity: of the engine.
            step_tokens: tokens that one step computes at most.
            patience: seconds that a request waits at most.
        """
        self.ledger = CapacityLedger(capacity)
        self._capacity = capacity
        self.step_tokens = step_tokens
        self.patience = patience
        self._tickets: deque[_QueuedRequest] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._tickets)

    async def enter(
        self, rooms: Sequence[Reservation], *, prompt_len: int, wait: bool, held: list[str]
    ) -> None:
        """Reserves rooms, all together, in turn.

        Args:
            rooms: of one request.
            prompt_len: tokens of its prompt.
            wait: whether it waits if there is no room now.
            held: gets the ids that hold something from then on, for `leave`; also if this is
                cancelled at the last moment.

        Raises:
            BankFull, CaptureOverflow: there is no room, not in time, or never will be.
        """
        shortage = None
        if not self._tickets:
            shortage = self._admit(rooms, prompt_len, held)
            if shortage is None:
                return
        self.refuse_what_never_fits(rooms, prompt_len)
        if not wait:
            raise _no_room(shortage)
        ticket = _QueuedRequest(rooms, prompt_len, held, asyncio.get_running_loop().create_future())
        self._note(ticket, shortage)
        self._tickets.append(ticket)
        try:
            async with asyncio.timeout(self.patience):
                await ticket.granted
        except TimeoutError as error:
            raise _no_room(ticket.shortage) from error
        finally:
            if ticket in self._tickets:
                self._tickets.remove(ticket)
                self._advance()

    def fits_now(self, rooms: Sequence[Reservation], prompt_len: int) -> bool:
        """Whether `enter` would reserve rooms at once."""
        held: list[str] = []
        fits = not self._tickets and self._admit(rooms, prompt_len, held) is None
        for plan_id in held:
            self.ledger.release(plan_id)
        return fits

    def enter_now(self, room: Reservation, *, prompt_len: int, held: list[str]) -> None:
        """Reserves a room at once. While others wait, it must need nothing new.

        Raises:
            BankFull, CaptureOverflow: there is no room.
        """
        if self._tickets:
            lacking = self.ledger.lacks(room.plan)
            del lacking["intervals"]  # every new plan has some of its own
            if room.plan.captures or lacking.total():
                raise _no_room(None)
        shortage = self._admit([room], prompt_len, held)
        if shortage is not None:
            self.refuse_what_never_fits([room], prompt_len)
            raise _no_room(shortage)

    def observe(self, name: str, need: CaptureNeed, held: list[str]) -> None:
        """Changes what is reserved for captures beside a running request's plan, at once.

        While others wait, nothing more may be reserved, because they came first.

        Args:
            name: of the reservation; see `CapacityLedger.observe`.
            need: what is reserved from now on.
            held: gets the name while something is reserved, for `leave`.

        Raises:
            BankFull, CaptureOverflow: there is no room.
        """
        before = self.ledger.observed(name)
        if self._tickets and (need.rows > before.rows or need.sites > before.sites):
            raise _no_room(None)
        shortage = self.ledger.observe(name, need, max_step_tokens=self.step_tokens)
        if shortage is not None:
            raise _no_room(shortage)
        if name in held:
            held.remove(name)
        if need.sites:
            held.append(name)
        self._advance()

    def leave(self, held: list[str]) -> None:
        """Gives back what ids hold, and lets in who waits; empties `held`."""
        for plan_id in held:
            self.ledger.release(plan_id)
        held.clear()
        self._advance()

    def close(self, error: RheostatError) -> None:
        """Refuses all who wait."""
        for ticket in self._tickets:
            if not ticket.granted.done():
                ticket.granted.set_exception(error)
        self._tickets.clear()

    def _advance(self) -> None:
        """Lets in who comes next, as far as there is room."""
        while self._tickets:
            ticket = self._tickets[0]
            if ticket.granted.done():  # it gave up, and has not left yet
                self._tickets.popleft()
                continue
            if self._still_short(ticket):
                return
            shortage = self._admit(ticket.rooms, ticket.prompt_len, ticket.held)
            if shortage is not None:
                self._note(ticket, shortage)
                return
            self._tickets.popleft()
            ticket.granted.set_result(None)

    def _note(self, ticket: _QueuedRequest, shortage: Shortage | None) -> None:
        ticket.shortage = shortage
        ticket.used = self.ledger.used(shortage.resource) if shortage is not None else 0

    def _still_short(self, ticket: _QueuedRequest) -> bool:
        """Whether too little came free since to look again, which takes long for large plans.

        What the first in line needs beyond what others hold can only grow while it waits. Rows of
        captures are an exception: once no step can overflow the ring, as many enter as come.
        """
        shortage = ticket.shortage
        if shortage is None or shortage.resource == "capture_rows":
            return False
        freed = ticket.used - self.ledger.used(shortage.resource)
        return freed < shortage.needed - shortage.free

    def _admit(
        self, rooms: Sequence[Reservation], prompt_len: int, held: list[str]
    ) -> Shortage | None:
        shortage, entered = _enter(self.ledger, rooms, prompt_len, self.step_tokens)
        held += entered
        return shortage

    def refuse_what_never_fits(self, rooms: Sequence[Reservation], prompt_len: int) -> None:
        """Refuses what there is no room for even in an empty engine.

        Raises:
            BankFull, CaptureOverflow: there never is.
        """
        empty = CapacityLedger(self._capacity)
        shortage, _ = _enter(empty, rooms, prompt_len, self.step_tokens)
        if shortage is not None:
            raise _refusal(shortage, retry_after=None)


def _enter(
    ledger: CapacityLedger, rooms: Sequence[Reservation], prompt_len: int, step_tokens: int
) -> tuple[Shortage | None, list[str]]:
    """Enters all rooms or none; says what is missing, and which ids entered."""
    entered: list[str] = []
    for plan, runs in rooms:
        shortage = ledger.admit(
            plan, prompt_len=prompt_len, max_step_tokens=step_tokens, samples=runs
        )
        if shortage is not None:
            for plan_id in entered:
                ledger.release(plan_id)
            return shortage, []
        entered.append(plan.request_id)
    return None, entered


def _no_room(shortage: Shortage | None) -> RheostatError:
    """Why there is no room now; None: others wait in line."""
    if shortage is None:
        return BankFull(
            "others wait for room and come first; try again",
            field="steering",
            retry_after=RETRY,
        )
    return _refusal(shortage, retry_after=RETRY)


def _refusal(shortage: Shortage, *, retry_after: float | None) -> RheostatError:
    what = shortage.resource.replace("_", " ")
    text = f"the request needs {shortage.needed} more {what}; {shortage.free} are free"
    if shortage.resource == "capture_rows":
        return CaptureOverflow(
            f"{text}. Capture fewer sites or tokens, or raise the server's --capture-mib",
            field="captures",
            retry_after=retry_after,
        )
    if shortage.resource == "bank_rows":
        advice = "Use fewer distinct configurations, or raise the server's --bank-mib"
    else:
        advice = f"Use fewer different combinations of interventions; the number of {what} is fixed"
    return BankFull(f"{text}. {advice}", field="steering", retry_after=retry_after)
