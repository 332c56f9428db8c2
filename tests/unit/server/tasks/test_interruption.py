"""Calls whose client does not read."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from rheostat_server.errors import ResponseOverflow
from rheostat_server.tasks.interruption import Interruption, while_read


async def responses(log: list[str], count: int) -> AsyncGenerator[int, None]:
    try:
        for number in range(count):
            yield number
    finally:
        log.append("ended")


async def test_a_message_that_nobody_reads_ends_the_call() -> None:
    log: list[str] = []
    interruption = Interruption()

    async def write() -> None:
        async with aclosing(while_read(responses(log, 3), 0.05)) as messages:
            async for _ in messages:
                with interruption:
                    await asyncio.Event().wait()

    with pytest.raises(ResponseOverflow, match=r"unread for 0\.05 s"):
        await write()
    assert log == ["ended"]


async def test_messages_that_are_read_in_time_come_whole() -> None:
    log: list[str] = []
    interruption = Interruption()
    got = []
    async with aclosing(while_read(responses(log, 5), 0.5)) as messages:
        async for message in messages:
            got.append(message)
            with interruption:
                await asyncio.sleep(0.12)
    assert (got, log) == ([0, 1, 2, 3, 4], ["ended"])
    await asyncio.sleep(0.55)  # no timer is left that could end a later write
    with interruption:
        await asyncio.sleep(0)
