"""Starts calls in order, a few in each iteration of the event loop.

Why calls that have started wait
    The engine needs fewer steps for prompts that it gets early. So while calls wait for their turn
    to start, the calls that have started do not send their first message yet, and garbage
    collections are postponed. The CPU time goes to the calls that the engine does not have.

The rules:

* A call waits only if others wait for their turn, or if earlier calls still wait to go on.
* It goes on once all others have started, at the latest after `_LONGEST`. Calls go on in order.
* Once all have started, only a few go on in each iteration, so that tokens need not wait for all.
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
"""Seconds after which a call goes on even if others wait to start. A client that begins calls
without end could otherwise stop the answers to all others."""


class CallStarts:
    """The turns of calls to start. Used on the event loop alone."""

    def __init__(self, most: int = STARTS) -> None:
        """No call waits; at most `most` start in an iteration, and as many go on."""
        self._most = most
        self._turns = Turns(most)
        self._crowded = False
        """Whether calls wait for their turn to start, or waited in one of the last two iterations.
        The tasks of the calls that started last run in the iteration after their turn."""
        self._waited = False
        """Whether calls waited for their turn in the last iteration."""
        self._scheduled = False
        """Whether `_look` will be called."""
        self._back: deque[tuple[float, asyncio.Future[None]]] = deque()
        """The calls that stand back, each with the time after which it goes on in any case."""

    def call(self, start: Callable[[], object]) -> None:
        """Calls `start` now or in a later iteration. It may not raise."""
        self._turns.call(start)
        if self._turns.waiting and not self._crowded:
            self._crowded = self._waited = True
            postpone_collections()
            self._schedule()

    async def stand_back(self) -> None:
        """Returns once no call waits for its turn to start, or soon after `_LONGEST` seconds."""
        if not self._crowded and not self._back:
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._back.append((loop.time() + _LONGEST, future))
        await future

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        """Lets calls go on. Runs in each iteration while calls wait to start or stand back."""
        self._scheduled = False
        waiting, waited = self._turns.waiting, self._waited
        self._waited = waiting
        if waiting:
            postpone_collections()
        elif self._crowded and not waited:
            self._crowded = False
            allow_collections()
        self._let_go_on(0 if self._crowded else self._most)
        if self._crowded or self._back:
            self._schedule()

    def _let_go_on(self, most: int) -> None:
        """Lets `most` calls go on, and all that have stood back for `_LONGEST`."""
        now = asyncio.get_running_loop().time()
        while self._back:
            end, future = self._back[0]
            if most <= 0 and now < end:
                return
            self._back.popleft()
            if not future.done():  # otherwise the call was cancelled
                future.set_result(None)
                most -= 1
