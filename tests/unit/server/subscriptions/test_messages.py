"""Subscribe with several events in a message: the same events, numbers and credit as one by one."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rheostat_server.delivery.delivery_buffer import DeliveryBuffer
from rheostat_server.delivery.items import Chunk, EncodedChunk
from rheostat_server.delivery.row_feed import RowFeed
from rheostat_server.delivery.row_messages import CapturedRows, captured_of
from rheostat_server.limits import BATCH_BYTES, BATCH_EVENTS
from rheostat_server.subscriptions import messages as module
from rheostat_server.subscriptions import shared_payloads
from rheostat_server.subscriptions.messages import Response, messages_of
from rheostat_server.subscriptions.shared_memory import Arena
from rheostat_server.subscriptions.subscription import Subscription
from rheostat_server.tensors import FloatType
from rheostat_wire.v1 import capture_pb2, tensor_pb2

from ..row_feeds import CAPTURE, FAIL, KEY, WIDTH, rows
from ..subscribers import (
    EVERY,
    PLENTY,
    PROMPT,
    ROW,
    Message,
    Subscriber,
    ends_of,
    expected,
    generate,
    opening,
    received,
    resuming,
    rows_of,
    wanted,
)


def events(responses: list[Response]) -> list[Response]:
    """All numbered events, whatever messages they came in."""
    found: list[Response] = []
    for response in responses:
        batch = response.WhichOneof("event") == "batch"
        found += response.batch.events if batch else [response]
    return [event for event in found if event.sequence]


async def ended(one: Subscriber, requests: int) -> list[Response]:
    """Reads until so many requests have ended."""
    while sum(e.WhichOneof("event") == "end_of_request" for e in events(one.events)) < requests:
        await one.hear()
    return events(one.events)


async def waiting(running) -> None:
    """Requests whose rows wait for credit."""
    await asyncio.gather(*(generate(running, name) for name in "abc"))


async def test_events_that_wait_come_in_one_message(running) -> None:
    one = await Subscriber.open(running, opening(EVERY, [wanted(1)], credit=0, batches=True))
    await waiting(running)
    await one.credit(PLENTY)
    found = await ended(one, 3)
    assert rows_of(found) == expected("a", 1) | expected("b", 1) | expected("c", 1)
    assert set(ends_of(found)) == {"a", "b", "c"}
    assert [event.sequence for event in found] == list(range(1, len(found) + 1))
    assert len(one.events) - 1 < len(found)  # the first message says that it stands
    assert all(len(one.batch.events) <= BATCH_EVENTS for one in one.events)


async def test_a_client_that_does_not_ask_for_batches_gets_none(running) -> None:
    one = await Subscriber.open(running, opening(EVERY, [wanted(1)], credit=0))
    await waiting(running)
    await one.credit(PLENTY)
    await one.until("end_of_request", 3)
    assert not any(event.HasField("batch") for event in one.events)


async def test_a_batch_ends_where_the_credit_does(running) -> None:
    rows = 2 * (PROMPT + 2)
    one = await Subscriber.open(running, opening(EVERY, [wanted(0, 1)], credit=0, batches=True))
    await waiting(running)
    await one.credit(2 * rows * ROW)
    await ended(one, 1)
    await asyncio.sleep(0.05)
    first = len(rows_of(events(one.events)))
    assert rows <= first <= 2 * rows
    await one.credit(PLENTY)
    assert len(rows_of(await ended(one, 3))) == 3 * rows


async def test_what_was_sent_is_sent_again_in_batches_or_one_by_one(running) -> None:
    one = await Subscriber.open(running, opening(EVERY, [wanted(1)], batches=True))
    await asyncio.gather(*(generate(running, name) for name in "abc"))
    sent = await ended(one, 3)
    one.call.cancel()
    again = Subscriber(running)
    request_message = resuming(one.name)
    request_message.batches = True
    await again.call.write(Message(open=request_message))
    await again.hear()
    assert await ended(again, 3) == sent
    assert len(again.events) == 2
    singly = await Subscriber.open(running, resuming(one.name))
    assert await ended(singly, 3) == sent
    assert len(singly.events) == len(sent) + 1


async def test_a_message_copies_its_rows_once() -> None:
    """It is kept until it is acknowledged, and must not keep the rows of other requests."""
    buffer = DeliveryBuffer(1 << 30, lambda feed, error: None)
    feed = RowFeed("r", [5, 6], {0: CAPTURE}, FloatType.FLOAT32, FAIL, buffer)
    captured = rows(0, 2)
    feed.add(KEY, captured)
    feed.extend(KEY, [7])
    chunk = buffer.take()
    assert isinstance(chunk, Chunk)
    (message,) = await messages_of([chunk], None)
    parts = message.numbered(3)
    assert message.rows is not None
    assert parts[-1] is message.rows.payload
    assert not np.shares_memory(np.frombuffer(parts[-1], np.uint8), captured.data)
    expected = Response(sequence=3, captured=captured_of(chunk))
    expected.captured.request_id = "r"
    assert received(parts) == expected
    assert message.payload == captured.data.nbytes


async def test_messages_that_lack_memory_are_made_again_and_hold_shared_memory_once(
    monkeypatch,
) -> None:
    monkeypatch.setattr(shared_payloads, "SHARED_BYTES", 1)
    buffer = DeliveryBuffer(1 << 30, lambda feed, error: None)
    feed = RowFeed("r", [5], {0: replace(CAPTURE, width=WIDTH)}, FloatType.FLOAT32, FAIL, buffer)
    feed.add(KEY, rows(0, 1))
    feed.extend(KEY, [7])
    chunk = buffer.take()
    assert isinstance(chunk, Chunk)
    from_disk = [EncodedChunk(feed, KEY, captured_of(chunk)) for _ in range(2)]
    arena, moved = Arena(1 << 20), 0

    async def move_first(tensor: tensor_pb2.Tensor, arena: Arena) -> None:
        nonlocal moved
        moved += 1
        if moved == 2:
            raise MemoryError
        await shared_payloads.move_shared(tensor, arena)

    monkeypatch.setattr(module, "move_shared", move_first)
    with pytest.raises(MemoryError):
        await messages_of([chunk, *from_disk], arena)
    messages = await messages_of([chunk, *from_disk], arena)
    offsets = [message.rows.message.tensor.shm.offset for message in messages if message.rows]
    assert len(offsets) == len(set(offsets)) == 3
    for offset in offsets:
        arena.free(offset)
    assert arena._regions.idle
    arena.close()


def replayed(count: int, payload: int) -> Subscription:
    """A subscription that has sent so many events, of which none is acknowledged."""
    one = Subscription(
        "one",
        None,
        (),
        capture_pb2.OVERLOAD_FAIL,
        buffer_bytes=64 << 20,
        heartbeat=60.0,
        on_failed=lambda error: None,
    )
    for _ in range(count):
        sent = CapturedRows(capture_pb2.Captured(), tensor_pb2.Tensor(), bytes(payload))
        one.buffer.kept += one._replay.add(module.Message(Response(), sent, payload)).message.weight
    one.resume_after(0)
    return one


@pytest.mark.parametrize(("count", "payload"), [(3000, 4), (8, (4 << 20) - 600), (40, 300_000)])
async def test_replayed_events_come_in_messages_of_bounded_size(count: int, payload: int) -> None:
    one = replayed(count, payload)
    messages = one.messages(object(), PLENTY, batched=True)
    await anext(messages)  # that it stands
    left = count
    while left:
        async with asyncio.timeout(30):
            message = received(await anext(messages))
        events = message.batch.events or [message]
        assert len(events) <= BATCH_EVENTS
        assert message.ByteSize() <= BATCH_BYTES + (1 << 20) or len(events) == 1
        left -= len(events)
    await messages.aclose()
