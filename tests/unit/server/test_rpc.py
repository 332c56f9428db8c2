"""The boundary of every rpc: what ends a call without being a defect of the server."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from rheostat_server.rpc import Calls, ErrorInterceptor

METHOD = "/rheostat.v1.Toy/Stream"


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


@asynccontextmanager
async def serving(handler: grpc.GenericRpcHandler, calls: Calls) -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=[ErrorInterceptor(calls)])
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


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
    caplog: pytest.LogCaptureFixture, cancel: bool
) -> None:
    handler, calls = Endless(), Calls()
    with caplog.at_level(logging.DEBUG, logger="rheostat_server"):
        async with serving(handler, calls) as target:
            for _ in range(20):
                await asyncio.to_thread(hang_up, target, cancel=cancel)
            await asyncio.wait_for(calls.until_none(), 60)
    assert [one.getMessage() for one in caplog.records if one.levelno > logging.INFO] == []
    assert handler.left == [GeneratorExit] * 20
