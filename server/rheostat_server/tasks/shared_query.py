"""One question to the engine, asked once for all who want its answer.

Why: a question is a collective call, for which every worker waits between two steps. Without this
class, each call of `GetStats` would delay a step of every request.

Invariant: at most one call is in flight, whatever the number of callers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Generic, TypeVar

T = TypeVar("T")


class SharedQuery(Generic[T]):
    """A question whose answer is shared and kept for a moment. Lives on the event loop."""

    def __init__(self, ask: Callable[[], Awaitable[T]], *, keep: float) -> None:
        """Nothing has been asked.

        Args:
            ask: asks the engine.
            keep: seconds for which an answer may be given to later callers.
        """
        self._ask = ask
        self._keep = keep
        self._answer: T | None = None
        self._kept_until = 0.0
        self._running: asyncio.Task[T] | None = None
        self._outdated: asyncio.Task[T] | None = None
        """The call in flight, if it began before the last `expire`."""
        self._next: asyncio.Task[T] | None = None
        """Runs after the call in flight, for those who want an answer that began later."""

    async def recent(self) -> T:
        """The kept answer, or that of the call in flight, or of a new one.

        Raises:
            EngineLost: the engine is gone.
        """
        if self._answer is not None and asyncio.get_running_loop().time() < self._kept_until:
            return self._answer
        if self._running is None or self._running is self._outdated:
            return await self.fresh()
        return await asyncio.shield(self._running)

    async def fresh(self) -> T:
        """The answer of a call that begins after this one. Later callers share it until it begins.

        Raises:
            EngineLost: the engine is gone.
        """
        if self._running is None:
            self._running = _started(self._call())
            return await asyncio.shield(self._running)
        if self._next is None:
            self._next = _started(self._call_after(self._running))
        return await asyncio.shield(self._next)

    def expire(self) -> None:
        """Lets `recent` give no answer of a call that began before now."""
        self._answer = None
        self._outdated = self._running

    async def _call(self) -> T:
        call = asyncio.current_task()
        try:
            answer = await self._ask()
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


def _started(call: Coroutine[None, None, T]) -> asyncio.Task[T]:
    """A task whose error is never reported as unread: those who asked may be gone by then."""
    task = asyncio.create_task(call)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
