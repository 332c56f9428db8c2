"""Admission to the engine: reserves capacity for requests, first come, first served.

Background requests, such as the cells of a sweep, have a queue of their own. Ordinary requests come
before them, but only `_OVERTAKING` one after the other: then a background request is next, so that
a sweep always gets on.

Invariants: a request gets everything that it needs, or nothing. While a request waits, requests
that come after it in this order may share resources that others have reserved, but may not reserve
new ones.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rheostat_engine import Capacity, CapacityLedger, CaptureNeed, Plan, Shortage
from rheostat_server.errors import BankFull, CaptureOverflow, RheostatError
from rheostat_server.limits import RETRY_SECONDS

_OVERTAKING = 16
"""Ordinary requests that may be admitted while a background request waits. Then it is next."""


class Reservation(NamedTuple):
    """Capacity for the samples of a request that run the same plan."""

    plan: Plan
    """The plan."""
    samples: int = 1
    """Number of samples that run at the same time."""


@dataclass(eq=False)
class _QueuedRequest:
    """A request that waits for capacity."""

    reservations: Sequence[Reservation]
    prompt_len: int
    reserved: list[str]
    granted: asyncio.Future[None]
    shortage: Shortage | None = None
    """Why the last attempt failed. None: there was no attempt, because others were first."""
    used: int = 0
    """How much of the short resource was reserved at the last attempt."""


class AdmissionQueue:
    """The ledger of the engine's capacity, and the requests that wait for capacity."""

    def __init__(self, capacity: Capacity, *, step_tokens: int, timeout: float) -> None:
        """Makes an empty queue with an empty ledger.

        Args:
            capacity: the capacity of the engine.
            step_tokens: the most tokens that one step computes.
            timeout: seconds after which a waiting request is refused.
        """
        self.ledger = CapacityLedger(capacity)
        self._capacity = capacity
        self.step_tokens = step_tokens
        self.timeout = timeout
        self._ordinary: deque[_QueuedRequest] = deque()
        self._background: deque[_QueuedRequest] = deque()
        self._overtaken = 0
        """Ordinary requests admitted since a background request was, while one waited."""

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._ordinary) + len(self._background)

    async def reserve(
        self,
        reservations: Sequence[Reservation],
        *,
        prompt_len: int,
        wait: bool,
        reserved: list[str],
        background: bool = False,
    ) -> None:
        """Reserves capacity for a request; waits for it in turn.

        Args:
            reservations: everything that the request needs.
            prompt_len: tokens of its prompt.
            wait: whether the request waits if the engine has too little capacity now.
            reserved: receives the ids of the new ledger entries, for `release`. A request that is
                cancelled at the last moment has entries too.
            background: whether ordinary requests come first.

        Raises:
            BankFull, CaptureOverflow: the engine has too little capacity, now or even when empty.
        """
        shortage = None
        if self._is_next(background):
            shortage = self._admit(reservations, prompt_len, reserved)
            if shortage is None:
                self._count_admitted(background)
                return
        self.check_ever_fits(reservations, prompt_len)
        if not wait:
            raise _no_capacity(shortage)
        queued = _QueuedRequest(
            reservations, prompt_len, reserved, asyncio.get_running_loop().create_future()
        )
        self._note_shortage(queued, shortage)
        queue = self._background if background else self._ordinary
        if background and not queue:  # an earlier one may have left without being admitted
            self._overtaken = 0
        queue.append(queued)
        try:
            async with asyncio.timeout(self.timeout):
                await queued.granted
        except TimeoutError as error:
            raise _no_capacity(queued.shortage, waited=self.timeout) from error
        finally:
            if queued in queue:
                queue.remove(queued)
                self._advance()

    def fits_now(
        self, reservations: Sequence[Reservation], prompt_len: int, *, background: bool = False
    ) -> bool:
        """Whether `reserve` would return without waiting."""
        reserved: list[str] = []
        fits = self._is_next(background) and self._admit(reservations, prompt_len, reserved) is None
        for plan_id in reserved:
            self.ledger.release(plan_id)
        return fits

    def reserve_now(
        self, reservation: Reservation, *, prompt_len: int, reserved: list[str]
    ) -> None:
        """Reserves capacity without waiting. While others come first, it may only share resources.

        Raises:
            BankFull, CaptureOverflow: the engine has too little capacity now.
        """
        acquires = bool(self.waiting) and self._acquires(reservation.plan)
        if acquires and not self._is_next(background=False):
            raise _no_capacity(None)
        shortage = self._admit([reservation], prompt_len, reserved)
        if shortage is not None:
            self.check_ever_fits([reservation], prompt_len)
            raise _no_capacity(shortage)
        if acquires:
            self._count_admitted(background=False)

    def reserve_captures(self, name: str, need: CaptureNeed, reserved: list[str]) -> None:
        """Changes the capacity that observers of a running request use, without waiting.

        While requests wait that come first, it may only shrink.

        Args:
            name: name of the ledger entry; see `CapacityLedger.observe`.
            need: the capacity from now on.
            reserved: contains the name while `need` is not empty, for `release`.

        Raises:
            BankFull, CaptureOverflow: the engine has too little capacity now.
        """
        before = self.ledger.observed(name)
        grows = need.rows > before.rows or need.sites > before.sites
        if grows and not self._is_next(background=False):
            raise _no_capacity(None)
        shortage = self.ledger.observe(name, need, max_step_tokens=self.step_tokens)
        if shortage is not None:
            raise _no_capacity(shortage)
        if name in reserved:
            reserved.remove(name)
        if need.sites:
            reserved.append(name)
        if grows:
            self._count_admitted(background=False)
        self._advance()

    def release(self, reserved: list[str]) -> None:
        """Releases ledger entries, empties `reserved`, and admits waiting requests."""
        if not reserved:
            return
        for plan_id in reserved:
            self.ledger.release(plan_id)
        reserved.clear()
        self._advance()

    def close(self, error: RheostatError) -> None:
        """Refuses all waiting requests."""
        for queue in (self._ordinary, self._background):
            for queued in queue:
                if not queued.granted.done():
                    queued.granted.set_exception(error)
            queue.clear()

    def _advance(self) -> None:
        """Admits waiting requests in order, until one does not fit."""
        while self.waiting:
            background = not self._ordinary or self._background_is_next
            queue = self._background if background else self._ordinary
            queued = queue[0]
            if queued.granted.done():  # its wait has ended, and it is about to leave the queue
                queue.popleft()
                continue
            if self._still_short(queued):
                return
            shortage = self._admit(queued.reservations, queued.prompt_len, queued.reserved)
            if shortage is not None:
                self._note_shortage(queued, shortage)
                return
            queue.popleft()
            self._count_admitted(background)
            queued.granted.set_result(None)

    @property
    def _background_is_next(self) -> bool:
        """Whether enough ordinary requests came before the background requests that wait."""
        return bool(self._background) and self._overtaken >= _OVERTAKING

    def _is_next(self, background: bool) -> bool:
        """Whether a request that comes now is next."""
        if background:
            return not self.waiting
        return not self._ordinary and not self._background_is_next

    def _count_admitted(self, background: bool) -> None:
        """Counts a request that has acquired capacity, maybe before one of the other queue."""
        overtaken = self._ordinary if background else self._background
        if background:
            self._overtaken = 0
        elif overtaken:
            self._overtaken += 1
        if overtaken:
            # It may share what was acquired, so `_still_short` would err.
            overtaken[0].shortage = None

    def _acquires(self, plan: Plan) -> bool:
        """Whether a plan needs capacity that others have not reserved."""
        lacking = self.ledger.additional_needs(plan)
        del lacking["intervals"]  # every new plan has some of its own
        return bool(plan.captures) or lacking.total() > 0

    def _note_shortage(self, queued: _QueuedRequest, shortage: Shortage | None) -> None:
        queued.shortage = shortage
        queued.used = self.ledger.used(shortage.resource) if shortage is not None else 0

    def _still_short(self, queued: _QueuedRequest) -> bool:
        """Whether so little was released that another attempt must fail.

        An attempt takes long for a large plan. The capacity that the first request lacks can only
        grow while it waits. Rows of captures are an exception: once no step can overflow the ring,
        any number of requests fits.
        """
        shortage = queued.shortage
        if shortage is None or shortage.resource == "capture_rows":
            return False
        freed = queued.used - self.ledger.used(shortage.resource)
        return freed < shortage.needed - shortage.free

    def _admit(
        self, reservations: Sequence[Reservation], prompt_len: int, reserved: list[str]
    ) -> Shortage | None:
        return _enter(self.ledger, reservations, prompt_len, self.step_tokens, reserved)

    def check_ever_fits(self, reservations: Sequence[Reservation], prompt_len: int) -> None:
        """Checks that an empty engine has the capacity for a request.

        Raises:
            BankFull, CaptureOverflow: it does not.
        """
        empty = CapacityLedger(self._capacity)
        shortage = _enter(empty, reservations, prompt_len, self.step_tokens, [])
        if shortage is not None:
            raise _refusal(shortage, retry_after=None)


