"""A field that the server does not know is refused, wherever it is, by every rpc that is served."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from rheostat_server.api.unknown_fields import Walk, unknown_field
from rheostat_server.limits import OFFLOAD_BYTES
from rheostat_wire.v1 import (
    capture_service_pb2,
    engine_service_pb2,
    generation_service_pb2,
    types_pb2,
)

from ..conftest import Refusal, rest
from ..fakes import ScriptedBackend
from ..messages import add, request, tensor
from ..streams import settled
from ..talks import start
from ..uploads import chunk, header, values

Generate = generation_service_pb2.GenerateRequest

NUMBER = 77_777

ROOT = Path(__file__).parents[4]
RPCS = {
    f"{service.name}/{method.name}": method
    for path in sorted((ROOT / "proto" / "rheostat" / "v1").glob("*_service.proto"))
    if path.relative_to(ROOT).as_posix() not in (ROOT / "buf.yaml").read_text()
    for service in import_module(
        f"rheostat_wire.v1.{path.stem}_pb2"
    ).DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Every rpc that is served. buf.yaml names the files of those that are not."""


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


def test_every_service_is_tried() -> None:
    assert {name.partition("/")[0] for name in RPCS} == {
        "CaptureService",
        "EngineService",
        "GenerationService",
        "LensService",
        "MonitorService",
        "RunService",
        "SteeringService",
        "SweepService",
    }


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
    """The path that a walk finds. Protobuf's own search must lead to the same path."""
    walk = Walk(data, kind.DESCRIPTOR)
    while not walk.advance(7):
        pass
    assert walk.at == len(data)
    assert unknown_field(kind.FromString(data), data) == walk.unknown()
    return walk.unknown()


