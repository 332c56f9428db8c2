"""The boundary of every rpc: what ends a call without being a defect of the server."""

import asyncio
import logging
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import pairwise

import grpc
import grpc.aio
import pytest
from google.rpc import code_pb2, status_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from rheostat_server.api.incoming import Calls
from rheostat_server.api.rpc import Rpcs
from rheostat_server.errors import ResponseOverflow, RheostatError
from rheostat_server.front_ends.call import Call
from rheostat_server.front_ends.call_starts import CallStarts
from rheostat_server.front_ends.grpc_server import GrpcServer
from rheostat_server.front_ends.records import CallBegin, First, Kind
from rheostat_server.front_ends.supervisor import FrontEnds
from rheostat_server.limits import LARGE_MESSAGE_BYTES
from rheostat_server.tasks.interruption import interrupter

from ..conftest import rest
from ..streams import until

METHOD = "/rheostat.v1.GenerationService/Generate"


Serving = Callable[[grpc.GenericRpcHandler, Calls], AbstractAsyncContextManager[str]]


class Endless(grpc.GenericRpcHandler):
    """Answers without end; notes how its behaviour was left."""

    def __init__(self) -> None:
        self.left: list[type[BaseException]] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_stream_rpc_method_handler(self.answer)

    async def answer(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        try:
            while True:
                yield bytes(100_000)
        except BaseException as error:
            self.left.append(type(error))
            raise


@pytest.fixture(params=[0, 1], ids=["no front end", "one front end"])
def serving(request: pytest.FixtureRequest) -> Serving:
    """Serves a toy method in place of Generate, in this process or with a front end."""

    @asynccontextmanager
    async def serve(handler: grpc.GenericRpcHandler, calls: Calls) -> AsyncIterator[str]:
        rpcs = Rpcs(calls)
        service, _, name = METHOD.removeprefix("/").partition("/")
        rpcs.add_registered_method_handlers(service, {name: handler.service(None)})
        server = FrontEnds(1, rpcs.answer) if request.param else GrpcServer(rpcs.answer)
        port = await server.start("127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(0)

    return serve


def hang_up(target: str, *, cancel: bool) -> None:
    """Reads one answer, lets the others fill the connection, then cancels the call or closes."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(target, options=options) as channel:
        call = channel.unary_stream(METHOD)(b"")
        next(call)
        time.sleep(0.05)
        if cancel:
            call.cancel()


@pytest.mark.parametrize("cancel", [True, False])
async def test_a_client_that_goes_away_during_a_write_is_no_incident(
    serving: Serving, caplog: pytest.LogCaptureFixture, cancel: bool
) -> None:
    handler, calls = Endless(), Calls(100)
    with caplog.at_level(logging.DEBUG, logger="rheostat_server"):
        async with serving(handler, calls) as target:
            for _ in range(20):
                await asyncio.to_thread(hang_up, target, cancel=cancel)
            await asyncio.wait_for(calls.until_none(), 60)
    own = [one for one in caplog.records if one.name.startswith("rheostat")]
    assert [one.getMessage() for one in own if one.levelno > logging.INFO] == []
    assert handler.left == [GeneratorExit] * 20


class Lists(grpc.GenericRpcHandler):
    """Answers with lists of messages."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_stream_rpc_method_handler(self.answer)

    async def answer(self, request: bytes, context: object) -> AsyncIterator[list[bytes]]:
        yield [b"one"]
        yield [b"two", b"three", b"four"]


async def test_lists_of_responses_are_single_messages_for_the_client(serving: Serving) -> None:
    async with serving(Lists(), Calls(100)) as target, grpc.aio.insecure_channel(target) as channel:
        received = await rest(channel.unary_stream(METHOD)(b""))
    assert received == [b"one", b"two", b"three", b"four"]


class BreaksOff(grpc.GenericRpcHandler):
    """Answers one message, then is cancelled although its client is there."""

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_stream_rpc_method_handler(self.answer)

    async def answer(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        yield b"first"
        raise asyncio.CancelledError


async def test_an_answer_that_breaks_off_does_not_end_well(serving: Serving) -> None:
    async with (
        serving(BreaksOff(), Calls(8)) as target,
        grpc.aio.insecure_channel(target) as channel,
    ):
        call = channel.unary_stream(METHOD)(b"", timeout=10)
        assert await call.read() == b"first"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(call)
        assert caught.value.code() is grpc.StatusCode.INTERNAL


class Parsing(grpc.GenericRpcHandler):
    """Reads one message of a stream; notes in which iteration of the event loop it was parsed."""

    def __init__(self) -> None:
        self.begun = 0
        self.parsed: list[int] = []
        self.iteration = 0

    def count(self) -> None:
        self.iteration += 1
        asyncio.get_running_loop().call_soon(self.count)

    def decode(self, data: bytes) -> bytes:
        self.parsed.append(self.iteration)
        return data

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.stream_unary_rpc_method_handler(self.answer, self.decode)

    async def answer(self, requests: AsyncIterator[bytes], context: object) -> bytes:
        self.begun += 1
        async for request in requests:
            return len(request).to_bytes(4, "big")
        return b""


def send(target: str, size: int, go: threading.Event) -> bytes:
    """Opens a stream; sends a message on it once it may."""

    def messages() -> Iterator[bytes]:
        go.wait()
        yield bytes(size)

    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(target, options=options) as channel:
        answer: bytes = channel.stream_unary(METHOD)(messages())
        return answer


async def test_no_two_large_messages_are_parsed_in_one_iteration_of_the_event_loop(
    serving: Serving,
) -> None:
    handler, go, size = Parsing(), threading.Event(), LARGE_MESSAGE_BYTES + 1
    async with serving(handler, Calls(100)) as target:
        calls = [asyncio.create_task(asyncio.to_thread(send, target, size, go)) for _ in range(4)]
        await until(lambda: handler.begun == 4)
        go.set()
        time.sleep(0.5)  # all messages arrive before the loop runs again
        handler.count()
        assert await asyncio.gather(*calls) == [size.to_bytes(4, "big")] * 4
    assert len(set(handler.parsed)) == 4


class Interrupted(grpc.GenericRpcHandler):
    """Fails after its last message, which its client does not read yet.

    If the message is still being written then, the call is interrupted. Otherwise the handler sees
    the error itself, as handlers of requests do.
    """

    def __init__(self, messages: int, size: int) -> None:
        self.messages, self.size = messages, size
        self.failed = asyncio.Event()
        self.left = asyncio.Event()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_stream_rpc_method_handler(self.answer)

    async def answer(self, request: bytes, context: object) -> AsyncIterator[bytes]:
        ending: asyncio.Task[None] | None = None
        try:
            for number in range(self.messages):
                if number == self.messages - 1:
                    ending = asyncio.create_task(self.end(interrupter()))
                yield bytes(self.size)
            await self.failed.wait()
            raise ResponseOverflow("too slow")
        finally:
            self.left.set()
            assert ending is not None
            ending.cancel()

    async def end(self, interrupt: Callable[[RheostatError], None]) -> None:
        await asyncio.sleep(0.05)  # until the headers were sent, so that the message blocks
        while not self.left.is_set():
            interrupt(ResponseOverflow("too slow"))
            self.failed.set()
            await asyncio.sleep(0)


@pytest.mark.parametrize("messages", [1, 2, 5])
@pytest.mark.parametrize("size", [10, 10_000_000])
async def test_a_call_whose_client_does_not_read_can_be_ended_with_an_error(
    serving: Serving, messages: int, size: int
) -> None:
    handler, calls = Interrupted(messages, size), Calls(8)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    async with (
        serving(handler, calls) as target,
        grpc.aio.insecure_channel(target, options=options) as channel,
        asyncio.timeout(30),
    ):
        call = channel.unary_stream(METHOD)(b"")
        for _ in range(messages - 1):
            assert len(await call.read()) == size
        await handler.left.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(call)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == "too slow"


async def test_a_failed_call_whose_client_does_not_read_keeps_its_place_for_a_while(
    serving: Serving,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("call", "forwarder"):
        monkeypatch.setattr(f"rheostat_server.front_ends.{name}.STATUS_SECONDS", 2.0)
    handler, calls = Interrupted(1, 10_000_000), Calls(1)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    async with (
        serving(handler, calls) as target,
        grpc.aio.insecure_channel(target, options=options) as channel,
        asyncio.timeout(30),
    ):
        unread = channel.unary_stream(METHOD)(b"")
        await handler.left.wait()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(channel.unary_stream(METHOD)(b""))
        assert "1 calls run" in caught.value.details()
        await calls.until_none()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(unread)
        assert caught.value.details() == "too slow"


async def test_a_call_that_stands_back_can_be_ended_with_an_error() -> None:
    starts, ends = CallStarts(1), list[status_pb2.Status]()

    def send(kind: Kind, *body: bytes) -> None:
        if kind is Kind.END:
            ends.append(status_pb2.Status.FromString(b"".join(body)))
            call.receive(Kind.DONE, b"")

    async def answer(request: bytes, context: object) -> AsyncIterator[list[bytes]]:
        loop, error = asyncio.get_running_loop(), ResponseOverflow("too slow")
        loop.call_soon(interrupter(), error)
        yield [b"more messages than can be sent before the client reads"] * 6

    rpcs = Rpcs(Calls(8))
    service, _, name = METHOD.removeprefix("/").partition("/")
    rpcs.add_registered_method_handlers(
        service, {name: grpc.unary_stream_rpc_method_handler(answer)}
    )
    for _ in range(10):
        starts.call(lambda: None)
    call = Call(send, CallBegin(METHOD, None, First.HERE, b""), starts)
    await asyncio.wait_for(rpcs.answer(METHOD, call), 10)
    assert [status.code for status in ends] == [code_pb2.RESOURCE_EXHAUSTED]


async def test_large_messages_take_at_most_half_of_the_event_loops_time(serving: Serving) -> None:
    handler, go, size = Parsing(), threading.Event(), LARGE_MESSAGE_BYTES + 1
    slow, spans = 0.05, []

    def decode(data: bytes) -> bytes:
        begun = time.perf_counter()
        time.sleep(slow)  # parsing holds the loop up
        spans.append((begun, time.perf_counter()))
        return data

    handler.decode = decode  # type: ignore[method-assign]  # another way to parse
    async with serving(handler, Calls(100)) as target:
        calls = [asyncio.create_task(asyncio.to_thread(send, target, size, go)) for _ in range(4)]
        await until(lambda: handler.begun == 4)
        go.set()
        await asyncio.gather(*calls)
    pauses = [later - ended for (_, ended), (later, _) in pairwise(spans)]
    assert min(pauses) >= 0.9 * slow


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    """A frame of HTTP/2."""
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def _watch_without_window() -> bytes:
    """What a client sends that watches the health, and has no room for an answer."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/grpc.health.v1.Health/Watch",
        ":authority": "x",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b"".join(
        b"\x00" + bytes([len(key)]) + key.encode() + bytes([len(value)]) + value.encode()
        for key, value in headers.items()
    )
    no_window = struct.pack(">HI", 4, 0)
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + _frame(4, 0, 0, no_window)
        + _frame(1, 4, 1, block)
        + _frame(0, 1, 1, bytes(5))
    )


@pytest.mark.parametrize("front_ends", [0, 1])
async def test_a_watcher_that_does_not_read_does_not_keep_the_health_from_others(
    front_ends: int,
) -> None:
    rpcs = Rpcs(Calls(8))
    server = FrontEnds(1, rpcs.answer) if front_ends else GrpcServer(rpcs.answer)
    port = await server.start("127.0.0.1", 0)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_watch_without_window())
        await reader.read(9)
        writer.write(_frame(4, 1, 0, b""))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel, asyncio.timeout(10):
            health = health_pb2_grpc.HealthStub(channel)
            ask = HealthCheckRequest(service="rheostat.v1.GenerationService")
            await asyncio.sleep(0.5)  # the watch begins
            server.set_health(HealthCheckResponse.SERVING)
            while (await health.Check(ask)).status != HealthCheckResponse.SERVING:
                await asyncio.sleep(0.01)
        writer.close()
    finally:
        await server.stop(0)
