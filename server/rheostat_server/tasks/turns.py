"""Spreads work that comes all at once over iterations of the event loop.

Why: hundreds of requests that arrive together, or whose rows come in one step, are many
milliseconds of work. Between two iterations the loop receives tokens of the engine. So tokens wait
for a few pieces of such work, and not for all of it.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from rheostat_server.tasks.futures import resolve

_WOKEN = 8
"""The most waiting callers of `TimedTurns` that go on in an iteration, however long each takes."""


class Turns:
    """Calls a limited number of functions in each iteration of the event loop, in order."""

    def __init__(self, most: int, after: "Turns | None" = None) -> None:
        """Calls at most `most` functions in an iteration; one while functions of `after` wait."""
        self._most = self._free = most
        self._after = after
        self._waiting: deque[Callable[[], object]] = deque()
        self._scheduled = False
        """Whether `_begin_iteration` will be called."""

    @property
    def waiting(self) -> bool:
        """Whether a function waits for a later iteration."""
        return bool(self._waiting)

    @property
    def free(self) -> bool:
        """Whether `call` would call its work now."""
        waits = self._after is not None and self._after._waiting
        return self._free == self._most if waits else self._free > 0

    def call(self, work: Callable[[], object]) -> None:
        """Calls `work`, now or in a later iteration. It may not raise."""
        if self.take():
            work()
        else:
            self._schedule()
            self._waiting.append(work)

    def take(self) -> bool:
        """Takes a free turn of this iteration; returns whether there is one."""
        if not self.free:
            return False
        self._schedule()
        self._free -= 1
        return True

    def call_later(self, work: Callable[[], object]) -> None:
        """Calls `work` in a later iteration, even if there is a free turn. It may not raise."""
        self._schedule()
        self._waiting.append(work)

    async def turn(self) -> None:
        """Returns when it is the caller's turn."""
        if self.take():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.call_later(partial(resolve, future, None))
        await future

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._begin_iteration)

    def _begin_iteration(self) -> None:
        self._free, self._scheduled = self._most, False
        try:
            while self._waiting and self.free:
                self._free -= 1
                self._waiting.popleft()()
        finally:  # work that raises must not stop the work after it
            if self._waiting or self._free < self._most:
                self._schedule()


class TimedTurns:
    """Lets callers work for a limited time in each iteration of the event loop, in order.

    An iteration does many cheap pieces of work, or few expensive ones.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.thread_time) -> None:
        """No more work begins once `clock` has counted `seconds` in an iteration.

        By default the clock counts the processor time of the thread. If it also counted waits for a
        processor, callers would wait longest on a busy machine.

        Apart from that, up to `_WOKEN` callers that have waited do a piece of work each.
        """
        self._seconds = seconds
        self._clock = clock
        self._end: float | None = None
        """The time after which no more work begins in this iteration; None if no work began."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def turn(self) -> None:
        """Returns when the caller may do a piece of work, which must not wait."""
        if not self._waiting and self._has_time():
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def _has_time(self) -> bool:
        now = self._clock()
        if self._end is None:
            self._end = now + self._seconds
            asyncio.get_running_loop().call_soon(self._begin_iteration)
        return now < self._end

    def _begin_iteration(self) -> None:
        self._end = None
        woken = 0
        while self._waiting and woken < _WOKEN:
            future = self._waiting.popleft()
            if not future.done():  # otherwise the caller was cancelled
                future.set_result(None)
                woken += 1
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._begin_iteration)
