"""A field that the server does not know is refused, wherever it is, by every rpc that is served."""

import asyncio
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from rheostat._proto.v1 import (
    capture_service_pb2,
    engine_service_pb2,
    generation_service_pb2,
    run_service_pb2,
    steering_service_pb2,
)
from rheostat_server import unknown_fields
from rheostat_server.limits import OFFLOAD_BYTES
from rheostat_server.unknown_fields import unknown_field

from .conftest import Refusal, rest
from .fakes import ScriptedBackend
from .messages import add, request, tensor
from .streams import settled
from .talks import start
from .uploads import chunk, header, values

Generate = generation_service_pb2.GenerateRequest

NUMBER = 77_777

RPCS = {
    f"{service.name}/{method.name}": method
    for module in (
        capture_service_pb2,
        engine_service_pb2,
        generation_service_pb2,
        run_service_pb2,
        steering_service_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Every rpc that is served."""


def varint(number: int) -> bytes:
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


UNKNOWN = field(NUMBER, b"from tomorrow")


def places(message: Descriptor, above: tuple[Descriptor, ...] = ()) -> Iterator[tuple[str, bytes]]:
    """Paths of the unknown field in the message and every message in it, each with the bytes."""
    yield f"#{NUMBER}", UNKNOWN
    for one in message.fields:
        if one.message_type is None or one.message_type in (*above, message):
            continue
        for path, inner in places(one.message_type, (*above, message)):
            if one.message_type.GetOptions().map_entry:
                key = field(1, b"key") if one.message_type.fields[0].type == STRING else b""
                if path.startswith("#"):  # in the entry itself, and in a value that is a message
                    yield f"{one.name}[key].{path}", field(one.number, key + inner)
            elif one.is_repeated:
                yield f"{one.name}[1].{path}", field(one.number, b"") + field(one.number, inner)
            else:
                yield f"{one.name}.{path}", field(one.number, inner)


STRING = FieldDescriptor.TYPE_STRING


async def call(channel: grpc.aio.Channel, name: str, *messages: bytes) -> None:
    """Sends these bytes, and reads to the end."""
    method: MethodDescriptor = RPCS[name]
    path = f"/rheostat.v1.{name}"
    match method.client_streaming, method.server_streaming:
        case False, False:
            await channel.unary_unary(path)(messages[0], timeout=10)
        case False, True:
            await rest(channel.unary_stream(path)(messages[0], timeout=10))
        case True, False:
            await channel.stream_unary(path)(iter(messages), timeout=10)
        case _:
            await rest(channel.stream_stream(path)(iter(messages), timeout=10))


async def refused(channel: grpc.aio.Channel, name: str, *messages: bytes) -> Refusal:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, name, *messages)
    return Refusal.of(caught.value)


def brief(path: str) -> tuple[grpc.StatusCode, str, str]:
    return grpc.StatusCode.INVALID_ARGUMENT, "REASON_UNKNOWN_FIELD", path


@pytest.mark.parametrize("name", RPCS)
async def test_it_is_refused_wherever_it_is_in_a_request(running, name) -> None:
    depths = set()
    for path, data in places(RPCS[name].input_type):
        refusal = await refused(running.client.channel, name, data)
        assert refusal.brief == brief(path)
        assert dict(refusal.metadata) == {"path": path}
        depths.add(path.count("."))
    assert depths == set(range(max(depths) + 1))
    await settled(running)


def test_the_places_are_of_every_kind() -> None:
    found = dict(places(Generate.DESCRIPTOR))
    for path in ("", "sampling.", "labels[key].", "captures[1].", "captures[1].run.lease."):
        assert f"{path}#{NUMBER}" in found
    assert f"steering.interventions[1].add.vector.inline.#{NUMBER}" in found
    assert f"chat.messages[1].#{NUMBER}" in found


@pytest.mark.parametrize(
    ("name", "first", "part"),
    [
        ("GenerationService/Session", start(), generation_service_pb2.SessionRequest()),
        ("SteeringService/PutVector", header(), chunk(values())),
    ],
)
async def test_a_later_message_of_a_stream_is_refused_too(starter, name, first, part) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event(), hold_from=1))
    later = part.SerializeToString() + UNKNOWN
    refusal = await refused(running.client.channel, name, first.SerializeToString(), later)
    assert refusal.brief == brief(f"#{NUMBER}")
    await settled(running)


async def test_a_later_message_of_a_subscription_is_refused_too(running) -> None:
    channel = running.client.channel
    call = channel.stream_stream("/rheostat.v1.CaptureService/Subscribe")(timeout=10)
    opened = capture_service_pb2.SubscribeRequest(
        open=capture_service_pb2.SubscribeOpen(
            filter={"every": {}}, captures=[{"sites": {"points": ["POINT_RESID_POST"], "all": {}}}]
        )
    )
    await call.write(opened.SerializeToString())
    await call.read()
    await call.write(UNKNOWN)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    assert Refusal.of(caught.value).brief == brief(f"#{NUMBER}")


def path_of(data: bytes, kind: type = Generate) -> str | None:
    return unknown_field(kind.FromString(data), data)


LARGE = request(
    text="x" * OFFLOAD_BYTES, steer=[add(tensor(np.ones((1, 4), np.float32))) for _ in range(3)]
)
MANY = request(steer=[add() for _ in range(OFFLOAD_BYTES // 8)])


@pytest.mark.parametrize("known", [request(), LARGE, MANY], ids=["small", "large", "many"])
def test_a_request_of_known_fields_has_none(known) -> None:
    assert path_of(known.SerializeToString()) is None


def test_it_is_found_in_a_large_message() -> None:
    data = LARGE.SerializeToString()
    assert path_of(data + UNKNOWN) == f"#{NUMBER}"
    inner = field(Generate.DESCRIPTOR.fields_by_name["sampling"].number, UNKNOWN)
    assert path_of(data + inner) == f"sampling.#{NUMBER}"
    assert path_of(inner + data) == f"sampling.#{NUMBER}"


def test_in_a_message_of_very_many_fields_it_is_refused_without_its_path() -> None:
    assert path_of(MANY.SerializeToString() + UNKNOWN) == ""


@pytest.mark.parametrize("filler", [b"", field(2, b"x" * OFFLOAD_BYTES)], ids=["small", "large"])
def test_other_encodings_of_known_fields_are_known(filler) -> None:
    """Unpacked numbers, defaults that are sent, map entries without key or value, fields twice."""
    ids = Generate.DESCRIPTOR.fields_by_name["token_ids"].number
    labels = Generate.DESCRIPTOR.fields_by_name["labels"].number
    baseline = Generate.DESCRIPTOR.fields_by_name["with_baseline"].number
    data = field(ids, b"\x08\x05\x08\x06") + field(labels, b"") + varint(baseline << 3) + b"\0"
    assert path_of(filler + data + data) is None
    assert path_of(filler + data + data + UNKNOWN) == f"#{NUMBER}"


@pytest.mark.parametrize("filler", [b"", field(2, b"x" * OFFLOAD_BYTES)], ids=["small", "large"])
def test_a_known_number_of_another_wire_type_is_unknown(filler) -> None:
    """Protobuf skips it like a number that it does not know."""
    sampling = Generate.DESCRIPTOR.fields_by_name["sampling"].number
    assert path_of(filler + varint(sampling << 3) + b"\1") == f"#{sampling}"


@pytest.mark.parametrize("name", RPCS)
def test_every_kind_of_field_can_be_walked(name, monkeypatch) -> None:
    """All fields set; no message is small."""
    monkeypatch.setattr(unknown_fields, "OFFLOAD_BYTES", -1)
    message = GetMessageClass(RPCS[name].input_type)()
    fill(message)
    assert path_of(message.SerializeToString(), type(message)) is None


def fill(message, depth: int = 0) -> None:
    """Sets every field that is no message, and the messages of the first levels."""
    for one in message.DESCRIPTOR.fields:
        if one.message_type is not None:
            if one.message_type.GetOptions().map_entry:
                getattr(message, one.name)["k"] = "v"
            elif depth < 4:
                inner = getattr(message, one.name)
                inner = inner.add() if one.is_repeated else inner
                inner.SetInParent()
                fill(inner, depth + 1)
            continue
        value = {
            FieldDescriptor.CPPTYPE_STRING: b"x" if one.type == FieldDescriptor.TYPE_BYTES else "x",
            FieldDescriptor.CPPTYPE_BOOL: True,
        }.get(one.cpp_type, 1)
        if one.is_repeated:
            getattr(message, one.name).extend([value] * 3)
        else:
            setattr(message, one.name, value)
