"""Holds requests in the scheduler: they are scheduled no further until they are released.

Why as after a preemption
    A request that waits in the running batch would keep its KV blocks and its slot, so others would
    pay for it. So a running request that is held is preempted: its blocks are freed, and its tokens
    are computed again once it is released. Everything that must be right after a preemption is
    right after a hold.
Why they do not count
    The requests that are held count neither as running nor as waiting. So the engine sleeps if
    there are no others. A message of the server wakes it.

Invariants: from the step after the message on, no token of a held request is computed. Tokens of
steps that run already still arrive. A request that ends while it is held is forgotten.
"""

import time
from collections.abc import Iterable
from typing import Any, cast

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import AsyncMPClient
from vllm.v1.request import Request

_ATTRIBUTE = "rheostat_holds"
_METHOD = "rheostat_hold"


class HeldRequests:
    """The requests of a scheduler that are held."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Replaces methods of the scheduler. No request is held."""
        self._scheduler = scheduler
        self._ids: set[str] = set()
        """Ids of all held requests."""
        self._taken: dict[str, Request] = {}
        """The held requests that are in none of the scheduler's queues."""
        self._schedule = scheduler.schedule
        self._free = scheduler._free_request
        scheduler.schedule = self._schedule_others
        scheduler._free_request = self._free_and_forget
        setattr(scheduler, _ATTRIBUTE, self)
        setattr(EngineCore, _METHOD, _hold)

    def hold(self, ids: Iterable[str]) -> None:
        """Holds requests from the next step on. Requests that have ended are ignored."""
        self._ids.update(request_id for request_id in ids if request_id in self._scheduler.requests)

    def release(self, ids: Iterable[str]) -> None:
        """Puts requests back, before those that wait."""
        ids = list(ids)
        self._ids.difference_update(ids)
        for request_id in reversed(ids):
            request = self._taken.pop(request_id, None)
            if request is not None:
                self._scheduler.waiting.prepend_request(request)

    def _schedule_others(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if len(self._taken) < len(self._ids):
            self._take()
        return self._schedule(throttle_prefills)

    def _take(self) -> None:
        """Takes held requests out of the scheduler's queues."""
        scheduler = self._scheduler
        held = {
            scheduler.requests[request_id]
            for request_id in self._ids
            if request_id not in self._taken
        }
        running = [request for request in scheduler.running if request in held]
        if running:
            scheduler.running = [request for request in scheduler.running if request not in held]
            now = time.monotonic()
            for request in reversed(running):
                scheduler._preempt_request(
                    request, now, drop_stale_output=scheduler.requires_kv_delivery
                )
        taken = [request for request in scheduler.waiting if request in held]
        if taken:
            scheduler.waiting.remove_requests(taken)
            scheduler.deferred_waiting.difference_update(taken)
            self._taken.update((request.request_id, request) for request in taken)

    def _free_and_forget(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:  # vLLM's own
        self._ids.discard(request.request_id)
        self._taken.pop(request.request_id, None)
        return self._free(request, delay_free_blocks)


async def send_holds(llm: AsyncLLM, ids: Iterable[str], *, held: bool) -> None:
    """Holds or releases requests, by the ids with which they were added.

    Returns once the engine's core has the message. Requests that have ended are ignored.
    """
    known = llm.output_processor.external_req_ids
    own = [inner for request_id in ids for inner in known.get(request_id, ())]
    client = cast(AsyncMPClient, llm.engine_core)
    await client.call_utility_async(_METHOD, own, held)


def _hold(core: EngineCore, ids: list[str], held: bool) -> None:
    """Holds or releases requests, by vLLM's ids; a method of the engine's core."""
    requests: HeldRequests = getattr(core.scheduler, _ATTRIBUTE)
    if held:
        requests.hold(ids)
    else:
        requests.release(ids)