LARGE = request(
    text="x" * OFFLOAD_BYTES, steer=[add(tensor(np.ones((1, 4), np.float32))) for _ in range(3)]
)
MANY = request(steer=[add() for _ in range(OFFLOAD_BYTES // 8)])


@pytest.mark.parametrize("known", [request(), LARGE, MANY], ids=["small", "large", "many"])
def test_a_request_of_known_fields_has_none(known) -> None:
    assert path_of(known.SerializeToString()) is None


@pytest.mark.parametrize("known", [request(), LARGE, MANY], ids=["small", "large", "many"])
def test_it_is_found_beside_any_known_fields(known) -> None:
    data = known.SerializeToString()
    assert path_of(data + UNKNOWN) == f"#{NUMBER}"
    inner = field(Generate.DESCRIPTOR.fields_by_name["sampling"].number, UNKNOWN)
    assert path_of(data + inner) == f"sampling.#{NUMBER}"
    assert path_of(inner + data) == f"sampling.#{NUMBER}"


async def test_it_is_refused_in_a_large_request(running) -> None:
    data = LARGE.SerializeToString() + UNKNOWN
    refusal = await refused(running.client.channel, "GenerationService/Generate", data)
    assert refusal.brief == brief(f"#{NUMBER}")


def test_other_encodings_of_known_fields_are_known() -> None:
    """Unpacked numbers, defaults that are sent, map entries without key or value, fields twice."""
    ids = Generate.DESCRIPTOR.fields_by_name["token_ids"].number
    labels = Generate.DESCRIPTOR.fields_by_name["labels"].number
    baseline = Generate.DESCRIPTOR.fields_by_name["with_baseline"].number
    data = field(ids, b"\x08\x05\x08\x06") + field(labels, b"") + varint(baseline << 3) + b"\0"
    assert path_of(data + data) is None
    assert path_of(data + data + UNKNOWN) == f"#{NUMBER}"


def test_a_known_number_of_another_wire_type_is_unknown() -> None:
    """Protobuf skips it like a number that it does not know."""
    sampling = Generate.DESCRIPTOR.fields_by_name["sampling"].number
    assert path_of(varint(sampling << 3) + b"\1") == f"#{sampling}"


def test_a_group_is_one_unknown_field() -> None:
    group = varint(NUMBER << 3 | 3) + UNKNOWN * 3 + varint(NUMBER << 3 | 4)
    assert path_of(group) == f"#{NUMBER}"


def test_a_long_key_of_a_map_does_not_make_the_path_long() -> None:
    labels = Generate.DESCRIPTOR.fields_by_name["labels"].number
    path = path_of(field(labels, field(1, b"k" * 100_000) + UNKNOWN))
    assert path == f"labels[{'k' * 128}].#{NUMBER}"


@pytest.mark.parametrize("name", RPCS)
def test_every_kind_of_field_can_be_walked(name) -> None:
    """All fields set."""
    message = GetMessageClass(RPCS[name].input_type)()
    fill(message)
    assert path_of(message.SerializeToString(), type(message)) is None


def test_fields_are_counted_at_all_depths_and_packed_numbers_as_one() -> None:
    message = request()
    message.sampling.stop.extend(["", "a"])
    message.sampling.stop_token_ids.extend(range(1000))
    message.labels["k"] = "v"
    data = message.SerializeToString()
    walk = Walk(data, Generate.DESCRIPTOR)
    walk.advance(len(data))
    before = Walk(request().SerializeToString(), Generate.DESCRIPTOR)
    before.advance(len(data))
    assert walk.fields - before.fields == 2 + 1 + 3


def test_packed_numbers_are_counted_as_protobuf_decodes_them() -> None:
    rng = random.Random(3)
    for _ in range(50):
        message = request(token_ids=types_pb2.TokenIds(ids=random_numbers(rng)))
        message.sampling.stop_token_ids.extend(random_numbers(rng))
        rows = message.steering.interventions.add().replace
        rows.run.positions.positions.extend(n - (1 << 31) for n in random_numbers(rng))
        data = message.SerializeToString()
        walk = Walk(data, Generate.DESCRIPTOR)
        walk.advance(len(data))
        lists = (
            message.token_ids.ids,
            message.sampling.stop_token_ids,
            rows.run.positions.positions,
        )
        assert walk.numbers == sum(map(len, lists))


def random_numbers(rng: random.Random) -> list[int]:
    """Numbers of all sizes that uint32 has."""
    return [rng.getrandbits(rng.randint(1, 32)) for _ in range(rng.choice([0, 1, 300]))]


def test_a_walk_agrees_with_protobuf_about_any_bytes() -> None:
    """It refuses nothing that protobuf decodes, and finds what protobuf's own search finds."""
    rng, seen = random.Random(7), Counter()
    for _ in range(6000):
        name = rng.choice([*RPCS])
        kind = GetMessageClass(RPCS[name].input_type)
        data = damaged(rng, random_message(rng, kind.DESCRIPTOR, 4))
        seen[check_walk(rng, data, kind)] += 1
    assert min(seen[outcome] for outcome in ("malformed", "unknown", "known")) > 400
    assert seen["replaced"] < 100


def test_a_walk_takes_as_many_bytes_for_a_size_as_any_version_of_protobuf() -> None:
    """Version 6 takes 10 of them, and version 7 takes 5."""
    descriptor = engine_service_pb2.DrainRequest.DESCRIPTOR
    for count in range(1, 11):
        walk = Walk(b"\n" + b"\x80" * (count - 1) + b"\x00", descriptor)
        assert walk.advance(2)
        assert walk.unknown() is None
    above_64_bits = Walk(b"\n" + b"\x80" * 9 + b"\x02", descriptor)
    assert above_64_bits.advance(2)
    assert above_64_bits.unknown() is None
    with pytest.raises(DecodeError):
        Walk(b"\n" + b"\x80" * 10 + b"\x00", descriptor).advance(2)


def check_walk(rng: random.Random, data: bytes, kind: type) -> str:
    """Checks that a walk and protobuf agree; returns their common result."""
    try:
        message = kind.FromString(data)
    except DecodeError:
        message = None
    try:
        walk = Walk(data, kind.DESCRIPTOR)
        steps = 0
        while not walk.advance(step := rng.choice([1, 2, 50])):
            steps += step
            assert walk.fields == steps
        path = walk.unknown()
    except DecodeError:
        assert message is None, data
        return "malformed"
    assert walk.at == len(data)
    if message is None:
        return "malformed"
    before = message.ByteSize()
    message.DiscardUnknownFields()
    if path is not None and message.ByteSize() == before and in_oneof(path, kind.DESCRIPTOR):
        return "replaced"
    assert (path is not None) == (message.ByteSize() < before), (data, path)
    return "known" if path is None else "unknown"


def in_oneof(path: str, message: Descriptor) -> bool:
    """Whether a message on the path is in a oneof, so that another field may have replaced it."""
    for name in path.split(".")[:-1]:
        one = message.fields_by_name[name.split("[")[0]]
        if one.containing_oneof is not None:
            return True
        message = one.message_type
    return False


def random_message(rng: random.Random, message: Descriptor, depth: int) -> bytes:
    """Fields of a message, most of them known, in every way in which they can be encoded."""
    parts = []
    for _ in range(rng.randrange(5)):
        if rng.random() < 0.1:
            parts.append(random_unknown(rng, depth))
        elif message.fields:
            parts.append(random_field(rng, rng.choice(message.fields), depth))
    return b"".join(parts)


def random_field(rng: random.Random, one: FieldDescriptor, depth: int) -> bytes:
    if one.message_type is not None:
        inner = random_message(rng, one.message_type, depth - 1) if depth else b""
        return padded(rng, one.number << 3 | 2) + padded(rng, len(inner)) + inner
    if one.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        return padded(rng, one.number << 3 | 2) + field(0, b"xyz"[: rng.randrange(4)])[1:]
    width = {
        FieldDescriptor.TYPE_FLOAT: 4,
        FieldDescriptor.TYPE_FIXED32: 4,
        FieldDescriptor.TYPE_DOUBLE: 8,
        FieldDescriptor.TYPE_FIXED64: 8,
    }.get(one.type, 0)
    values = [
        rng.randbytes(width) if width else padded(rng, rng.getrandbits(rng.randrange(1, 33)))
        for _ in range(rng.randrange(4))
    ]
    if one.is_repeated and rng.random() < 0.5:
        return padded(rng, one.number << 3 | 2) + field(0, b"".join(values))[1:]
    wire = {4: 5, 8: 1}.get(width, 0)
    return b"".join(padded(rng, one.number << 3 | wire) + value for value in values)


def random_unknown(rng: random.Random, depth: int) -> bytes:
    """A field of any number, 0 included, and any wire type, those included that do not exist."""
    number = rng.choice([0, 1, 2, 7, 99, NUMBER, (1 << 29) - 1])
    wire = rng.randrange(8)
    tag = padded(rng, number << 3 | wire)
    match wire:
        case 0:
            return tag + padded(rng, rng.getrandbits(rng.randrange(1, 65)), 10)
        case 1 | 5:
            return tag + rng.randbytes(8 if wire == 1 else 4)
        case 2:
            return tag + field(0, rng.randbytes(rng.randrange(4)))[1:]
        case 3:
            inside = [
                random_unknown(rng, depth - 1) for _ in range(rng.randrange(3) if depth else 0)
            ]
            return tag + b"".join(inside) + padded(rng, number << 3 | 4)
        case _:
            return tag


def padded(rng: random.Random, number: int, longest: int = 5) -> bytes:
    """A number, sometimes with more bytes than it needs, rarely with more than there may be."""
    data = varint(number)
    if rng.random() < 0.9:
        return data
    more = rng.randrange(max(1, longest + 2 - len(data)))
    return data if not more else data[:-1] + bytes([data[-1] | 128, *[128] * (more - 1), 0])


def damaged(rng: random.Random, data: bytes) -> bytes:
    """The same bytes in most cases; otherwise some are cut off, changed or added."""
    if rng.random() < 0.8 or not data:
        return data
    at = rng.randrange(len(data))
    return rng.choice(
        [
            data[:at],
            data[:at] + rng.randbytes(1) + data[at + 1 :],
            data[:at] + rng.randbytes(2) + data[at:],
            data[:at] + data[at:] * 2,
        ]
    )


@pytest.mark.parametrize("depth", [99, 100, 101, 20_000])
def test_groups_are_walked_as_deep_as_protobuf_goes(depth) -> None:
    data = varint(NUMBER << 3 | 3) * depth + varint(NUMBER << 3 | 4) * depth
    expected = "unknown" if depth <= 100 else "malformed"
    assert check_walk(random.Random(depth), data, Generate) == expected


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
