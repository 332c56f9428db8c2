"""Processes of a benchmark, which run the calls that they receive in order.

Invariant: each process has one state: a server, an engine or a client. The state exists as long as
the process, on one event loop. A call is a coroutine function of that state that can be pickled. An
exception of a call is raised again in the process that sent it.
"""

import asyncio
import multiprocessing
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from multiprocessing.connection import Connection
from typing import Any, Generic, Self, TypeVar

_SPAWNED = multiprocessing.get_context("spawn")

State = TypeVar("State")
Result = TypeVar("Result")

_GRACE = 60.0
"""Seconds that a process has to end."""


class Ended(Exception):
    """A process ended before it returned a result. Its output shows why."""


class Worker(Generic[State]):
    """A process. It starts at once; the first result waits until its state is made."""

    def __init__(
        self, make_state: Callable[[], AbstractAsyncContextManager[State]], *, parent: bool = False
    ) -> None:
        """Starts it.

        Args:
            make_state: makes the state.
            parent: whether the process starts processes. Otherwise it is a daemon, so it ends with
                this process in any case.
        """
        self._connection, theirs = _SPAWNED.Pipe()
        self._process = _SPAWNED.Process(
            target=_process_main, args=(theirs, make_state), daemon=not parent
        )
        self._process.start()
        theirs.close()

    def send(self, call: Callable[[State], Awaitable[object]]) -> None:
        """Sends a call; `result` returns its result."""
        self._connection.send(call)

    def result(self) -> Any:
        """Returns the result of the oldest call whose result was not yet returned.

        Raises:
            Ended: the process has ended.
        """
        try:
            failed, result = self._connection.recv()
        except EOFError:
            raise Ended("a process of the benchmark has ended") from None
        if failed:
            raise result
        return result

    def has_result(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds; returns whether `result` would return at once."""
        return self._connection.poll(timeout)

    def do(self, call: Callable[[State], Awaitable[Result]]) -> Result:
        """Sends a call and returns its result."""
        self.send(call)
        result: Result = self.result()
        return result

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the state, then ends the process."""
        self._connection.close()
        self._process.join(_GRACE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def together(
    workers: Sequence[Worker[State]], calls: Sequence[Callable[[State], Awaitable[Result]]]
) -> list[Result]:
    """Runs one call in each process, at the same time; returns the results."""
    for worker, call in zip(workers, calls, strict=True):
        worker.send(call)
    return [worker.result() for worker in workers]


def _process_main(
    calls: Connection, make_state: Callable[[], AbstractAsyncContextManager[State]]
) -> None:
    asyncio.run(_serve_state(calls, make_state))


async def _serve_state(
    calls: Connection, make_state: Callable[[], AbstractAsyncContextManager[State]]
) -> None:
    async with make_state() as state:
        while True:
            try:
                call = await asyncio.to_thread(calls.recv)
            except EOFError:
                return
            try:
                result = (False, await call(state))
            except Exception as error:  # the process that sent the call raises it again
                result = (True, error)
            calls.send(result)
