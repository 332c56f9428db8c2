"""Threads that tokenise texts: one for short texts, and one for long texts.

Why two: a text that fills the context takes up to a second. A short text must not wait for it.

A thread processes the text that is due first. A long text is due later than a short text that
arrived at the same time. So a text does not wait for a much longer text that arrived just before.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from rheostat_server.errors import QueueFull
from rheostat_server.limits import (
    LONG_TEXTS_WAITING,
    RETRY_SECONDS,
    SHORT_TEXT_BYTES,
    SHORT_TEXTS_WAITING,
)
from rheostat_server.prompts.tokenizer import Tokenizer

R = TypeVar("R")

_BYTES_PER_SECOND = 1 << 20
"""Approximate speed of a tokenizer for a text of rare characters."""


class TokenizerThreads:
    """Runs a tokenizer on threads. Used on the event loop alone."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._short = _Thread(tokenizer, "tokenizer", SHORT_TEXTS_WAITING)
        self._long = _Thread(tokenizer.twin(), "tokenizer-long", LONG_TEXTS_WAITING)

    async def run(self, size: int, work: Callable[[Tokenizer], R]) -> R:
        """Calls `work` with the tokenizer on a thread. The text has `size` bytes.

        Raises:
            QueueFull: too many texts wait.
        """
        thread = self._short if size <= SHORT_TEXT_BYTES else self._long
        return await thread.run(size, work)

    def close(self) -> None:
        """Ends the threads."""
        self._short.close()
        self._long.close()


class _QueuedText(NamedTuple):
    due: float
    number: int
    turn: asyncio.Future[None]


class _Thread:
    """A thread, and the queue of its callers."""

    def __init__(self, tokenizer: Tokenizer, name: str, most_waiting: int) -> None:
        self._tokenizer = tokenizer
        self._most_waiting = most_waiting
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._busy = False
        self._waiting: list[_QueuedText] = []
        self._numbers = itertools.count()

    async def run(self, size: int, work: Callable[[Tokenizer], R]) -> R:
        loop = asyncio.get_running_loop()
        if self._busy:
            await self._wait_for_turn(loop, size)
        self._busy = True
        # A cancelled caller does not stop the thread, so the thread itself reports its end.
        done = self._executor.submit(work, self._tokenizer)
        done.add_done_callback(lambda _: _call_soon(loop, self._start_next))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _wait_for_turn(self, loop: asyncio.AbstractEventLoop, size: int) -> None:
        if len(self._waiting) >= self._most_waiting:
            raise QueueFull(
                f"{len(self._waiting)} texts wait to be tokenised; at most {self._most_waiting} "
                "are allowed",
                retry_after=RETRY_SECONDS,
            )
        due = loop.time() + size / _BYTES_PER_SECOND
        waiting = _QueuedText(due, next(self._numbers), loop.create_future())
        heapq.heappush(self._waiting, waiting)
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                heapq.heapify(self._waiting)
            elif not waiting.turn.cancelled():  # it was this caller's turn
                self._start_next()
            raise

    def _start_next(self) -> None:
        """Wakes the caller that is due first."""
        self._busy = False
        while self._waiting:
            turn = heapq.heappop(self._waiting).turn
            if not turn.done():
                self._busy = True
                turn.set_result(None)
                return


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
