"""A query of the engine whose answer is shared by all callers.

Why: a query is a collective call, for which every worker waits between two steps. Without this
class, each call of `GetStats` would delay a step of every request. At most one query runs at a
time, whatever the number of callers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedQuery(Generic[T]):
    """A query whose answer is cached for `keep` seconds. Used on the event loop alone."""

    def __init__(self, query: Callable[[], Awaitable[T]], *, keep: float) -> None:
        self._query = query
        self._keep = keep
        self._answer: T | None = None
        self._kept_until = 0.0
        self._running: asyncio.Task[T] | None = None
        self._outdated: asyncio.Task[T] | None = None
        """The running call, if it began before the last `expire`."""
        self._next: asyncio.Task[T] | None = None
        """Runs after the running call, for callers that need an answer to a later call."""

    async def recent(self) -> T:
        """The cached answer, or the answer of the running call, or of a new call.

        Raises:
            EngineLost: the engine is gone.
        """
        if self._answer is not None and asyncio.get_running_loop().time() < self._kept_until:
            return self._answer
        if self._running is None or self._running is self._outdated:
            return await self.fresh()
        return await asyncio.shield(self._running)

    async def fresh(self) -> T:
        """The answer of a call that begins later than now. Callers share it until it begins.

        Raises:
            EngineLost: the engine is gone.
        """
        if self._running is None:
            self._running = _start(self._call())
            return await asyncio.shield(self._running)
        if self._next is None:
            self._next = _start(self._call_after(self._running))
        return await asyncio.shield(self._next)

    def expire(self) -> None:
        """Makes `recent` ignore answers of calls that have begun already."""
        self._answer = None
        self._outdated = self._running

    async def _call(self) -> T:
        call = asyncio.current_task()
        try:
            answer = await self._query()
            if call is not self._outdated:
                self._answer = answer
                self._kept_until = asyncio.get_running_loop().time() + self._keep
            return answer
        finally:
            self._running = None

    async def _call_after(self, running: asyncio.Task[T]) -> T:
        await asyncio.wait({running})
        self._running, self._next = self._next, None
        return await self._call()


def _start(call: Coroutine[None, None, T]) -> asyncio.Task[T]:
    """Starts a task. asyncio does not log its error, because all callers may have ended."""
    task = asyncio.create_task(call)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
