"""Reading a response stream."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from rheostat_server.delivery.row_messages import CapturedRows
from rheostat_server.requests.response_queue import Notice
from rheostat_wire.v1 import engine_service_pb2, generation_service_pb2


def received(
    response: generation_service_pb2.GenerateResponse | CapturedRows | Notice,
) -> generation_service_pb2.GenerateResponse | Notice:
    """A response as its client receives it."""
    if not isinstance(response, CapturedRows):
        return response
    message = generation_service_pb2.GenerateResponse
    return message.FromString(response.as_field(message.CAPTURED_FIELD_NUMBER).joined())


def kinds(events) -> list[str]:
    return [event.WhichOneof("event") for event in events]


def tokens(events, sample: int = 0) -> list[int]:
    mine = [e.tokens for e in events if e.WhichOneof("event") == "tokens"]
    return [token for part in mine if part.sample == sample for token in part.token_ids]


def captured(events) -> dict[tuple[int, int, int, int, int], list[float]]:
    """(spec, sample, point, layer, position) -> row."""
    found = {}
    for event in events:
        if event.WhichOneof("event") != "captured":
            continue
        part = event.captured
        values = np.frombuffer(part.tensor.inline, "<f4").reshape(tuple(part.tensor.shape))
        at = [p for run in part.positions for p in range(run.start, run.start + run.count)]
        for i, site in enumerate(part.sites):
            for j, position in enumerate(at):
                key = (part.capture_index, part.sample, site.point, site.layer, position)
                assert key not in found
                found[key] = values[i, j].tolist()
    return found


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop run until something holds."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


@dataclass
class Peak:
    """The largest value that was seen."""

    value: int = 0


@asynccontextmanager
async def peak(read: Callable[[], int]) -> AsyncIterator[Peak]:
    """Reads a value in every iteration of the event loop, so that no state between two is missed.

    A poll over the wire is too slow: what it looks for may begin and end between two answers.
    """
    seen = Peak()

    async def watch() -> None:
        while True:
            seen.value = max(seen.value, read())
            await asyncio.sleep(0)

    watching = asyncio.ensure_future(watch())
    try:
        yield seen
    finally:
        watching.cancel()


async def settled(running) -> engine_service_pb2.GetStatsResponse:
    """The server's counters once nothing is in flight."""
    await until(lambda: not running.manager.open_requests)
    return await running.client.engine.GetStats(engine_service_pb2.GetStatsRequest())
