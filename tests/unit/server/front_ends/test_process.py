"""A front end in the process of the test, and the connection between it and the server.

Its calls are also tested without the connection, as a server without front ends forwards them.
"""

import asyncio
import gc
import os
import socket
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from google.rpc import code_pb2, status_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rheostat_server.front_ends import forwarder, supervisor
from rheostat_server.front_ends.call import Call
from rheostat_server.front_ends.call_starts import CallStarts
from rheostat_server.front_ends.core_server import CoreCall, FairLock
from rheostat_server.front_ends.grpc_server import GrpcServer
from rheostat_server.front_ends.large_messages import ReceivedPieces
from rheostat_server.front_ends.local_calls import SERVICES
from rheostat_server.front_ends.process import FrontEnd, _ServerConnection
from rheostat_server.front_ends.record_connection import RecordConnection
from rheostat_server.front_ends.records import (
    First,
    Kind,
    read_call_body,
    seconds_body,
)
from rheostat_server.front_ends.shared_parts import SharedParts, create_memory

from ..streams import until

METHOD = "/rheostat.v1.GenerationService/Session"


async def answer(path: str, call: Call) -> None:
    """Does what the first message says."""
    first = await call.read()
    if first == b"fail":
        await call.fail(status_pb2.Status(code=code_pb2.ABORTED, message="as asked"))
        return
    while first == b"stay":
        await call.write(bytes(1000))
    if first == b"upload":
        await call.write(b"ready")
        while await call.read() is not None:
            pass
    await call.write(b"one")
    await call.write(b"two")
    await call.flush()


@pytest.fixture(params=["over a socket", "in memory"])
async def channel(request: pytest.FixtureRequest) -> AsyncIterator[grpc.aio.Channel]:
    """A connection to a forwarder, which passes records over a socket or in memory."""
    serve = front_end if request.param == "over a socket" else without_front_end
    async with (
        serve() as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as connected,
    ):
        yield connected


@asynccontextmanager
async def without_front_end() -> AsyncIterator[int]:
    """A server without front ends; yields its port."""
    server = GrpcServer(answer)
    yield await server.start("127.0.0.1", 0)
    await server.stop(0)


@asynccontextmanager
async def front_end() -> AsyncIterator[int]:
    """A front end in this process; yields its port."""
    reserved = supervisor._reserve("127.0.0.1", 0)
    port = reserved[0].getsockname()[1]
    own, other = socket.socketpair()
    server = supervisor._FrontEnd("", 0, answer, CallStarts(8))
    await asyncio.get_running_loop().create_connection(lambda: server._connection, sock=own)
    memory = create_memory()
    other_end = FrontEnd(SharedParts(memory))
    os.close(memory)
    running = asyncio.create_task(other_end.run(other, "127.0.0.1", port))
    await server._listening
    yield port
    server._connection.send(Kind.STOP, 0, seconds_body(0.0))
    await running
    for each in reserved:
        each.close()


def left() -> Counter[str]:
    """How many objects of front ends there are that were made since the last `gc.freeze`."""
    names = [f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects()]
    return Counter(name for name in names if name.startswith("rheostat_server.front_ends."))


async def test_calls_leave_no_objects_in_a_front_end(channel: grpc.aio.Channel) -> None:
    async def make(first: bytes) -> grpc.StatusCode:
        call = channel.stream_stream(METHOD)()
        await call.write(first)
        await call.done_writing()
        if first == b"stay":
            await call.read()
            call.cancel()
        else:
            while await call.read() is not grpc.aio.EOF:
                pass
        return await call.code()

    async def make_all() -> None:
        kinds = [b"", b"fail", b"stay"] * 5
        codes = await asyncio.gather(*map(make, kinds), return_exceptions=True)
        assert grpc.StatusCode.OK in codes

    await make_all()
    gc.collect()
    # Otherwise each look would visit all objects of vLLM, if another test has loaded it. That takes
    # a second, and the event loop goes on between two looks alone.
    gc.freeze()
    gc.disable()
    try:
        await make_all()
        await until(lambda: not left())
    finally:
        gc.enable()


