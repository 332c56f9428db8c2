"""Subscribe with several events in a message: the same events, numbers and credit as one by one."""

import asyncio

import pytest

from rheostat_server.limits import BATCH_BYTES, BATCH_EVENTS
from rheostat_server.subscriptions.messages import Response
from rheostat_server.subscriptions.subscription import Subscription
from rheostat_wire.v1 import capture_pb2

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
        event = Response()
        event.captured.tensor.inline = bytes(payload)
        one.buffer.kept += one._replay.add(event, payload).weight
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
            message = await anext(messages)
        events = message.batch.events or [message]
        assert len(events) <= BATCH_EVENTS
        assert message.ByteSize() <= BATCH_BYTES + (1 << 20) or len(events) == 1
        left -= len(events)
    await messages.aclose()
