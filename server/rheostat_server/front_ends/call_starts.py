"""Starts calls in order, a few in each iteration of the event loop.

The engine computes prompts that it has early in fewer steps. So while calls wait for their turn,
everything else about the calls that have started can wait: garbage collections, and what follows
after the engine has got a request.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from rheostat_server.tasks.garbage import allow_collections, postpone_collections
from rheostat_server.tasks.turns import Turns

STARTS = 8
"""Calls that start in one iteration of the event loop. If hundreds of requests that arrive together
were admitted in one iteration, the first tokens of the earliest would wait for the last."""

_LONGEST = 0.05
"""Seconds that a call stands back at most. A client that begins calls without end could otherwise
stop the answers to all others."""


class CallStarts:
    """The turns of calls to start. Used on the event loop alone."""

    def __init__(self, most: int = STARTS) -> None:
        """No call waits; at most `most` start in an iteration."""
        self._turns = Turns(most)
        self._returns = Turns(most)
        """The turns of calls that have stood back, to go on."""
        self._crowded = False
        """Whether calls wait for their turn, or have waited in the last iteration."""
        self._back: deque[tuple[float, asyncio.Future[None]]] = deque()
        """The calls that stand back, each with the time at which it goes on at the latest."""

    def call(self, start: Callable[[], object]) -> None:
        """Calls `start` now or in a later iteration. It may not raise."""
        self._turns.call(start)
        if self._turns.waiting and not self._crowded:
            self._crowded = True
            postpone_collections()
            asyncio.get_running_loop().call_soon(self._look)

    async def stand_back(self) -> None:
        """Returns once no call waits for its turn, at the latest after `_LONGEST` seconds."""
        if not self._crowded and not self._back:
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._back.append((loop.time() + _LONGEST, future))
        await future

    def _look(self) -> None:
        """Runs once in each iteration while calls wait for their turn."""
        loop = asyncio.get_running_loop()
        if not self._turns.waiting:
            loop.call_soon(self._end)  # after the tasks of the calls that have started last
            return
        postpone_collections()
        now = loop.time()
        while self._back and self._back[0][0] <= now:
            self._let_go_on()
        loop.call_soon(self._look)

    def _end(self) -> None:
        if self._turns.waiting:
            self._look()
            return
        self._crowded = False
        allow_collections()
        while self._back:
            self._let_go_on()

    def _let_go_on(self) -> None:
        _, future = self._back.popleft()

        def resolve() -> None:
            if not future.done():  # otherwise the call was cancelled
                future.set_result(None)

        self._returns.call(resolve)