async def test_a_client_that_leaves_is_not_mistaken_for_one_that_has_sent_everything(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[Kind] = []
    receive = Call.receive

    def record(call: Call, kind: Kind, body: bytes) -> None:
        received.append(kind)
        receive(call, kind, body)

    monkeypatch.setattr(Call, "receive", record)
    calls = [channel.stream_stream(METHOD)() for _ in range(20)]
    for call in calls:
        await call.write(b"upload")
        assert await call.read() == b"ready"
    await asyncio.sleep(0.02)  # the front end reads the next messages
    for call in calls[1:]:
        call.cancel()
    await until(lambda: received.count(Kind.DONE) == len(calls) - 1)
    assert Kind.HALF_CLOSED not in received
    await calls[0].done_writing()
    assert [await calls[0].read() for _ in range(3)] == [b"one", b"two", grpc.aio.EOF]
    assert received.count(Kind.HALF_CLOSED) == 1


@pytest.mark.parametrize("broken", [b"one", b"two"])
async def test_a_call_whose_record_cannot_be_processed_gets_a_status_and_others_go_on(
    channel: grpc.aio.Channel, broken: bytes, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    write, breaks = CoreCall.write, [True]

    def write_or_fail(call: CoreCall, message: bytes, taken: object) -> None:
        if message == broken and breaks:
            breaks.clear()
            raise RuntimeError("gRPC refuses an operation of a call: error 8")
        write(call, message, taken)

    monkeypatch.setattr(CoreCall, "write", write_or_fail)
    other = channel.stream_stream(METHOD)()
    await other.write(b"upload")
    assert await other.read() == b"ready"
    async with asyncio.timeout(30):
        call = channel.stream_stream(METHOD)()
        await call.write(b"")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [message async for message in call]
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "the server's log" in (caught.value.details() or "")
    assert "could not be processed" in caplog.text
    await other.done_writing()
    assert [await other.read() for _ in range(3)] == [b"one", b"two", grpc.aio.EOF]


async def test_a_call_that_gets_no_status_is_cancelled(
    channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(call: CoreCall, *arguments: object) -> None:
        raise RuntimeError("gRPC refuses an operation of a call: error 8")

    async with asyncio.timeout(30):
        with monkeypatch.context() as patched:
            patched.setattr(CoreCall, "write", fail)
            patched.setattr(CoreCall, "end", fail)
            call = channel.stream_stream(METHOD)()
            await call.write(b"")
            assert await call.code() is not grpc.StatusCode.OK
        again = channel.stream_stream(METHOD)()
        await again.write(b"")
        assert [await again.read() for _ in range(3)] == [b"one", b"two", grpc.aio.EOF]


async def test_a_large_first_message_that_is_read_early_counts_as_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise it would wait for the reads of others, in memory that nothing counts."""
    monkeypatch.setattr(forwarder, "_EARLY_SECONDS", 10.0)
    received: list[tuple[bool, str | None]] = []
    read = Call.read

    async def recorded(call: Call) -> bytes | None:
        received.append((call.received(), call.connection()))
        message = await read(call)
        assert message == bytes(1 << 20)
        assert not call.received()
        return message

    monkeypatch.setattr(Call, "read", recorded)
    async with front_end() as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(METHOD)()
        await call.write(bytes(1 << 20))
        assert await call.read() == b"one"
        call.cancel()
    assert received == [(True, None)]


def waiting_bytes(connection: RecordConnection) -> int:
    """Bytes that wait to be sent."""
    assert connection._transport is not None
    large = [record for records in connection._large._waiting.values() for record in records]
    parts = [*connection._outgoing, *(part for record in large for part in record.body)]
    return connection._transport.get_write_buffer_size() + sum(map(len, parts))


async def test_first_messages_do_not_pile_up_while_the_server_does_not_read() -> None:
    size, count = 1 << 20, 48
    reserved = supervisor._reserve("127.0.0.1", 0)
    port = reserved[0].getsockname()[1]
    own, other = socket.socketpair()
    memory = create_memory()
    front_end = FrontEnd(SharedParts(memory))
    os.close(memory)
    messages: Counter[int] = Counter()
    pieces: defaultdict[int, ReceivedPieces] = defaultdict(ReceivedPieces)
    unread: list[int] = []
    listening = asyncio.Event()

    def receive(kind: Kind, number: int, body: bytes) -> None:
        if kind is Kind.LISTENING:
            listening.set()
        elif kind is Kind.BEGIN:
            begin = read_call_body(body)
            messages[number] += len(begin.message) == size
            if begin.first is First.UNREAD:
                unread.append(number)
        elif kind is Kind.PIECE:
            pieces[number].add(body)
        elif kind is Kind.MESSAGE:
            messages[number] += len(pieces[number].complete(body)) == size

    server = RecordConnection(receive, lambda: None)
    transport, _ = await asyncio.get_running_loop().create_connection(lambda: server, sock=own)
    running = asyncio.create_task(front_end.run(other, "127.0.0.1", port))
    await listening.wait()
    transport.pause_reading()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        calls = [channel.stream_stream(METHOD)() for _ in range(count)]
        writing = [asyncio.create_task(call.write(bytes(size))) for call in calls]
        await until(
            lambda: front_end._forwarder._begun == count and not front_end._forwarder._unforwarded
        )
        await asyncio.sleep(0.1)  # reads that run may end
        assert 0 < waiting_bytes(front_end._connection) <= 8 * size
        # Once the server reads, every message comes.
        transport.resume_reading()
        await until(lambda: len(messages) == count)
        for number in unread:
            server.send(Kind.READ, number)
        await until(lambda: messages.total() == count)
        assert set(messages.values()) == {1}
        await asyncio.gather(*writing)
        for call in calls:
            call.cancel()
        await until(lambda: front_end.idle)
    server.send(Kind.STOP, 0, seconds_body(0.0))
    await running
    for each in reserved:
        each.close()


async def test_a_method_whose_name_is_not_utf8_is_not_found(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(b"/rheostat.v1.\xff/\xfe")(b"", timeout=30)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_front_end_answers_health_checks_and_reflection(channel: grpc.aio.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    ask = HealthCheckRequest(service=SERVICES[0])
    assert (await health.Check(ask)).status == HealthCheckResponse.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health.Check(HealthCheckRequest(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = health.Watch(HealthCheckRequest(service="nobody"))
    assert (await watch.read()).status == HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()
    reflect = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
    for _ in range(2):
        await reflect.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = (await reflect.read()).list_services_response.service
        assert set(SERVICES) <= {service.name for service in listed}
    await reflect.done_writing()
    assert await reflect.read() is grpc.aio.EOF
    assert await reflect.code() is grpc.StatusCode.OK


async def test_records_keep_their_order_when_the_socket_is_full() -> None:
    own, other = socket.socketpair()
    for end in (own, other):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        end.setblocking(False)
    lock = FairLock(lambda: connection.write_all())
    connection = _ServerConnection(lock, lambda *record: None, lambda: None, lambda: None)
    await connection.open(other)
    received: list[bytes] = []
    pieces = ReceivedPieces()

    def receive(kind: Kind, call: int, body: bytes) -> None:
        if kind is Kind.PIECE:
            pieces.add(body)
        else:
            received.append(pieces.complete(body))

    reading = RecordConnection(receive, lambda: None)
    sent = [bytes([number % 256]) * (number * 997 % 90_000) for number in range(300)]

    def send() -> None:
        for body in sent:
            with lock:
                connection.send(Kind.MESSAGE, 1, body)

    sending = asyncio.get_running_loop().run_in_executor(None, send)
    async with asyncio.timeout(30):
        while len(received) < len(sent):
            await asyncio.sleep(0.001)
            try:
                reading.data_received(own.recv(1 << 16))
            except BlockingIOError:
                continue
    await sending
    assert received == sent
    connection.close()
    own.close()
