"""Nobody's text waits for a much longer one, and texts that wait are limited."""

import asyncio
import threading

import pytest

from rheostat_server.errors import QueueFull
from rheostat_server.limits import SHORT_TEXT_BYTES
from rheostat_server.prompts import tokenizer_threads
from rheostat_server.prompts.tokenizer_threads import TokenizerThreads

from ..characters import CharTokenizer

LONG = 2 * SHORT_TEXT_BYTES


class Held:
    """Work that lasts until it may end."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, tokenizer: object) -> str:
        self.begun.set()
        assert self.may_end.wait(30)
        return threading.current_thread().name


@pytest.fixture
def threads():
    made = TokenizerThreads(CharTokenizer())
    yield made
    made.close()


async def held(threads: TokenizerThreads, size: int = LONG) -> tuple[Held, asyncio.Future]:
    """A thread that is busy, and what comes of its work."""
    work = Held()
    task = asyncio.ensure_future(threads.run(size, work))
    await asyncio.to_thread(work.begun.wait, 30)
    return work, task


async def test_a_short_text_does_not_wait_for_a_long_one(threads) -> None:
    work, task = await held(threads)
    short = await asyncio.wait_for(
        threads.run(SHORT_TEXT_BYTES, lambda _: threading.current_thread().name), 10
    )
    work.may_end.set()
    assert short != await task


async def test_a_text_goes_before_a_much_longer_one_that_came_a_moment_before(threads) -> None:
    work, task = await held(threads)
    order: list[int] = []
    sizes = [64 << 20, LONG, 2 * LONG, LONG]
    waiting = [
        asyncio.ensure_future(threads.run(size, lambda _, n=number: order.append(n)))
        for number, size in enumerate(sizes)
    ]
    await asyncio.sleep(0)
    work.may_end.set()
    await asyncio.gather(task, *waiting)
    assert order[0] == 1
    assert order[-1] == 0
    assert order.index(1) < order.index(3)


async def test_a_long_text_is_not_overtaken_for_ever(threads, monkeypatch) -> None:
    monkeypatch.setattr(tokenizer_threads, "_BYTES_PER_SECOND", 1 << 40)
    work, task = await held(threads)
    order: list[str] = []
    long = asyncio.ensure_future(threads.run(64 << 20, lambda _: order.append("long")))
    await asyncio.sleep(0.01)
    later = asyncio.ensure_future(threads.run(LONG, lambda _: order.append("later")))
    await asyncio.sleep(0)
    work.may_end.set()
    await asyncio.gather(task, long, later)
    assert order == ["long", "later"]


async def test_texts_that_wait_are_limited(threads, monkeypatch) -> None:
    monkeypatch.setattr(threads._long, "_most_waiting", 2)
    work, task = await held(threads)
    waiting = [asyncio.ensure_future(threads.run(LONG, lambda _: 1)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match="2 texts wait") as caught:
        await threads.run(LONG, lambda _: 1)
    assert caught.value.retry_after
    assert await asyncio.wait_for(threads.run(1, lambda _: 2), 10) == 2
    work.may_end.set()
    assert await asyncio.gather(*waiting) == [1, 1]
    await task


async def test_who_stops_waiting_holds_nobody_up(threads) -> None:
    work, task = await held(threads)
    first, second, third = (
        asyncio.ensure_future(threads.run(LONG, lambda _: "done")) for _ in range(3)
    )
    await asyncio.sleep(0)
    second.cancel()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not first.done()  # the thread is busy still
    work.may_end.set()
    assert await asyncio.wait_for(asyncio.gather(first, third), 10) == ["done", "done"]
    assert await asyncio.wait_for(threads.run(LONG, lambda _: "free"), 10) == "free"


async def test_an_error_leaves_the_thread_free(threads) -> None:
    def fail(_: object) -> None:
        raise ValueError("no text")

    for _ in range(2):
        with pytest.raises(ValueError, match="no text"):
            await threads.run(LONG, fail)
