"""Messages of calls: their order, their limits, and what ends calls, whoever speaks gRPC."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from itertools import count

import grpc
import grpc.aio
import pytest
from google.rpc import code_pb2, status_pb2

from rheostat_server.front_ends.call import Call
from rheostat_server.front_ends.grpc_server import GrpcServer
from rheostat_server.front_ends.supervisor import FrontEnds

from ....effort import FACTOR
from ..streams import until

METHOD = "/rheostat.v1.GenerationService/Session"
OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4 << 10),
)
"""A connection that holds little that is not read, so that the server must keep it."""
WINDOW = 64 << 10
"""Bytes that the server may send at most before the client reads."""

Answer = Callable[[Call], Awaitable[None]]
Serving = Callable[[Answer], AbstractAsyncContextManager[grpc.aio.Channel]]


@pytest.fixture(params=[0, 1], ids=["no front end", "one front end"])
def serving(request: pytest.FixtureRequest) -> Serving:
    """Serves calls of one method, in this process or with a front end."""

    @asynccontextmanager
    async def serve(answer: Answer) -> AsyncIterator[grpc.aio.Channel]:
        async def answer_path(path: str, call: Call) -> None:
            await answer(call)

        server = FrontEnds(1, answer_path) if request.param else GrpcServer(answer_path)
        port = await server.start("127.0.0.1", 0)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
                yield channel
        finally:
            await server.stop(0)

    return serve


def begin(channel: grpc.aio.Channel, timeout: float | None = None) -> grpc.aio.StreamStreamCall:
    """A call that has not sent a message."""
    return channel.stream_stream(METHOD)(timeout=timeout)


async def test_messages_sent_without_waiting_keep_their_order(serving: Serving) -> None:
    async def answer(call: Call) -> None:
        await call.read()
        for number in range(300):
            message = number.to_bytes(4, "big")
            if call.has_room():
                call.write_now(message)
            else:
                await call.write(message)
        await call.flush()

    async with serving(answer) as channel, asyncio.timeout(30):
        call = begin(channel)
        await call.write(b"go")
        received = [int.from_bytes(message, "big") async for message in call]
    assert received == list(range(300))


async def test_messages_that_are_sent_together_do_not_wait_for_each_other(serving: Serving) -> None:
    messages = [number.to_bytes(4, "big") for number in range(300)]
    unwritten = []

    async def answer(call: Call) -> None:
        await call.read()
        writing = asyncio.create_task(call.write(*messages))
        await asyncio.sleep(0)
        unwritten.append(len(call._unwritten))
        await writing
        unwritten.append(len(call._unwritten))
        await call.flush()

    async with serving(answer) as channel, asyncio.timeout(30):
        call = begin(channel)
        await call.write(b"go")
        assert [message async for message in call] == messages
    together, left = unwritten
    assert together == len(messages)
    assert left < 8


async def test_long_messages_that_are_sent_together_wait_for_the_client(serving: Serving) -> None:
    size, unwritten = 10_000, []

    async def answer(call: Call) -> None:
        await call.read()
        writing = asyncio.create_task(call.write(*[bytes(size)] * 100))
        await asyncio.sleep(0.3)
        assert not writing.done()
        unwritten.append(call._unwritten_bytes)
        await writing

    async with serving(answer) as channel, asyncio.timeout(30):
        call = begin(channel)
        await call.write(b"go")
        await until(lambda: bool(unwritten))
        assert [len(message) async for message in call] == [size] * 100
    assert unwritten[0] <= WINDOW + size


@pytest.mark.parametrize("direct", [False, True])
async def test_a_client_that_does_not_read_limits_what_is_sent(
    serving: Serving, direct: bool
) -> None:
    size, sent = 10_000, count()
    blocked = asyncio.Event()

    async def answer(call: Call) -> None:
        await call.read()
        while True:
            if direct and call.has_room():
                call.write_now(bytes(size))
            else:
                blocked.set()
                await call.write(bytes(size))
            next(sent)
            await asyncio.sleep(0)

    async with serving(answer) as channel, asyncio.timeout(30):
        call = begin(channel)
        await call.write(b"go")
        await blocked.wait()
        await asyncio.sleep(0.3)
        assert next(sent) * size < 8 * WINDOW
        call.cancel()


@pytest.mark.parametrize("messages", [0, 1, 3])
async def test_a_client_that_leaves_while_a_message_waits_cancels_its_answer(
    serving: Serving, messages: int
) -> None:
    waits, cancelled = asyncio.Event(), asyncio.Event()

    async def answer(call: Call) -> None:
        try:
            await call.read()
            for _ in range(messages):
                await call.write(b"small")
            waits.set()
            while True:
                await call.write(bytes(1_000_000))
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with serving(answer) as channel, asyncio.timeout(30):
        call = begin(channel)
        await call.write(b"go")
        await waits.wait()
        await asyncio.sleep(0.05)
        call.cancel()
        await cancelled.wait()


async def write_all(call: grpc.aio.StreamStreamCall, messages: list[bytes]) -> None:
    """Writes messages and closes this side of the stream, unless the call ends before."""
    with suppress(
        asyncio.CancelledError, asyncio.InvalidStateError, grpc.aio.AioRpcError, grpc.aio.BaseError
    ):
        for message in messages:
            await call.write(message)
        await call.done_writing()


class Peer:
    """A server and clients that write, read, wait, fail and leave at random."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.running = 0

    async def pause(self) -> None:
        if self.rng.random() < 0.5:
            await asyncio.sleep(self.rng.choice([0, 0, 0.001, 0.01]))

    async def answer(self, call: Call) -> None:
        """Echoes the first message, then sends numbered messages, and may fail."""
        self.running += 1
        try:
            first = await call.read()
            if first is None:
                return
            reads = self.rng.random() < 0.5
            await call.write(first)
            for number in range(self.rng.choice([0, 1, 2, 10, 40])):
                message = number.to_bytes(4, "big") + bytes(
                    self.rng.choice([0, 9, 30_000, 200_000])
                )
                if self.rng.random() < 0.6 and call.has_room():
                    call.write_now(message)
                else:
                    await call.write(message)
                await self.pause()
            while reads and (message := await call.read()) is not None:
                await call.write(message)
            if self.rng.random() < 0.3:
                await call.fail(status_pb2.Status(code=code_pb2.ABORTED, message=first.hex()))
            else:
                await call.flush()
        finally:
            self.running -= 1

    async def call(self, channel: grpc.aio.Channel, number: int) -> None:
        """Makes a call, and checks what it receives."""
        first = number.to_bytes(8, "big")
        call = begin(channel, self.rng.choice([None, None, None, 0.05]))
        received: list[bytes] = []
        sent: list[bytes] = []
        leaves = self.rng.choice([None, None, 0, 1, 5])
        writing: asyncio.Task[None] | None = None
        try:
            if self.rng.random() < 0.1:
                await self.pause()
                await asyncio.sleep(0.01)  # the call is forwarded without its first message
            await call.write(first)
            for extra in range(self.rng.choice([0, 0, 3])):
                sent.append(b"echo%d" % extra + bytes(self.rng.choice([0, 0, 300_000])))
            # Client and server may both wait for the other to read large messages.
            writing = asyncio.create_task(write_all(call, sent))
            while (message := await call.read()) is not grpc.aio.EOF:
                received.append(message)
                await self.pause()
                if len(received) == leaves:
                    call.cancel()
            code, details = await call.code(), await call.details()
        except asyncio.CancelledError:
            code, details = grpc.StatusCode.CANCELLED, ""
        except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
            code, details = await call.code(), await call.details()
        if writing is not None:
            writing.cancel()
            await asyncio.wait([writing])
        if details == "Internal error from Core":
            return  # the client's gRPC says so if it cannot send a message after the call's end
        assert code in {
            grpc.StatusCode.OK,
            grpc.StatusCode.ABORTED,
            grpc.StatusCode.CANCELLED,
            grpc.StatusCode.DEADLINE_EXCEEDED,
        }
        assert received[:1] == [first][: len(received)]
        echoed = [message for message in received[1:] if message.startswith(b"echo")]
        numbers = [int.from_bytes(m[:4], "big") for m in received[1 : len(received) - len(echoed)]]
        assert numbers == list(range(len(numbers)))
        assert echoed == sent[: len(echoed)]
        if code is grpc.StatusCode.OK:
            assert received
            assert len(numbers) in {0, 1, 2, 10, 40}
            assert len(echoed) in {0, len(sent)}
        elif code is grpc.StatusCode.ABORTED:
            assert details == first.hex()


@pytest.mark.parametrize("seed", range(3 * FACTOR))
async def test_calls_of_careless_clients_keep_their_order_and_end(
    serving: Serving, seed: int
) -> None:
    peer = Peer(seed)
    numbers = count()

    async def client(channel: grpc.aio.Channel) -> None:
        for _ in range(6):
            await peer.call(channel, next(numbers))

    async with serving(peer.answer) as channel, asyncio.timeout(60):
        await asyncio.gather(*(client(channel) for _ in range(12)))
        await until(lambda: not peer.running)
