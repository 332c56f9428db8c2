"""Work starts in order. Each iteration of the event loop limits its number, or its time."""

import asyncio

from rheostat_server.tasks.turns import TimedTurns, Turns


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


async def test_work_that_raises_keeps_no_later_work_waiting() -> None:
    turns, done, errors = Turns(1), list[int](), list[object]()
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: errors.append(context["exception"])
    )
    error = MemoryError()

    def fail() -> None:
        raise error

    for work in (lambda: done.append(0), fail, lambda: done.append(1)):
        turns.call(work)
    for _ in range(5):
        await asyncio.sleep(0)
    assert errors == [error]
    assert done == [0, 1]


async def test_one_call_starts_in_an_iteration_while_calls_of_after_wait() -> None:
    first = Turns(2)
    later = Turns(4, after=first)
    called: list[str] = []
    for _ in range(7):
        first.call(lambda: called.append("first"))
    for _ in range(9):
        later.call(lambda: called.append("later"))
    counts = []
    while len(called) < 16:
        counts.append((called.count("first"), called.count("later")))
        await asyncio.sleep(0)
    assert counts == [(2, 1), (4, 2), (6, 3), (7, 7)]


async def test_a_call_for_later_is_made_in_the_next_iteration_within_the_limit() -> None:
    turns = Turns(2)
    called: list[int] = []
    for number in range(5):
        turns.call_later(lambda number=number: called.append(number))
    counts = []
    while len(called) < 5:
        counts.append(len(called))
        await asyncio.sleep(0)
    assert called == [*range(5)]
    assert counts == [0, 2, 4]


class Worker:
    """Work whose pieces take time, by a clock of its own, and are counted by iteration."""

    def __init__(self, seconds: float) -> None:
        self.now = 0.0
        self.turns = TimedTurns(seconds, lambda: self.now)
        self.done: list[str] = []

    async def work(self, name: str, pieces: int, cost: float) -> None:
        for _ in range(pieces):
            await self.turns.turn()
            self.now += cost
            self.done.append(name)

    async def iterations(self, tasks: list[asyncio.Task[None]]) -> list[int]:
        """Pieces of work in each iteration, until all tasks are done."""
        counts = []
        while not all(task.done() for task in tasks):
            before = len(self.done)
            await asyncio.sleep(0)
            counts.append(len(self.done) - before)
        return counts


async def test_cheap_work_is_done_at_once() -> None:
    worker = Worker(1.0)
    counts = await worker.iterations([asyncio.create_task(worker.work("a", 100, 0.001))])
    assert max(counts) == 100


async def test_expensive_work_is_spread_over_iterations() -> None:
    worker = Worker(1.0)
    counts = await worker.iterations([asyncio.create_task(worker.work("a", 100, 0.3))])
    assert len(worker.done) == 100
    assert 3 <= max(counts) <= 5  # up to 4 in 1 s, and one of a caller that has waited


async def test_callers_share_the_time_and_nobody_waits_for_all_work_of_another() -> None:
    worker = Worker(1.0)
    names = [str(number) for number in range(20)]
    tasks = [asyncio.create_task(worker.work(name, 50, 0.3)) for name in names]
    counts = await worker.iterations(tasks)
    assert max(counts) <= 8 + 4 + 4
    assert set(worker.done[:200]) == {*names}
    assert worker.done.count("0") == 50


async def test_a_cancelled_caller_keeps_nobody_waiting() -> None:
    worker = Worker(1.0)
    first, left, last = (asyncio.create_task(worker.work(name, 2, 2.0)) for name in "abc")
    await asyncio.sleep(0)
    left.cancel()
    async with asyncio.timeout(10):
        await asyncio.gather(first, last)
    assert "b" not in worker.done
