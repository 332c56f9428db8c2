"""gRPC's events in a busy event loop, beside gRPC's own server and client."""

import asyncio
import select
import socket
import subprocess
import sys
import threading
import time
from contextlib import nullcontext, suppress
from typing import cast

import grpc
import grpc.aio
import pytest

from rheostat_wire import wakeups
from rheostat_wire.wakeups import all_wakeups_read

CALLS = 600
"""More calls than gRPC's socket can hold bytes."""


async def iterations() -> int:
    """The number of iterations in which a busy loop receives one message of each of many calls."""
    received = 0

    async def handle(_: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        nonlocal received
        await context.write(b"ready")
        while await context.read() is not grpc.aio.EOF:
            received += 1

    class Handlers(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return grpc.stream_stream_rpc_method_handler(handle, None, None)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        calls = [channel.stream_stream("/a/b")() for _ in range(CALLS)]
        for call in calls:
            assert await call.read() == b"ready"
        writes = [asyncio.create_task(call.write(b"message")) for call in calls]
        await asyncio.sleep(0.001)
        time.sleep(0.3)  # meanwhile gRPC's thread takes the events
        count = 0
        while received < CALLS:
            await asyncio.sleep(0)
            count += 1
            time.sleep(0.002)  # an iteration of a busy loop
        await asyncio.gather(*writes)
        for call in calls:
            call.cancel()
    await server.stop(None)
    return count


CHANNEL = "grpc.aio.insecure_channel('localhost:1')"
CLIENT = "rheostat.aio.connect('localhost:1').stream('a prompt')"
BENCHMARK = "rheostat_bench.calls.connect('localhost:1')"


def after(first: str, loop: str = "asyncio.SelectorEventLoop", module: str = "rheostat.aio") -> int:
    """The `iterations` of a loop in which `first` was the first object of gRPC.

    The loop runs in a process of its own, because gRPC has one thread in each process.
    """
    code = (
        f"import asyncio, grpc.aio, {module}; from {__name__} import all_wakeups_read, iterations\n"
        "async def count():\n"
        f"    first = {first}\n"
        "    return await iterations()\n"
        f"print(asyncio.Runner(loop_factory={loop}).run(count()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(ran.stdout)


def test_a_client_handles_events_that_piled_up_in_few_iterations() -> None:
    assert after(CLIENT) < CALLS / 10


def test_a_client_in_a_loop_of_uvloop_does_too() -> None:
    pytest.importorskip("uvloop")
    assert after(CLIENT, "uvloop.new_event_loop", "rheostat.aio, uvloop") < CALLS / 10


def test_a_channel_of_a_benchmark_does_too() -> None:
    # Otherwise the benchmark would measure the delay of its own client.
    assert after(BENCHMARK, module="rheostat_bench.calls") < CALLS / 10


def test_grpc_alone_would_take_many() -> None:
    # If this fails, gRPC reads all bytes itself, and `all_wakeups_read` is no longer needed.
    assert after(CHANNEL) > CALLS / 10


def calls_of_a_loop(calls: int, answers: list[int]) -> None:
    async def run() -> int:
        async def handle(request: bytes, _: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            return request

        class Handlers(grpc.GenericRpcHandler):
            def service(self, _: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
                return grpc.unary_unary_rpc_method_handler(handle, None, None)

        with all_wakeups_read():
            server = grpc.aio.server()
        server.add_generic_rpc_handlers((Handlers(),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        answered = 0
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            ask = channel.unary_unary("/a/b")
            for _ in range(calls // 20):
                answered += len(await asyncio.gather(*(ask(b"") for _ in range(20))))
        await server.stop(None)
        return answered

    answers.append(asyncio.run(run()))


def test_loops_of_several_threads_lose_no_event() -> None:
    # The loops read the same socket. If an event had no byte, no loop would handle it.
    answers: list[int] = []
    threads = [
        threading.Thread(target=calls_of_a_loop, args=(1000, answers), daemon=True)
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [1000] * 3


def read_by_two_threads(byte_count: int, *, other_reads: bool) -> tuple[int, int]:
    """The calls of gRPC's handler, and the bytes left for it.

    Args:
        byte_count: unread bytes in the socket.
        other_reads: whether the loop of another thread reads them at the same time.
    """
    calls = 0

    def handle() -> None:
        nonlocal calls
        calls += 1

    read, write = socket.socketpair()
    with read, write:
        read.setblocking(False)
        write.send(bytes(byte_count))
        with wakeups._reading if other_reads else nullcontext():
            wakeups._with_all_bytes(read, handle)
        with suppress(BlockingIOError):
            return calls, len(read.recv(100))
        return calls, 0


def test_a_byte_stays_for_grpc_which_handles_the_events() -> None:
    assert read_by_two_threads(5, other_reads=False) == (1, 1)


def test_a_loop_reads_no_bytes_while_another_thread_does() -> None:
    # Each thread leaves one of the bytes that it sees. If both read, they may leave none.
    assert read_by_two_threads(5, other_reads=True) == (0, 5)


def readable(end: socket.socket) -> bool:
    """Whether bytes have come. `select` could not tell it of a descriptor above 1,023."""
    poll = select.poll()
    poll.register(end, select.POLLIN)
    return bool(poll.poll(0))


def test_no_event_is_left_without_a_byte_if_other_threads_run_between_two_reads() -> None:
    events, handled = [0], list[int]()

    def handle() -> None:  # as gRPC does
        read.recv(1)
        handled.extend(events)
        events.clear()

    def run_others() -> None:
        for _ in range(2):
            if readable(read):
                wakeups._with_all_bytes(read, handle)
        events.append(1)
        write.send(b"1")

    class Reader:
        def recv(self, size: int, flags: int = 0) -> bytes:
            received = read.recv(size, flags)
            if flags:
                other = threading.Thread(target=run_others)
                other.start()
                other.join()
            return received

    read, write = socket.socketpair()
    with read, write:
        read.setblocking(False)
        write.send(bytes(3))
        wakeups._with_all_bytes(cast(socket.socket, Reader()), handle)
        while readable(read):
            wakeups._with_all_bytes(read, handle)
    assert handled == [0, 1]


def test_events_behind_one_of_a_closed_loop_are_handled() -> None:
    # gRPC's handler raises at an event whose loop is closed, and leaves the events behind it.
    events, handled = [*range(6)], list[int]()

    def handle() -> None:
        read.recv(1)
        while events:
            event = events.pop(0)
            if event % 2:
                raise RuntimeError("Event loop is closed")
            handled.append(event)

    read, write = socket.socketpair()
    with read, write:
        read.setblocking(False)
        write.send(bytes(len(events)))
        raised = 0
        while readable(read):
            try:
                wakeups._with_all_bytes(read, handle)
            except RuntimeError:
                raised += 1
    assert (handled, raised) == ([0, 2, 4], 3)


def test_an_event_may_be_the_last_of_grpc_which_closes_the_socket() -> None:
    read, write = socket.socketpair()
    with read, write:
        read.setblocking(False)
        write.send(bytes(3))
        wakeups._with_all_bytes(read, read.close)


def test_a_loop_that_finds_no_byte_leaves_the_events_to_the_thread_that_read_it() -> None:
    assert read_by_two_threads(0, other_reads=False) == (0, 0)


def test_the_loop_is_left_as_it_was() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        before = dict(vars(loop))
        with all_wakeups_read():
            assert vars(loop) != before
        assert vars(loop) == before

        replaced = loop.add_reader
        loop.add_reader = replaced  # type: ignore[method-assign]  # as a debugger may
        with all_wakeups_read():
            assert vars(loop)["add_reader"] is not replaced
        assert vars(loop)["add_reader"] is replaced

    asyncio.run(run())


def test_without_a_running_loop_nothing_changes() -> None:
    with all_wakeups_read():
        pass
