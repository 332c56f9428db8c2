"""Spreads work that comes all at once over iterations of the event loop.

Why: hundreds of requests that arrive together, or whose rows come in one step, are many
milliseconds of work. Between two iterations the loop receives tokens of the engine. So tokens wait
for a few pieces of such work, and not for all of it.
"""

import asyncio
from collections import deque
from collections.abc import Callable


class Turns:
    """Calls a limited number of functions in each iteration of the event loop, in order."""

    def __init__(self, most: int) -> None:
        """At most `most` are called in an iteration."""
        self._most = self._free = most
        self._waiting: deque[Callable[[], object]] = deque()

    def call(self, work: Callable[[], object]) -> None:
        """Calls `work`, now or in a later iteration. It may not raise."""
        if self._free == self._most:
            asyncio.get_running_loop().call_soon(self._begin_iteration)
        if self._free:
            self._free -= 1
            work()
        else:
            self._waiting.append(work)

    async def turn(self) -> None:
        """Returns when it is the caller's turn."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def resolve() -> None:
            if not future.done():  # otherwise the caller was cancelled
                future.set_result(None)

        self.call(resolve)
        await future

    def _begin_iteration(self) -> None:
        self._free = self._most
        while self._waiting and self._free:
            self._free -= 1
            self._waiting.popleft()()
        if self._free < self._most:
            asyncio.get_running_loop().call_soon(self._begin_iteration)
