"""Room in the engine: who enters, and when.

Invariants: nothing enters without room for all of it; first come, first served: as long as one
waits, nobody who came later takes anything, however little it needs.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rheostat_engine import Capacity, CapacityLedger, Plan, Shortage
from rheostat_server.errors import BankFull, CaptureOverflow, RheostatError

RETRY = 1.0
"""Seconds after which another attempt makes sense where nobody can know."""

_SHARED = ("bank_rows", "directions", "steps", "slots", "token_rules")
"""What a configuration takes, and equal ones share."""


@dataclass(eq=False)
class _Ticket:
    """A request that waits."""

    plans: Sequence[Plan]
    prompt_len: int
    held: list[str]
    granted: asyncio.Future[None]
    shortage: Shortage | None = None
    used: int = 0
    """How much was held of what is short when it was found to be."""


class Line:
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
        self._step_tokens = step_tokens
        self.patience = patience
        self._tickets: deque[_Ticket] = deque()

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._tickets)

    async def enter(
        self, plans: Sequence[Plan], *, prompt_len: int, wait: bool, held: list[str]
    ) -> None:
        """Reserves what plans need, all together, in turn.

        Args:
            plans: of one request.
            prompt_len: tokens of its prompt.
            wait: whether it waits if there is no room now.
            held: gets the ids that hold something from then on, for `leave`; also if this is
                cancelled at the last moment.

        Raises:
            BankFull, CaptureOverflow: there is no room, not in time, or never will be.
        """
        shortage = None
        if not self._tickets:
            shortage = self._admit(plans, prompt_len, held)
            if shortage is None:
                return
        self.refuse_what_never_fits(plans, prompt_len)
        if not wait:
            raise _no_room(shortage)
        ticket = _Ticket(plans, prompt_len, held, asyncio.get_running_loop().create_future())
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

    def enter_now(self, plan: Plan, *, prompt_len: int, held: list[str]) -> None:
        """Reserves what a plan needs at once. Where others wait, it must need nothing new.

        Raises:
            BankFull, CaptureOverflow: there is no room.
        """
        if self._tickets and any(self.ledger.new_keys(plan, resource) for resource in _SHARED):
            raise _no_room(None)
        shortage = self._admit([plan], prompt_len, held)
        if shortage is not None:
            self.refuse_what_never_fits([plan], prompt_len)
            raise _no_room(shortage)

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
            if self._still_short(ticket):
                return
            shortage = self._admit(ticket.plans, ticket.prompt_len, ticket.held)
            if shortage is not None:
                self._note(ticket, shortage)
                return
            self._tickets.popleft()
            ticket.granted.set_result(None)

    def _note(self, ticket: _Ticket, shortage: Shortage | None) -> None:
        ticket.shortage = shortage
        ticket.used = self.ledger.used(shortage.resource) if shortage is not None else 0

    def _still_short(self, ticket: _Ticket) -> bool:
        """Whether too little came free since to look again, which takes long for large plans.

        What the first in line needs beyond what others hold can only grow while it waits.
        """
        shortage = ticket.shortage
        if shortage is None:
            return False
        freed = ticket.used - self.ledger.used(shortage.resource)
        return freed < shortage.needed - shortage.free

    def _admit(self, plans: Sequence[Plan], prompt_len: int, held: list[str]) -> Shortage | None:
        shortage, entered = _enter(self.ledger, plans, prompt_len, self._step_tokens)
        held += entered
        return shortage

    def refuse_what_never_fits(self, plans: Sequence[Plan], prompt_len: int) -> None:
        """Refuses plans for which there is no room even in an empty engine.

        Raises:
            BankFull, CaptureOverflow: there never is.
        """
        empty = CapacityLedger(self._capacity)
        shortage, _ = _enter(empty, plans, prompt_len, self._step_tokens)
        if shortage is not None:
            raise _refusal(shortage, retry_after=None)


def _enter(
    ledger: CapacityLedger, plans: Sequence[Plan], prompt_len: int, step_tokens: int
) -> tuple[Shortage | None, list[str]]:
    """Enters all plans or none; says what is missing, and which ids entered."""
    entered: list[str] = []
    for plan in plans:
        shortage = ledger.admit(plan, prompt_len=prompt_len, max_step_tokens=step_tokens)
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
