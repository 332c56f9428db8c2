"""How often tokens are passed on, and the timer that all streams share."""

import asyncio

import pytest

from rheostat_server.engine.pace import Pace


def test_many_streams_send_as_many_messages_as_a_few_more() -> None:
    pace = Pace()
    pace.add(64)
    assert pace.interval == 0.0
    pace.add(16)
    assert pace.interval == pytest.approx(0.01)
    pace.add(80)
    assert pace.interval == pytest.approx(0.02)
    pace.add(-96)
    assert pace.interval == 0.0


async def test_functions_are_called_in_order_after_more_than_an_interval() -> None:
    pace = Pace()
    pace.add(64 + 60)
    loop = asyncio.get_running_loop()
    begun, called = loop.time(), list[tuple[str, float]]()
    done = asyncio.Event()
    pace.call_later(lambda: called.append(("first", loop.time())))
    pace.call_later(lambda: pace.call_later(done.set))
    pace.call_later(lambda: called.append(("last", loop.time())))
    async with asyncio.timeout(10):
        await done.wait()
    assert [name for name, _ in called] == ["first", "last"]
    assert min(moment for _, moment in called) >= begun + pace.interval


async def test_an_error_of_one_function_does_not_lose_the_others() -> None:
    pace = Pace()
    pace.add(64 + 60)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    done = asyncio.Event()
    pace.call_later(lambda: 1 // 0 and None)
    pace.call_later(done.set)
    async with asyncio.timeout(10):
        await done.wait()
