"""The event loop of the server, beside gRPC's own server and client."""

import asyncio
import subprocess
import sys
import time

import grpc
import grpc.aio

CALLS = 600
"""More than the bytes that fit into gRPC's socket."""


async def iterations() -> int:
    """Iterations in which a loop that was busy receives a message of each of many calls."""
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
        time.sleep(0.3)  # gRPC's thread takes the events meanwhile
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


def of(loop: str) -> int:
    """The same in a process of its own, because gRPC has one thread in each process."""
    code = (
        "import asyncio; from rheostat_server.tasks.event_loop import EventLoop;"
        f"from {__name__} import iterations;"
        f"print(asyncio.Runner(loop_factory={loop}).run(iterations()))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(ran.stdout)


def test_events_of_grpc_that_piled_up_are_handled_in_few_iterations() -> None:
    assert of("EventLoop") < CALLS / 10


def test_asyncios_own_loop_would_take_many() -> None:
    # If this fails, gRPC has mended it, and the loop of the server can go.
    assert of("asyncio.SelectorEventLoop") > CALLS / 10
