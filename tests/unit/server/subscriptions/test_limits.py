"""Subscribe where something is too much or wrong: losses are said, refusals name their field."""

import asyncio

import grpc
import grpc.aio
import pytest

from rheostat_wire.v1 import (
    capture_pb2,
    selector_pb2,
    types_pb2,
)

from ..fakes import ScriptedBackend, sites_with
from ..messages import capture, request, site_set
from ..streams import settled, until
from ..subscribers import (
    EVERY,
    PLENTY,
    POST,
    ROW,
    Message,
    Subscriber,
    by_id,
    by_label,
    ends_of,
    expected,
    failure,
    generate,
    opening,
    resuming,
    rows_of,
    sampled,
    wanted,
)

Code = grpc.StatusCode


async def test_a_full_buffer_ends_the_subscription_and_no_request(starter) -> None:
    running = await starter()
    request_message = opening(EVERY, [wanted(0)], credit=0, buffer_bytes=3 * ROW)
    one = await Subscriber.open(running, request_message)
    events = await generate(running, "a", tokens=6)
    assert events[-1].HasField("receipt")
    refusal = await failure(one)
    assert (refusal.code, refusal.reason) == (
        Code.RESOURCE_EXHAUSTED,
        "REASON_CAPTURE_OVERFLOW",
    )
    assert int(dict(refusal.metadata)["rows"]) > 0
    assert not len(running.manager.subscriptions)


async def test_a_full_buffer_ends_the_request_that_sends_to_it(running) -> None:
    request_message = opening(by_id("nobody"), credit=0, buffer_bytes=3 * ROW)
    one = await Subscriber.open(running, request_message)
    spec = capture_pb2.CaptureSpec(sites=site_set(POST, layers=[0]), subscription_id=one.name)
    refusal = await running.client.refusal(
        request(request_id="a", sampling=sampled(9), captures=[spec])
    )
    assert refusal.reason == "REASON_CAPTURE_OVERFLOW"
    await settled(running)
    await one.credit(PLENTY)
    await one.until("end_of_request")
    end = ends_of(one.events)["a"]
    assert list(end.finish_reasons) == [types_pb2.FINISH_REASON_ERROR]


@pytest.mark.parametrize("policy", ["DROP_NEWEST", "DROP_OLDEST"])
async def test_rows_that_are_lost_are_counted_and_said(starter, policy) -> None:
    running = await starter()
    room = 4 * ROW
    request_message = opening(
        EVERY,
        [wanted(0)],
        credit=0,
        buffer_bytes=room,
        overload=capture_pb2.Overload.Value(f"OVERLOAD_{policy}"),
    )
    one = await Subscriber.open(running, request_message)
    await generate(running, "a", tokens=8)
    await one.credit(PLENTY)
    await one.until("end_of_request")
    kept = sorted(position for _, _, _, position, _ in rows_of(one.events))
    lost = sorted(
        position
        for event in one.events
        if event.HasField("dropped")
        for run in event.dropped.positions
        for position in range(run.start, run.start + run.count)
    )
    assert sorted(kept + lost) == list(range(10))
    assert 0 < len(kept) <= 4
    assert kept == (
        list(range(10 - len(kept), 10)) if policy == "DROP_OLDEST" else list(range(len(kept)))
    )
    end = ends_of(one.events)["a"]
    assert (end.row_count, end.dropped_row_count) == (len(kept), len(lost))


async def test_rows_that_do_not_fit_into_the_engine_are_lost_and_the_request_runs(starter) -> None:
    running = await starter(ScriptedBackend(sites=sites_with(capture_rows=2)))
    one = await Subscriber.open(
        running,
        opening(EVERY, [wanted(0, 1)], overload=capture_pb2.OVERLOAD_DROP_NEWEST),
    )
    assert (await generate(running, "a"))[-1].HasField("receipt")
    await one.until("end_of_request")
    end = ends_of(one.events)["a"]
    assert (end.row_count, end.dropped_row_count) == (0, 10)


async def test_rows_that_the_ring_lost_are_said(starter) -> None:
    running = await starter(ScriptedBackend(lost_positions=frozenset({1, 3})))
    one = await Subscriber.open(
        running,
        opening(EVERY, [wanted(0)], overload=capture_pb2.OVERLOAD_DROP_NEWEST),
    )
    await generate(running, "a")
    await one.until("end_of_request")
    assert ends_of(one.events)["a"].dropped_row_count == 2
    assert sorted(key[3] for key in rows_of(one.events)) == [0, 2, 4]


@pytest.mark.parametrize(
    ("request_message", "reason", "field"),
    [
        (opening(None, [wanted()]), "REASON_MISSING_FIELD", "open.filter"),
        (opening(by_id(), [wanted()]), "REASON_INVALID_VALUE", "open.filter.requests.request_ids"),
        (opening(by_id("a/b")), "REASON_INVALID_VALUE", "open.filter.requests.request_ids[0]"),
        (opening(by_label()), "REASON_INVALID_VALUE", "open.filter.labels.labels"),
        (
            opening(EVERY, [wanted(7)]),
            "REASON_UNKNOWN_LAYER",
            "open.captures[0].sites.list.layers[0]",
        ),
        (opening(EVERY, [wanted()] * 17), "REASON_INVALID_VALUE", "open.captures"),
        (opening(EVERY, [capture()]), "REASON_INVALID_VALUE", "open.captures[0].inline"),
        (
            opening(EVERY, [wanted(overload=capture_pb2.OVERLOAD_FAIL)]),
            "REASON_INVALID_VALUE",
            "open.captures[0].overload",
        ),
        (
            opening(EVERY, [wanted(where=selector_pb2.Selector())]),
            "REASON_EMPTY_SELECTOR",
            "open.captures[0].where",
        ),
        (opening(EVERY, [wanted()], overload=77), "REASON_UNKNOWN_ENUM", "open.overload"),
        (opening(EVERY, buffer_bytes=1 << 50), "REASON_INVALID_VALUE", "open.buffer_bytes"),
        (
            opening(EVERY, [wanted(0, 1)], buffer_bytes=2 * ROW - 1),
            "REASON_INVALID_VALUE",
            "open.buffer_bytes",
        ),
        (
            opening(EVERY, [wanted(0, 1)], credit=ROW - 1),
            "REASON_INVALID_VALUE",
            "open.credit_bytes",
        ),
        (resuming("none"), "REASON_SUBSCRIPTION_NOT_FOUND", "open.resume.subscription_id"),
    ],
)
async def test_what_is_wrong_is_refused_by_field(running, request_message, reason, field) -> None:
    one = Subscriber(running)
    await one.call.write(Message(open=request_message))
    refusal = await failure(one)
    assert (refusal.reason, refusal.field) == (reason, field)


