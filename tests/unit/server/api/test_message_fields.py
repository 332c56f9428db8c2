"""The limits of a message's fields and numbers: one above them is refused before it is decoded."""

import asyncio

import grpc
import pytest

from rheostat_server.api import incoming
from rheostat_server.api.incoming import Calls, Reader
from rheostat_server.errors import MessageTooLarge
from rheostat_server.limits import (
    CAPTURES,
    CHAT_MESSAGES,
    CONTROL_MESSAGE_BYTES,
    DERIVED_PROMPTS,
    DIRECTIONS,
    INTERVENTIONS,
    LABELS,
    PROJECTIONS,
    REQUEST_RANGES,
    SUBSCRIBE_OPEN_BYTES,
    SUBSCRIBED_REQUESTS,
    TENSOR_MESSAGE_BYTES,
)
from rheostat_wire.v1 import (
    capture_pb2,
    capture_service_pb2,
    generation_pb2,
    generation_service_pb2,
    selector_pb2,
    steering_pb2,
    steering_service_pb2,
    tensor_pb2,
    types_pb2,
    vector_pb2,
)

from ..conftest import Refusal, rest
from ..fakes import ScriptedBackend
from ..messages import capture, request, selector, window
from ..streams import settled
from ..talks import start
from .test_unknown_fields import field, varint

Code = grpc.StatusCode
Generate = generation_service_pb2.GenerateRequest
LIMIT = 20_000


def number(message: type, name: str) -> int:
    return message.DESCRIPTOR.fields_by_name[name].number


def of_generate(name: str, content: bytes) -> bytes:
    return field(number(Generate, name), content)


