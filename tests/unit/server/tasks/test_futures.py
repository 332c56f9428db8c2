"""Coroutines that begin at once, and go on in a task or in callbacks."""

import asyncio

import pytest

from rheostat_server.tasks.futures import begin_now


class Work:
    def __init__(self) -> None:
        self.done: list[str] = []
        self.go_on = asyncio.Event()

    async def run(self) -> str:
        self.done.append("begun")
        try:
            await self.go_on.wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.done.append("cancelled")
            raise
        self.done.append("ended")
        return "result"


async def test_work_begins_at_once_and_goes_on_later() -> None:
    work = Work()
    running = begin_now(work.run())
    assert work.done == ["begun"]
    await asyncio.sleep(0)
    work.go_on.set()
    assert await running == "result"
    assert work.done == ["begun", "ended"]


async def test_work_that_need_not_wait_is_done_at_once() -> None:
    async def short() -> int:
        return 3

    running = begin_now(short())
    assert running.done()
    assert await running == 3


@pytest.mark.parametrize("waits", [False, True])
async def test_an_error_is_raised_where_the_result_is_awaited(waits: bool) -> None:
    async def fail() -> None:
        if waits:
            await asyncio.sleep(0)
        raise KeyError("defect")

    running = begin_now(fail())
    with pytest.raises(KeyError, match="defect"):
        await running


@pytest.mark.parametrize("later", [False, True])
async def test_work_is_cancelled_as_a_task_is(later: bool) -> None:
    work = Work()
    running = begin_now(work.run())
    if later:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert later == (work.done == ["begun", "cancelled"])


async def test_an_error_of_what_the_work_waits_for_reaches_the_work() -> None:
    broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    caught: list[BaseException] = []

    async def wait() -> str:
        try:
            await broken
        except KeyError as error:
            caught.append(error)
        return "goes on"

    running = begin_now(wait())
    await asyncio.sleep(0)
    broken.set_exception(KeyError("lost"))
    assert await running == "goes on"
    assert len(caught) == 1
