"""Calls of a benchmark's processes that end in time.

Invariant: no call takes much longer than its limit, or than what is left of the run's time. A late
call is cancelled. A process that does not even answer then is given up, and is asked nothing more.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from rheostat_bench.processes import Worker

State = TypeVar("State")
Result = TypeVar("Result")

_GRACE = 5.0
"""Seconds that a process has to cancel a call."""


class OutOfTime(Exception):
    """The run's time is over."""


class NoAnswer(Exception):
    """A process does not answer."""


class Limits:
    """The time of a run, and the processes that do not answer."""

    def __init__(self, budget: float) -> None:
        """Starts the clock.

        Args:
            budget: seconds of the run, which may be infinite.
        """
        self._end = time.monotonic() + budget
        self._lost: set[int] = set()

    def ask(
        self,
        workers: Sequence[Worker[State]],
        calls: Sequence[Callable[[State], Awaitable[Result]]],
        seconds: float,
    ) -> list[Result]:
        """Runs one call in each process, at the same time; returns the results.

        Raises:
            OutOfTime: the run's time is over.
            NoAnswer: a process does not answer.
            Exception: what a call raises; `TimeoutError` if it was cancelled.
        """
        seconds = min(seconds, self._end - time.monotonic())
        if seconds <= 0:
            raise OutOfTime("the run's time is over")
        if any(id(worker) in self._lost for worker in workers):
            raise NoAnswer("a process of the benchmark did not answer before")
        for worker, call in zip(workers, calls, strict=True):
            worker.send(partial(_limited, call=call, seconds=seconds))
        end = time.monotonic() + seconds + _GRACE
        found: list[Result] = []
        failed: list[Exception] = []
        for worker in workers:
            if not worker.has_result(max(0.0, end - time.monotonic())):
                self._lost.add(id(worker))
                failed.append(NoAnswer(f"a process did not answer within {seconds:.0f} s"))
                continue
            try:
                found.append(worker.result())
            except Exception as error:  # the other results are taken first
                failed.append(error)
        if failed:
            raise failed[0]
        return found

    def ask_one(
        self, worker: Worker[State], call: Callable[[State], Awaitable[Result]], seconds: float
    ) -> Result:
        """Runs a call in one process; returns its result, and raises what `ask` raises."""
        (result,) = self.ask([worker], [call], seconds)
        return result


async def _limited(state: Any, call: Callable[[Any], Awaitable[Any]], seconds: float) -> Any:
    async with asyncio.timeout(seconds):
        return await call(state)
