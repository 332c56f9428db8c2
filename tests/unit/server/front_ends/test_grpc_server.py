"""The gRPC server of a server without front ends."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import grpc
import pytest

from rheostat_server.front_ends import grpc_server
from rheostat_server.front_ends.call import Call
from rheostat_server.front_ends.grpc_server import GrpcServer

METHOD = "/rheostat.v1.GenerationService/Session"
CALLS = 100


class Served:
    """A server whose calls wait for `free`."""

    def __init__(self) -> None:
        self.begun = 0
        self.free = asyncio.Event()
        self.server = GrpcServer(self._answer)

    async def start(self) -> None:
        self.port = await self.server.start("127.0.0.1", 0)

    async def _answer(self, path: str, call: Call) -> None:
        self.begun += 1
        await self.free.wait()
        await call.write(b"answer")


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    served = Served()
    await served.start()
    yield served
    await served.server.stop(0)


@pytest.fixture
def channel(served: Served) -> Iterator[grpc.Channel]:
    """A connection whose calls begin without the event loop."""
    with grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        grpc.channel_ready_future(channel).result(10)
        yield channel


def begin(channel: grpc.Channel, count: int) -> "list[grpc.Call]":
    """Begins calls, which reach the server while its event loop does something else."""
    calls = [channel.unary_stream(METHOD)(b"") for _ in range(count)]
    time.sleep(0.3)
    return calls


async def test_calls_that_come_together_begin_within_few_iterations(
    served: Served, channel: grpc.Channel
) -> None:
    calls = begin(channel, CALLS)
    iterations = 0
    while served.begun < CALLS:
        time.sleep(0.002)  # other work, meanwhile gRPC's thread receives its events
        await asyncio.sleep(0)
        iterations += 1
    assert iterations < CALLS
    served.free.set()
    answers = await asyncio.gather(*(asyncio.to_thread(list, call) for call in calls))
    assert answers == [[b"answer"]] * CALLS


async def test_few_of_many_calls_that_come_together_begin_in_an_iteration(
    served: Served, channel: grpc.Channel
) -> None:
    forwarded = served.server.calls
    calls = begin(channel, CALLS)
    before, most = 0, 0
    while len(forwarded) < CALLS:
        await asyncio.sleep(0)
        most = max(most, len(forwarded) - before)
        before = len(forwarded)
    assert most <= grpc_server._RECORDS < CALLS
    served.free.set()
    answers = await asyncio.gather(*(asyncio.to_thread(list, call) for call in calls))
    assert answers == [[b"answer"]] * CALLS


def outcome(call: grpc.Call) -> grpc.StatusCode:
    """Reads a call to its end; returns its status."""
    with suppress(grpc.RpcError):
        list(call)
    return call.code()


async def test_a_server_that_stops_does_not_wait_for_calls_that_have_not_begun(
    served: Served, channel: grpc.Channel
) -> None:
    calls = begin(channel, CALLS)
    served.free.set()
    async with asyncio.timeout(10):
        await served.server.stop(60.0)
        codes = [await asyncio.to_thread(outcome, call) for call in calls]
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.CANCELLED}
    assert codes.count(grpc.StatusCode.OK) == served.begun
