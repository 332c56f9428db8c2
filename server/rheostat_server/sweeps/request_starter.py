"""Starts the requests of a sweep: no more than the engine has room for, others first."""

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from rheostat_server.errors import CacheSuspect, ResourceExhausted
from rheostat_server.requests.manager import RequestManager

_TURN = 0.002
"""Seconds after which a cell in the background looks again whether requests wait."""

_STALE = 1.0
"""Seconds after which a report of vLLM's queue is no longer believed; see `_until_nobody_waits`."""

_LATER = 0.05
"""Seconds after which a cell that the engine has no room for tries again."""

T = TypeVar("T")


class RequestStarter:
    """Starts the requests of one sweep."""

    def __init__(self, manager: RequestManager, *, background: bool) -> None:
        """Nothing runs yet.

        Args:
            manager: runs the requests.
            background: whether they wait while requests of others wait.
        """
        self._manager = manager
        self._background = background
        self._started = 0
        """Number of requests so far, for their ids."""
        self._turn = asyncio.Lock()
        """Held by the request that waits to start. The others wait for the lock, which costs
        nothing, because a sweep may have hundreds."""
        self._full_until = 0.0
        """Time of the event loop until which no request starts, because the engine was full."""
        self._unique = uuid.uuid4().hex[:12]

    async def run(self, ask_as: Callable[[str, RequestManager], Coroutine[None, None, T]]) -> T:
        """Calls a function with a new id, for one request.

        Waits while the engine has no room, or while other requests wait. Calls it again if it
        found no room after all.
        """
        while True:
            await self._until_one_may_start()
            self._started += 1
            try:
                with self._counted():
                    return await ask_as(f"{self._unique}/{self._started}", self._manager)
            except (ResourceExhausted, CacheSuspect) as error:
                if error.retry_after is None:
                    raise
            self._full_until = asyncio.get_running_loop().time() + _LATER

    def _counted(self) -> AbstractContextManager[None]:
        if not self._background:
            return nullcontext()
        return self._manager.background_pace.running(asyncio.get_running_loop().time)

    async def _until_one_may_start(self) -> None:
        """Returns when a request may start."""
        now = asyncio.get_running_loop().time
        async with self._turn:
            while (seconds := self._full_until - now()) > 0:
                await asyncio.sleep(seconds)
            if self._background:
                await self._until_nobody_waits()
                await self._until_others_had_their_turn()

    async def _until_nobody_waits(self) -> None:
        """Returns when no other request waits.

        vLLM reports its queue with each step. An idle engine takes no step, so its last report may
        name requests that have left the queue since.
        """
        manager, now = self._manager, asyncio.get_running_loop().time
        report, since = manager.backend.queue_stats(), now()
        while manager.foreground_requests:
            if (latest := manager.backend.queue_stats()) is not report:
                report, since = latest, now()
            believed = report.waiting and now() - since < _STALE
            if not believed and not manager.admission_queue.waiting:
                return
            await asyncio.sleep(_TURN)

    async def _until_others_had_their_turn(self) -> None:
        """Returns when a request may start beside those for which the engine generates now.

        A cell mostly takes one step, so requests that run after a step are others.
        """
        manager, now = self._manager, asyncio.get_running_loop().time
        while manager.foreground_requests and manager.backend.queue_stats().running:
            if manager.background_pace.allows(now()):
                return
            await asyncio.sleep(_TURN)