def _enter(
    ledger: CapacityLedger,
    reservations: Sequence[Reservation],
    prompt_len: int,
    step_tokens: int,
    reserved: list[str],
) -> Shortage | None:
    """Enters all reservations, and adds their ids to `reserved`; enters none if one lacks room."""
    entered: list[str] = []
    for plan, samples in reservations:
        shortage = ledger.admit(
            plan, prompt_len=prompt_len, max_step_tokens=step_tokens, samples=samples
        )
        if shortage is not None:
            for plan_id in entered:
                ledger.release(plan_id)
            return shortage
        entered.append(plan.request_id)
    reserved += entered
    return None


def _no_capacity(shortage: Shortage | None, *, waited: float | None = None) -> RheostatError:
    """The error of a request that is refused now, or after `waited` seconds.

    None instead of a shortage: other requests came first.
    """
    since = "" if waited is None else f" after {waited:g} s, the server's --capacity-wait"
    if shortage is None:
        return BankFull(
            f"other requests wait for capacity and come first{since}; try again",
            field="steering",
            retry_after=RETRY_SECONDS,
        )
    return _refusal(shortage, retry_after=RETRY_SECONDS, since=since)


def _refusal(shortage: Shortage, *, retry_after: float | None, since: str = "") -> RheostatError:
    what = shortage.resource.replace("_", " ")
    text = f"the request needs {shortage.needed} more {what}; {shortage.free} are free{since}"
    if shortage.resource == "capture_rows":
        return CaptureOverflow(
            f"{text}. Capture fewer sites or tokens, or raise the server's --capture-mib",
            field="captures",
            retry_after=retry_after,
        )
    if shortage.resource == "bank_rows":
        advice = "Use fewer distinct configurations, or raise the server's --bank-mib"
    elif shortage.resource == "row_sums":
        advice = f"Read means of prompts at fewer sites; the number of {what} is fixed"
    else:
        advice = f"Use fewer different combinations of interventions; the number of {what} is fixed"
    return BankFull(f"{text}. {advice}", field="steering", retry_after=retry_after)