SHAPES = {
    "empty captures": lambda n: of_generate("captures", b"") * n,
    "empty ranges": lambda n: of_generate(
        "steering",
        field(
            number(steering_pb2.Steering, "interventions"),
            field(
                number(steering_pb2.Intervention, "where"),
                field(number(selector_pb2.Selector, "include"), b"") * (n - 3),
            ),
        ),
    ),
    "empty labels": lambda n: of_generate("labels", b"") * n,
    "empty texts": lambda n: of_generate(
        "sampling", field(number(generation_pb2.Sampling, "stop"), b"") * (n - 1)
    ),
    "numbers that are not packed": lambda n: of_generate(
        "token_ids", (varint(number(types_pb2.TokenIds, "ids") << 3) + b"\1") * (n - 1)
    ),
    "unknown fields": lambda n: field(99, b"") * n,
    "groups": lambda n: (
        (varint(99 << 3 | 3) + varint(99 << 3 | 4)) * (n // 2) + b"\x32\0" * (n % 2)
    ),
}
"""Messages of `n` tiny fields."""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small limit, so that the tests are quick."""
    monkeypatch.setattr(incoming, "MESSAGE_FIELDS", LIMIT)


async def refusal_of(running, data: bytes) -> Refusal:
    call = running.client.channel.unary_stream("/rheostat.v1.GenerationService/Generate")(data)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    return Refusal.of(caught.value)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_message_of_too_many_fields_is_refused(running, few, shape) -> None:
    refusal = await refusal_of(running, SHAPES[shape](LIMIT + 1))
    assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_MESSAGE_TOO_LARGE", "")
    assert f"more than {LIMIT} fields" in refusal.message
    refusal = await refusal_of(running, SHAPES[shape](LIMIT))
    assert refusal.code is not Code.RESOURCE_EXHAUSTED
    await settled(running)


async def test_a_later_message_of_a_stream_is_refused_too(starter, few) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    call = running.client.channel.stream_stream("/rheostat.v1.GenerationService/Session")()
    await call.write(start().SerializeToString())
    await call.write(field(2, SHAPES["empty captures"](LIMIT)))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    assert Refusal.of(caught.value).reason == "REASON_MESSAGE_TOO_LARGE"
    await settled(running)


async def test_it_is_refused_before_it_is_decoded_and_the_loop_goes_on_meanwhile(few) -> None:
    decoded, ticks = [], 0
    reader = Reader(Generate.FromString)
    reader.decoded = lambda data, walk: decoded.append(data)

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.ensure_future(tick())
    with pytest.raises(MessageTooLarge):
        await Calls(1).walked(SHAPES["empty captures"](100 * LIMIT), reader)
    ticking.cancel()
    assert not decoded
    assert ticks >= LIMIT // incoming._TURN_FIELDS


async def test_a_message_of_few_turns_does_not_wait_for_one_of_many() -> None:
    calls, ended = Calls(2), []

    async def walked(name: str, fields: int) -> None:
        await calls.walked(SHAPES["empty captures"](fields), Reader(Generate.FromString))
        ended.append(name)

    long = asyncio.ensure_future(walked("long", 200_000))
    await asyncio.sleep(0)
    await walked("short", 5_000)
    assert ended == ["short"]
    await long


async def test_the_memory_of_fields_counts_among_that_of_large_requests(
    running, monkeypatch
) -> None:
    monkeypatch.setattr(incoming, "REQUESTS_BYTES", 1 << 20)
    refusal = await refusal_of(running, SHAPES["empty captures"](30_000))
    assert (refusal.code, refusal.reason, refusal.retry) == (
        Code.RESOURCE_EXHAUSTED,
        "REASON_QUEUE_FULL",
        True,
    )
    monkeypatch.setattr(incoming, "REQUESTS_BYTES", 4 << 20)
    for _ in range(3):
        refusal = await refusal_of(running, SHAPES["empty captures"](30_000))
        assert refusal.brief == (Code.INVALID_ARGUMENT, "REASON_INVALID_VALUE", "captures")


@pytest.mark.parametrize("many", ["captures", "steering.interventions"])
async def test_their_number_is_checked_before_anything_goes_through_them(running, many) -> None:
    """The missing prompt would be reported first otherwise."""
    data = of_generate("captures", b"") * 300
    if many != "captures":
        interventions = field(number(steering_pb2.Steering, "interventions"), b"") * 300
        data = of_generate("steering", interventions)
    refusal = await refusal_of(running, data)
    assert refusal.brief == (Code.INVALID_ARGUMENT, "REASON_INVALID_VALUE", many)


async def test_four_captures_of_a_thousand_windows_are_served(running) -> None:
    where = selector(*(window(0, 1) for _ in range(1024)))
    events = await running.client.generate(request(captures=[capture(where=where)] * 4))
    assert events[-1].HasField("receipt")


def packed(count: int, number: bytes = b"\1") -> bytes:
    """As many numbers as a repeated field of varints, as the field 1 of a message."""
    return field(1, number * count)


NUMBERS = {
    "token_ids.ids": lambda n: of_generate("token_ids", packed(n)),
    "sampling.stop_token_ids": lambda n: of_generate(
        "sampling", field(number(generation_pb2.Sampling, "stop_token_ids"), b"\1" * n)
    ),
    "steering.interventions[1].sites.list.layers": lambda n: of_generate(
        "steering",
        field(1, b"")
        + field(
            1,
            field(
                number(steering_pb2.Intervention, "sites"),
                field(number(types_pb2.SiteSet, "list"), packed(n)),
            ),
        ),
    ),
    "captures[0].where.include[0].token_ids.ids": lambda n: of_generate(
        "captures",
        field(
            number(capture_pb2.CaptureSpec, "where"),
            field(1, field(number(selector_pb2.Range, "token_ids"), packed(n, b"\x81\x80\x00"))),
        ),
    ),
}
"""Messages of `n` packed numbers, by the path of their field."""


@pytest.fixture
def few_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small limit, so that the tests are quick."""
    monkeypatch.setattr(incoming, "MESSAGE_NUMBERS", LIMIT)


@pytest.mark.parametrize("path", NUMBERS)
async def test_a_message_of_too_many_packed_numbers_is_refused_by_field(
    running, few_numbers, path
) -> None:
    refusal = await refusal_of(running, NUMBERS[path](LIMIT + 1))
    assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_MESSAGE_TOO_LARGE", path)
    assert f"more than {LIMIT} packed numbers" in refusal.message
    refusal = await refusal_of(running, NUMBERS[path](LIMIT))
    assert refusal.reason != "REASON_MESSAGE_TOO_LARGE"
    await settled(running)


async def test_packed_numbers_of_all_fields_count_together(running, few_numbers) -> None:
    most = NUMBERS["token_ids.ids"](LIMIT // 2)
    refusal = await refusal_of(running, most + NUMBERS["sampling.stop_token_ids"](LIMIT // 2 + 1))
    assert refusal.field == "sampling.stop_token_ids"
    refusal = await refusal_of(running, most + NUMBERS["sampling.stop_token_ids"](LIMIT // 2))
    assert refusal.reason != "REASON_MESSAGE_TOO_LARGE"


async def test_packed_numbers_are_refused_before_they_are_decoded(few_numbers) -> None:
    decoded = []
    reader = Reader(Generate.FromString)
    reader.decoded = lambda data, walk: decoded.append(data)
    with pytest.raises(MessageTooLarge):
        await Calls(1).walked(NUMBERS["token_ids.ids"](15 << 20), reader)
    assert not decoded


async def test_messages_of_many_packed_numbers_are_decoded_in_different_iterations() -> None:
    """They are too small to be decoded in turns because of their bytes."""
    calls, decoded = Calls(4), []
    message = of_generate("token_ids", packed(200_000))
    reader = Reader(Generate.FromString)
    of_reader = reader.decoded
    iteration = 0

    def counted(data: bytes, walk: object) -> Generate:
        decoded.append(iteration)
        return of_reader(data, walk)

    reader.decoded = counted

    async def tick() -> None:
        nonlocal iteration
        while True:
            iteration += 1
            await asyncio.sleep(0)

    ticking = asyncio.ensure_future(tick())
    walks = [await calls.walked(message, reader) for _ in range(4)]
    await asyncio.gather(*(calls.decoded(message, reader, walk) for walk in walks))
    ticking.cancel()
    assert len(set(decoded)) == 4


async def test_the_memory_of_packed_numbers_counts_among_that_of_large_requests(
    running, monkeypatch
) -> None:
    monkeypatch.setattr(incoming, "REQUESTS_BYTES", 400_000)
    refusal = await refusal_of(running, of_generate("token_ids", packed(100_000)))
    assert refusal.reason == "REASON_QUEUE_FULL"  # 100,000 bytes, and four for each number
    refusal = await refusal_of(running, of_generate("token_ids", packed(70_000)))
    assert refusal.reason == "REASON_PROMPT_TOO_LONG"


def vector() -> vector_pb2.VectorRef:
    return vector_pb2.VectorRef(name="a-name", row_layers=types_pb2.LayerList(layers=[0, 1]))


def sites() -> types_pb2.SiteSet:
    return types_pb2.SiteSet(
        points=[types_pb2.POINT_RESID_POST], list=types_pb2.LayerList(layers=[0, 1])
    )


def ranges(count: int) -> selector_pb2.Selector:
    some = selector_pb2.Selector()
    some.include.extend([selector_pb2.Range(positions=selector_pb2.Window(start=0, end=1))] * count)
    return some


def steering() -> steering_pb2.Steering:
    readout = vector_pb2.Readout(vector=vector(), normalise=vector_pb2.NORMALISE_UNIT)
    band = steering_pb2.Band(read=readout, min=0.0, max=1.0, strength=1.0)
    one = steering_pb2.Intervention(
        sites=sites(),
        where=ranges(REQUEST_RANGES // 2 // INTERVENTIONS),
        clamp=steering_pb2.Clamp(bands=[band] * DIRECTIONS),
    )
    return steering_pb2.Steering(interventions=[one] * INTERVENTIONS)


def captures() -> list[capture_pb2.CaptureSpec]:
    readout = vector_pb2.Readout(vector=vector(), normalise=vector_pb2.NORMALISE_NONE)
    onto = capture_pb2.ReadoutList(readouts=[readout] * PROJECTIONS)
    one = capture_pb2.CaptureSpec(
        sites=sites(),
        where=ranges(REQUEST_RANGES // 2 // CAPTURES),
        inline=capture_pb2.InlineTarget(),
        dtype=tensor_pb2.DTYPE_FLOAT32,
        projection=capture_pb2.Projection(readouts=onto),
        overload=capture_pb2.OVERLOAD_FAIL,
    )
    return [one] * CAPTURES


def chat(messages: int) -> types_pb2.Chat:
    return types_pb2.Chat(messages=[types_pb2.ChatMessage(role="user", content="a")] * messages)


def generate() -> Generate:
    return Generate(
        chat=chat(CHAT_MESSAGES),
        sampling=generation_pb2.Sampling(max_tokens=1, stop=["a"] * 16),
        steering=steering(),
        captures=captures(),
        labels={f"key{index}": "value" for index in range(LABELS)},
    )


LARGEST = {
    "Generate": generate,
    "Explain": lambda: generation_service_pb2.ExplainRequest(request=generate()),
    "Session": lambda: generation_service_pb2.SessionRequest(start=generate()),
    "SetGlobal": lambda: steering_service_pb2.SetGlobalRequest(
        policy=steering_service_pb2.Policy(steering=steering())
    ),
    "DeriveVectors": lambda: steering_service_pb2.DeriveVectorsRequest(
        sites=sites(),
        where=ranges(1024),
        positive=[types_pb2.Prompt(chat=chat(64))] * DERIVED_PROMPTS,
        negative=[types_pb2.Prompt(chat=chat(64))] * DERIVED_PROMPTS,
    ),
    "Subscribe": lambda: capture_service_pb2.SubscribeRequest(
        open=capture_service_pb2.SubscribeOpen(
            filter=capture_service_pb2.RequestFilter(
                requests=capture_service_pb2.RequestIds(request_ids=["i"] * SUBSCRIBED_REQUESTS)
            ),
            captures=captures()[:8],
        )
    ),
}
"""Requests with as many of everything as the limits of their fields allow, but for chats of
DeriveVectors, which may have 64 messages each."""


@pytest.mark.parametrize("rpc", LARGEST)
async def test_the_largest_requests_have_few_enough_fields(rpc) -> None:
    message = LARGEST[rpc]()
    data = message.SerializeToString()
    limit = {"SetGlobal": CONTROL_MESSAGE_BYTES, "Subscribe": SUBSCRIBE_OPEN_BYTES}
    assert len(data) <= limit.get(rpc, TENSOR_MESSAGE_BYTES)
    calls, reader = Calls(1), Reader(type(message).FromString)
    assert await calls.decoded(data, reader, await calls.walked(data, reader)) == message
