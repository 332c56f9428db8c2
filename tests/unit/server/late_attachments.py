"""Requests that run step by step, and subscriptions that open meanwhile."""

import asyncio

from rheostat_wire.v1 import capture_pb2

from .messages import capture, request, site_set
from .streams import until
from .subscribers import POST, Subscriber, sampled


class Steps(asyncio.Event):
    """Lets samples go on step by step."""

    def __init__(self) -> None:
        super().__init__()
        self._allowed = asyncio.Semaphore(0)

    async def wait(self) -> bool:
        await self._allowed.acquire()
        return True

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self._allowed.release()


async def begun(running, request_id: str, tokens: int = 5, n: int = 1, **fields: object):
    """A request that has computed its prompt, and is held there."""
    before = len(running.backend.positions)
    call = running.client.generation.Generate(
        request(request_id=request_id, sampling=sampled(tokens, n), **fields)
    )
    await until(lambda: len(running.backend.positions) == before + n)
    return call


async def opened_while_they_step(running, request_message, steps: int = 1) -> Subscriber:
    """A subscription that opens, and requests that come to a step meanwhile."""
    asked = len(running.backend.capture_updates)
    opening_call = asyncio.ensure_future(Subscriber.open(running, request_message))
    await until(lambda: len(running.backend.capture_updates) > asked)
    running.backend.hold.go(steps)
    return await opening_call


def attached(message) -> list[tuple[str, int, int | None]]:
    return [
        (one.request_id, one.sample, one.first_position if one.HasField("first_position") else None)
        for one in message.attached
    ]


def from_position(first: int, rows: dict) -> dict:
    return {key: value for key, value in rows.items() if key[3] >= first}


INLINE = capture_pb2.InlineTarget()
OWN = {
    "no plan": {},
    "its own capture": {"captures": [capture(site_set(POST, layers=[1]), inline=INLINE)]},
    "one of the sites": {"captures": [capture(site_set(POST, layers=[0]), inline=INLINE)]},
}
