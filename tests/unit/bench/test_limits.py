"""Calls of a benchmark's processes end in time."""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from rheostat_bench.limits import Limits, NoAnswer, OutOfTime
from rheostat_bench.processes import Worker


class InProcess:
    """A worker whose calls run at once, in this process, unless it hangs."""

    def __init__(self, *, hangs: bool = False) -> None:
        """Has no results yet."""
        self._hangs = hangs
        self._results: deque[tuple[bool, Any]] = deque()

    def send(self, call: Callable[[object], Awaitable[object]]) -> None:
        """Runs a call."""
        if not self._hangs:
            try:
                self._results.append((False, asyncio.run(_awaited(call(self)))))
            except Exception as error:  # as a worker does
                self._results.append((True, error))

    def has_result(self, timeout: float) -> bool:
        """Whether there is one."""
        return bool(self._results)

    def result(self) -> Any:
        """Returns it, or raises it."""
        failed, result = self._results.popleft()
        if failed:
            raise result
        return result


async def _awaited(call: Awaitable[object]) -> object:
    return await call


def worker(*, hangs: bool = False) -> Worker[object]:
    """One of them."""
    return cast("Worker[object]", InProcess(hangs=hangs))


async def one(_state: object) -> int:
    return 1


async def slow(_state: object) -> int:
    await asyncio.sleep(60)
    return 1


async def wrong(_state: object) -> int:
    raise ValueError("wrong")


def test_a_late_call_is_cancelled_and_its_process_is_asked_again() -> None:
    limits, some = Limits(math.inf), worker()
    with pytest.raises(TimeoutError):
        limits.ask_one(some, slow, 0.01)
    assert limits.ask_one(some, one, 10) == 1


def test_a_process_that_hangs_is_asked_nothing_more() -> None:
    limits, hung, other = Limits(math.inf), worker(hangs=True), worker()
    with pytest.raises(NoAnswer):
        limits.ask([hung, other], [one, one], 10)
    with pytest.raises(NoAnswer):
        limits.ask_one(hung, one, 10)
    assert limits.ask_one(other, slow_to_two, 10) == 2


async def slow_to_two(_state: object) -> int:
    await asyncio.sleep(0.01)
    return 2


def test_a_call_that_fails_leaves_no_result_of_another_behind() -> None:
    limits, some = Limits(math.inf), [worker(), worker()]
    with pytest.raises(ValueError, match="wrong"):
        limits.ask(some, [wrong, one], 10)
    assert limits.ask(some, [slow_to_two, slow_to_two], 10) == [2, 2]


def test_nothing_is_asked_when_the_time_is_over() -> None:
    with pytest.raises(OutOfTime):
        Limits(0.0).ask_one(worker(), one, 10)
