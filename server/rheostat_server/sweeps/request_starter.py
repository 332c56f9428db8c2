"""Starts the requests of a sweep when the engine has room for them, after requests of others."""

import asyncio
import uuid
from collections.abc import Callable, Coroutine
from typing import TypeVar

from rheostat_server.errors import CacheSuspect, ResourceExhausted
from rheostat_server.requests.manager import RequestManager
from rheostat_server.tasks.turns import Turns

_TURN = 0.002
"""Seconds after which a request in the background looks again whether requests wait."""

_STALE = 1.0
"""Seconds after which a report of vLLM's queue is no longer believed; see `_until_nobody_waits`."""

_LONGEST_WAIT = 5.0
"""Seconds after which a request in the background no longer waits for others."""

_LONGEST_STEP = 0.1
"""Seconds after which a request in the background no longer waits for the end of a step."""

_LATER = 0.05
"""Seconds after which a request that the engine has no room for tries again."""

_STARTS = 4
"""Requests that start in one iteration of the event loop while other requests run. Each takes about
a quarter of a millisecond, and tokens of others wait for the iteration."""

STARTS_ALONE = 8
"""Requests that start in one iteration while no other request runs. Of the requests with several
samples, one starts in an iteration."""

T = TypeVar("T")


class RequestStarter:
    """Starts the requests of one sweep."""

    def __init__(self, manager: RequestManager, *, background: bool) -> None:
        """Nothing runs yet.

        Args:
            manager: runs the requests.
            background: whether they wait while requests of others wait, and let the engine hold
                them while it generates for others.
        """
        self._manager = manager
        self._background = background
        self._started = 0
        """Number of requests so far, for their ids."""
        self._turn = asyncio.Lock()
        """Held by the request that waits to start. The others wait for the lock, which costs
        nothing, because a sweep may have hundreds."""
        self._beside_others, self._alone = Turns(_STARTS), Turns(STARTS_ALONE)
        self._of_many_samples = Turns(1)
        self._full_until = 0.0
        """Time of the event loop until which no request starts, because the engine was full."""
        self._unique = uuid.uuid4().hex[:12]

    @property
    def at_once(self) -> int:
        """Prompts that may begin in one iteration of the event loop: one if other requests run.

        Starting a prompt may take milliseconds, and tokens of other requests wait for it.
        """
        return 1 if self._manager.client_requests else STARTS_ALONE

    def most_together(self, most: int) -> int:
        """The most samples that a request may have now: `most`, or one if other requests run."""
        return 1 if self._manager.client_requests else most

    async def run(
        self, ask_as: Callable[[str, RequestManager], Coroutine[None, None, T]], samples: int = 1
    ) -> T:
        """Calls a function with a new id, for one request.

        Waits while the engine has no room, or while other requests wait. Calls it again if it
        found no room after all.

        Args:
            ask_as: the function, which runs the request.
            samples: the number of the request's samples.
        """
        while True:
            await self._until_one_may_start()
            if self._manager.client_requests:
                turns = self._beside_others
            else:
                turns = self._alone if samples == 1 else self._of_many_samples
            await turns.turn()
            self._started += 1
            try:
                return await ask_as(f"{self._unique}/{self._started}", self._manager)
            except (ResourceExhausted, CacheSuspect) as error:
                if error.retry_after is None:
                    raise
            self._full_until = asyncio.get_running_loop().time() + _LATER

    async def _until_one_may_start(self) -> None:
        """Returns when a request may start."""
        now = asyncio.get_running_loop().time
        if not self._background and not self._turn.locked() and self._full_until <= now():
            return
        async with self._turn:
            while (seconds := self._full_until - now()) > 0:
                await asyncio.sleep(seconds)
            if self._background:
                await self._until_nobody_waits()
                await self._until_a_step_has_passed()

    async def _until_nobody_waits(self) -> None:
        """Returns when no other request waits, or at the latest after `_LONGEST_WAIT`.

        vLLM reports its queue with each step. An idle engine takes no step, so its last report may
        name requests that have left the queue since.
        """
        manager, now = self._manager, asyncio.get_running_loop().time
        report, since = manager.backend.queue_stats(), now()
        end = since + _LONGEST_WAIT
        while manager.foreground_requests and now() < end:
            if (latest := manager.backend.queue_stats()) is not report:
                report, since = latest, now()
            believed = report.waiting and now() - since < _STALE
            if not believed and not manager.admission_queue.waiting:
                return
            await asyncio.sleep(_TURN)

    async def _until_a_step_has_passed(self) -> None:
        """Returns after a step of the engine, if it generates for others.

        So the requests of a sweep arrive in different steps, and no step becomes much longer.
        The engine then starts them together; see `rheostat_engine.adapters.background`.
        """
        manager, now = self._manager, asyncio.get_running_loop().time
        report, latest = manager.backend.queue_stats(), now() + _LONGEST_STEP
        while manager.foreground_requests and report.running and now() < latest:
            await asyncio.sleep(_TURN)
            if manager.backend.queue_stats() is not report:
                return
