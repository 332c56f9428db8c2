"""Work starts in order, a few pieces in each iteration of the event loop."""

import asyncio

from rheostat_server.tasks.turns import Turns


async def test_few_calls_start_in_an_iteration() -> None:
    starts = Turns(3)
    begun: list[int] = []

    async def call(number: int) -> None:
        await starts.turn()
        begun.append(number)

    calls = [asyncio.create_task(call(number)) for number in range(8)]
    counts = []
    while len(begun) < 8:
        await asyncio.sleep(0)
        counts.append(len(begun))
    await asyncio.gather(*calls)
    assert begun == [*range(8)]
    steps = [after - before for before, after in zip([0, *counts], counts, strict=False)]
    assert max(steps) == 3


async def test_a_call_starts_at_once_if_few_do() -> None:
    starts = Turns(2)
    for _ in range(5):
        ready = asyncio.create_task(starts.turn())
        await asyncio.sleep(0)
        assert ready.done()
        await asyncio.sleep(0)


async def test_a_call_whose_client_has_left_keeps_nobody_waiting() -> None:
    starts = Turns(1)
    first, left, last = (asyncio.create_task(starts.turn()) for _ in range(3))
    await asyncio.sleep(0)
    left.cancel()
    async with asyncio.timeout(10):
        await asyncio.gather(first, last)
