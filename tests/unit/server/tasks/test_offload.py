"""Long work is done on threads, and plans are made on one."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rheostat_server.limits import OFFLOAD_BYTES
from rheostat_server.tasks.offload import Planner, offload, offload_plan

LONG = OFFLOAD_BYTES + 1


async def test_short_work_is_done_at_once_and_long_work_on_threads() -> None:
    loop = threading.get_ident()
    assert await offload(OFFLOAD_BYTES, threading.get_ident) == loop
    assert await offload_plan(OFFLOAD_BYTES, threading.get_ident) == loop
    assert await offload(LONG, threading.get_ident) != loop
    assert await offload_plan(LONG, threading.get_ident) != loop


async def test_one_plan_is_made_at_a_time_and_other_work_does_not_wait() -> None:
    begun, end = threading.Event(), threading.Event()

    def first() -> str:
        begun.set()
        assert end.wait(30)
        return "first"

    making = asyncio.create_task(offload_plan(LONG, first))
    second = asyncio.create_task(offload_plan(LONG, str, "second"))
    await asyncio.to_thread(begun.wait, 30)
    assert await offload(LONG, str, "other") == "other"
    await asyncio.sleep(0.02)
    assert not second.done()
    end.set()
    assert [await making, await second] == ["first", "second"]


@contextmanager
def busy(planner: Planner) -> Iterator[None]:
    """Keeps the thread busy with a plan."""
    begun, end = threading.Event(), threading.Event()
    planner.submit(1 << 30, lambda: (begun.set(), end.wait(30)))
    assert begun.wait(30)
    try:
        yield
    finally:
        end.set()


def test_a_small_plan_does_not_wait_for_the_large_ones_of_another_client() -> None:
    planner, made = Planner(), list[str]()
    with busy(planner):
        large = [planner.submit(10**9, made.append, "large") for _ in range(64)]
        small = planner.submit(LONG, made.append, "small")
    for plan in (small, *large):
        plan.result(30)
    assert "small" in made[:2]


def test_a_large_plan_is_made_however_many_small_ones_come() -> None:
    planner, made = Planner(), list[str]()

    def again() -> None:
        made.append("small")
        if "large" not in made and len(made) < 1000:
            planner.submit(LONG, again)

    with busy(planner):
        large = planner.submit(10**9, made.append, "large")
        planner.submit(LONG, again)
    large.result(30)
    assert made.count("small") <= 4


def test_a_plan_whose_caller_has_left_is_not_made() -> None:
    planner, made = Planner(), list[str]()
    with busy(planner):
        left = planner.submit(LONG, made.append, "left")
        stays = planner.submit(LONG, made.append, "stays")
        assert left.cancel()
    stays.result(30)
    assert made == ["stays"]


async def test_a_plan_that_was_refused_is_freed_without_a_garbage_collection() -> None:
    class Message:
        pass

    async def refused() -> weakref.ref[Message]:
        message = Message()

        def refuse(_: Message) -> None:
            raise ValueError("refused")

        with pytest.raises(ValueError, match="refused"):
            await offload_plan(LONG, refuse, message)
        return weakref.ref(message)

    gc.collect()
    gc.disable()
    try:
        left = await refused()
        await offload_plan(LONG, str)  # the thread has dropped the plan before
        assert left() is None
    finally:
        gc.enable()