async def test_too_little_credit_or_buffer_is_refused_with_the_least_that_works(running) -> None:
    for room, least in [({"credit": 1}, ROW), ({"buffer_bytes": 1}, 2 * ROW)]:
        one = Subscriber(running)
        await one.call.write(Message(open=opening(EVERY, [wanted(0, 1)], **room)))
        refusal = await failure(one)
        assert f"takes {least} bytes" in refusal.message
    await Subscriber.open(running, opening(EVERY, [wanted(0, 1)], 16, buffer_bytes=2 * ROW))


async def test_invalid_messages_end_the_call_and_not_the_subscription(running) -> None:
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    for message, field in [
        (Message(ack={"sequence": 99}), "ack.sequence"),
        (Message(credit={"bytes": 0}), "credit.bytes"),
        (Message(open=opening()), "open"),
        (Message(), ""),
    ]:
        await one.call.write(message)
        refusal = await failure(one)
        assert (refusal.code, refusal.field) == (Code.INVALID_ARGUMENT, field)
        one = await Subscriber.open(running, resuming(one.name))


async def test_all_subscriptions_together_have_a_limit(starter) -> None:
    running = await starter(subscriptions_bytes=1000)
    ones = [
        await Subscriber.open(running, opening(EVERY, [wanted()], buffer_bytes=400))
        for _ in range(2)
    ]
    more = Subscriber(running)
    await more.call.write(Message(open=opening(EVERY, buffer_bytes=400)))
    refusal = await failure(more)
    assert (refusal.reason, refusal.retry) == ("REASON_QUEUE_FULL", True)
    await ones[0].rest()
    await Subscriber.open(running, opening(EVERY, buffer_bytes=400))


async def test_there_are_at_most_64_subscriptions(starter) -> None:
    running = await starter()
    ones = [await Subscriber.open(running, opening(EVERY, buffer_bytes=400)) for _ in range(64)]
    more = Subscriber(running)
    await more.call.write(Message(open=opening(EVERY, buffer_bytes=400)))
    refusal = await failure(more)
    assert (refusal.reason, refusal.retry, refusal.field) == ("REASON_QUEUE_FULL", True, "")
    assert refusal.message.startswith(
        "64 subscriptions are open or wait for their readers, the most"
    )
    await ones[0].rest()
    await Subscriber.open(running, opening(EVERY, buffer_bytes=400))


async def test_sixteen_subscriptions_that_ask_for_no_size_share_the_memory(starter) -> None:
    running = await starter(subscriptions_bytes=16 * ROW)
    ones = [await Subscriber.open(running, opening(EVERY, [wanted(0)])) for _ in range(16)]
    more = Subscriber(running)
    await more.call.write(Message(open=opening(EVERY, [wanted(0)])))
    refusal = await failure(more)
    assert (refusal.reason, refusal.retry) == ("REASON_QUEUE_FULL", True)
    await ones[0].rest()
    await Subscriber.open(running, opening(EVERY, [wanted(0)]))


async def test_the_default_buffer_holds_a_position_of_what_is_captured(starter) -> None:
    running = await starter(subscriptions_bytes=16 * ROW)
    await Subscriber.open(running, opening(EVERY, [wanted(0, 1, 2)]))
    rest = await Subscriber.open(running, opening(EVERY, [wanted(0)], buffer_bytes=13 * ROW))
    assert rest.name


async def test_a_lost_engine_ends_subscriptions(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    running.backend.die()
    refusal = await failure(one)
    assert (refusal.code, refusal.reason) == (Code.UNAVAILABLE, "REASON_ENGINE_LOST")


async def test_a_subscription_that_its_client_ends_while_the_server_drains_ends_well(
    starter,
) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event()))
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    call = running.client.generation.Generate(request(request_id="a"))
    await call.read()
    draining = asyncio.create_task(running.server.stop())
    await one.call.done_writing()
    subscription = running.manager.subscriptions.named(one.name, "")
    await until(lambda: not subscription.taking)
    running.backend.hold.set()
    await one.rest()
    assert await one.call.code() == Code.OK
    await draining


async def test_a_server_that_ends_sends_what_waits_first(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event(), hold_from=2))
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)], credit=0))
    call = running.client.generation.Generate(request(request_id="a", sampling=sampled(3)))
    while not (await call.read()).HasField("tokens"):
        pass
    draining = asyncio.create_task(running.server.stop())
    await asyncio.sleep(0.05)
    running.backend.hold.set()
    while await call.read() is not grpc.aio.EOF:
        pass
    refusal = await failure(one)
    await draining
    assert (refusal.code, refusal.reason) == (Code.UNAVAILABLE, "REASON_DRAINING")
    assert rows_of(one.events) == expected("a", 0)
    assert set(ends_of(one.events)) == {"a"}
