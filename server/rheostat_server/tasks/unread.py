"""Ends calls whose client does not read.

A call that waits for its reader holds what it uses: runs, memory, or one of few places. A client
that is gone is noticed by gRPC; one that stays and reads nothing is noticed here.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from rheostat_server.errors import ResponseOverflow
from rheostat_server.tasks.interruption import interrupter

T = TypeVar("T")


async def while_read(responses: AsyncGenerator[T, None], seconds: float) -> AsyncGenerator[T, None]:
    """Yields responses. Ends the call with ResponseOverflow if one is not read for so long."""
    interrupt, loop = interrupter(), asyncio.get_running_loop()
    async with aclosing(responses):
        async for response in responses:
            timer = loop.call_later(
                seconds,
                interrupt,
                ResponseOverflow(f"the client left a message unread for {seconds:g} s"),
            )
            try:
                yield response
            finally:
                timer.cancel()
