"""Bytes that are no message of the rpc are refused like any other mistake of a client."""

import asyncio

import grpc
import pytest

from rheostat_server.api.incoming import lean
from rheostat_wire.v1 import generation_service_pb2

from ..conftest import Refusal, rest
from ..fakes import ScriptedBackend
from ..streams import settled
from ..talks import start

GARBAGE = b"\xff\xff\xff"
BRIEF = (grpc.StatusCode.INVALID_ARGUMENT, "REASON_INVALID_VALUE", "")

UNARY = ["EngineService/GetStats", "GenerationService/Explain", "SteeringService/SetGlobal"]


@pytest.mark.parametrize("method", UNARY)
async def test_a_unary_rpc_refuses_it(running, method) -> None:
    call = running.client.channel.unary_unary(f"/rheostat.v1.{method}")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(GARBAGE, timeout=10)
    refusal = Refusal.of(caught.value)
    assert refusal.brief == BRIEF
    assert refusal.message == "the request cannot be decoded as a message of this rpc"


async def test_a_stream_of_answers_refuses_it(running) -> None:
    call = running.client.channel.unary_stream("/rheostat.v1.GenerationService/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(GARBAGE, timeout=10).read()
    assert Refusal.of(caught.value).brief == BRIEF


async def test_an_upload_refuses_it(running) -> None:
    call = running.client.channel.stream_unary("/rheostat.v1.SteeringService/PutVector")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(iter([GARBAGE]), timeout=10)
    assert Refusal.of(caught.value).brief == BRIEF


@pytest.mark.parametrize("begun", [False, True])
async def test_a_session_ends_with_it_and_holds_nothing(starter, begun) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event(), hold_from=1))
    call = running.client.channel.stream_stream("/rheostat.v1.GenerationService/Session")(
        timeout=10
    )
    if begun:
        await call.write(start().SerializeToString())
        await call.read()
    await call.write(GARBAGE)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    assert Refusal.of(caught.value).brief == BRIEF
    await settled(running)


def test_a_message_holds_nothing_of_fields_that_came_twice() -> None:
    data = start(text="x" * 1_000_000).SerializeToString() + start(text="y").SerializeToString()
    read = generation_service_pb2.SessionRequest.FromString(data)
    assert lean(read, len(data)) == read
    assert lean(read, len(data)) is not read


def test_a_large_message_is_read_as_it_is() -> None:
    long = start(text="x" * 1_000_000)
    assert lean(long, long.ByteSize()) is long
