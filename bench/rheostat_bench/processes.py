"""Processes of a benchmark that do what they are told, one order after the other.

Invariant: each has one state of its own, a server, an engine or a client, which lives as long as
the process, on one event loop. An order is a coroutine function of that state that can be pickled.
What it raises is raised where it was given.
"""

import asyncio
import multiprocessing
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from multiprocessing.connection import Connection
from typing import Any, Generic, Self, TypeVar

_SPAWNED = multiprocessing.get_context("spawn")

State = TypeVar("State")
Answer = TypeVar("Answer")

_GRACE = 60.0
"""Seconds that a process has to end."""


class Ended(Exception):
    """A process ended before it answered; what it printed says why."""


class Worker(Generic[State]):
    """A process. It starts at once; the first answer waits until its state stands."""

    def __init__(
        self, life: Callable[[], AbstractAsyncContextManager[State]], *, parent: bool = False
    ) -> None:
        """Starts it.

        Args:
            life: makes the state.
            parent: whether the process has processes of its own. One that has none is ended
                with this process, whatever happens here.
        """
        self._told, theirs = _SPAWNED.Pipe()
        self._process = _SPAWNED.Process(target=_live, args=(theirs, life), daemon=not parent)
        self._process.start()
        theirs.close()

    def tell(self, order: Callable[[State], Awaitable[object]]) -> None:
        """Gives an order; `answer` has what comes of it."""
        self._told.send(order)

    def answer(self) -> Any:
        """What came of the oldest order that has not been answered.

        Raises:
            Ended: the process has ended.
        """
        try:
            failed, answer = self._told.recv()
        except EOFError:
            raise Ended("a process of the benchmark has ended") from None
        if failed:
            raise answer
        return answer

    def answered(self, timeout: float) -> bool:
        """Waits so many seconds at most; returns whether `answer` has something at once."""
        return self._told.poll(timeout)

    def do(self, order: Callable[[State], Awaitable[Answer]]) -> Answer:
        """An order and its answer."""
        self.tell(order)
        answer: Answer = self.answer()
        return answer

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Lets the state end, then the process."""
        self._told.close()
        self._process.join(_GRACE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def together(
    workers: Sequence[Worker[State]], orders: Sequence[Callable[[State], Awaitable[Answer]]]
) -> list[Answer]:
    """What comes of an order for each, carried out at the same time."""
    for worker, order in zip(workers, orders, strict=True):
        worker.tell(order)
    return [worker.answer() for worker in workers]


def _live(told: Connection, life: Callable[[], AbstractAsyncContextManager[State]]) -> None:
    asyncio.run(_obey(told, life))


async def _obey(told: Connection, life: Callable[[], AbstractAsyncContextManager[State]]) -> None:
    async with life() as state:
        while True:
            try:
                order = await asyncio.to_thread(told.recv)
            except EOFError:
                return
            try:
                answer = (False, await order(state))
            except Exception as error:  # whatever it is, it is for whoever gave the order
                answer = (True, error)
            told.send(answer)
