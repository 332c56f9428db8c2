"""Long work is done on threads, and plans are made on one."""

import asyncio
import threading

from rheostat_server.limits import OFFLOAD_BYTES
from rheostat_server.tasks.offload import offload, offload_plan

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
