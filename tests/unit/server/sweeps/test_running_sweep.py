"""The pairs and cells of a sweep begin without making the event loop wait."""

import asyncio
from collections import Counter

import pytest

from rheostat_server.sweeps import running_sweep


async def test_one_call_starts_in_an_iteration_of_the_event_loop() -> None:
    begun: Counter[int] = Counter()
    iteration = 0

    async def count() -> None:
        nonlocal iteration
        while True:
            await asyncio.sleep(0)
            iteration += 1

    async def work() -> None:
        begun[iteration] += 1

    counting = asyncio.create_task(count())
    await running_sweep._together(work, 64)
    counting.cancel()
    assert begun.total() == 64
    # Both tasks take turns, so that two starts may fall between two counts.
    assert max(begun.values()) <= 2


async def test_the_first_error_ends_the_calls_that_have_started() -> None:
    started = 0

    async def fail() -> None:
        nonlocal started
        started += 1
        raise ValueError(started)

    with pytest.raises(ValueError, match="1"):
        await running_sweep._together(fail, 64)
    assert started < 64
