"""What piles up behind a reader, what begins while one is answered, what a slow sink may keep."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import grpc
import pytest

from rheostat_server.delivery.items import DeliveryItem
from rheostat_server.delivery.spill_directory import SpillDirectory
from rheostat_server.delivery.spill_manager import SpillManager
from rheostat_server.errors import CaptureOverflow, Defect, Superseded
from rheostat_server.subscriptions import subscription as module
from rheostat_server.subscriptions.messages import Message
from rheostat_server.subscriptions.subscription import Subscription
from rheostat_server.tensors import FloatType
from rheostat_wire.v1 import (
    capture_pb2,
    capture_service_pb2,
    generation_service_pb2,
    types_pb2,
)

from ..conftest import Refusal, narrow, rest
from ..fakes import INFO, Paced, sites_with
from ..messages import capture, request, site_set
from ..row_feeds import CAPTURE, FAIL, KEY, NEWEST, OLDEST, rows
from ..sink_plugins import stored, with_slow
from ..streams import settled, until
from ..subscribers import (
    EVERY,
    POST,
    Subscriber,
    opening,
    received,
    resuming,
    sampled,
    wanted,
)

Code = grpc.StatusCode


def subscription(policy: int = NEWEST, buffer_bytes: int = 1 << 20) -> Subscription:
    return Subscription(
        "s", None, (), policy, buffer_bytes=buffer_bytes, heartbeat=9.0, on_failed=lambda _: None
    )


@pytest.mark.parametrize("policy", [FAIL, NEWEST, OLDEST])
def test_ended_requests_that_nobody_reads_are_bounded(policy: int, monkeypatch) -> None:
    monkeypatch.setattr(module, "_UNREAD", 1 << 20)
    one = subscription(policy, buffer_bytes=1 << 10)
    for number in range(10_000):
        feed = one.feed(f"r{number}", [1] * 100, {0: CAPTURE}, FloatType.FLOAT32, None)
        feed.close()
        if one.failure is not None:
            break
    assert isinstance(one.failure, CaptureOverflow)
    assert "have ended" in one.failure.message
    assert 100 < number < 1000
    assert one._feeds == {}


async def test_ended_requests_that_are_read_are_not_counted_any_more(monkeypatch) -> None:
    monkeypatch.setattr(module, "_UNREAD", 1 << 14)
    one = subscription(buffer_bytes=1 << 10)
    call = object()
    messages = one.messages(call, 0)
    assert (await anext(messages)).HasField("opened")
    for number in range(500):
        feed = one.feed(f"r{number}", [1] * 100, {0: CAPTURE}, FloatType.FLOAT32, None)
        feed.close()
        assert received(await anext(messages)).end_of_request.request_id == f"r{number}"
        one.acknowledge(number + 1)
    assert one.failure is None


async def test_ended_requests_that_wait_on_disk_weigh_little(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(module, "_UNREAD", 1 << 20)
    spool = SpillDirectory(tmp_path, 1 << 28)
    spill_manager = SpillManager(spool, 1 << 28)
    one = Subscription(
        "s", None, (), capture_pb2.OVERLOAD_SPILL, buffer_bytes=1 << 10, heartbeat=9.0,
        on_failed=lambda _: None, spill_manager=spill_manager,
    )  # fmt: skip
    for number in range(400):
        feed = one.feed(f"r{number}", [1] * 100, {0: CAPTURE}, FloatType.FLOAT32, None)
        feed.add(KEY, rows(0, 2))
        feed.extend(KEY, [7])
        feed.close([types_pb2.FINISH_REASON_LENGTH])
        await until(lambda: one.buffer.used <= one.buffer.limit)
    assert one.failure is None
    messages = one.messages(object(), 1 << 40)
    ends = []
    async with asyncio.timeout(10):
        async for response in messages:
            message = received(response)
            if message.HasField("end_of_request"):
                ends.append(message.end_of_request)
                one.acknowledge(message.sequence)
            if len(ends) == 400:
                break
    assert {(end.row_count, end.dropped_row_count, end.chunk_count) for end in ends} == {(2, 0, 1)}
    one.fail(Defect("by the test"))
    spool.close()


async def test_a_request_that_did_not_begin_does_not_keep_a_subscription_open() -> None:
    one = subscription()
    feed = one.feed("r", [1], {0: CAPTURE}, FloatType.FLOAT32, None)
    feed.add(KEY, rows(0, 1))
    feed.discard()
    messages = one.messages(object(), 0)
    assert (await anext(messages)).HasField("opened")
    one.close()
    async with asyncio.timeout(5):
        assert [message async for message in messages] == []
    assert one.ended


@pytest.mark.parametrize("left", [False, True])
async def test_a_call_whose_rows_are_being_encoded_ends_as_its_subscription_does(
    left: bool, monkeypatch
) -> None:
    one, call = subscription(), object()
    encode, begun, go = one.transport.messages_of, asyncio.Event(), asyncio.Event()

    async def slowly(items: Sequence[DeliveryItem]) -> list[Message]:
        begun.set()
        await go.wait()
        return await encode(items)

    monkeypatch.setattr(one.transport, "messages_of", slowly)
    feed = one.feed("r", [1], {0: CAPTURE}, FloatType.FLOAT32, None)
    feed.add(KEY, rows(0, 1))
    feed.extend(KEY, [7])
    messages = one.messages(call, 1 << 20)
    assert (await anext(messages)).HasField("opened")
    waiting = asyncio.ensure_future(anext(messages))
    async with asyncio.timeout(5):
        await begun.wait()
        if left:
            one.leave(call)  # its client ends the subscription
        one.fail(CaptureOverflow("by the test"))
        go.set()
        with pytest.raises(Superseded if left else CaptureOverflow):
            await waiting


async def test_a_client_gets_the_resume_window(starter) -> None:
    running = await starter(resume_window=7.5)
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    assert one.events[0].opened.resume_window.ToMilliseconds() == 7500


async def test_a_request_that_was_refused_is_not_named(running) -> None:
    request_message = generation_service_pb2.ExplainRequest(request=request(request_id="e"))
    await running.client.generation.Explain(request_message)
    bad = capture(site_set(POST, layers=[77]))
    await running.client.refusal(request(request_id="b", captures=[bad]))
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    assert list(one.events[0].opened.missed_request_ids) == []


@pytest.mark.parametrize("leaves", [False, True], ids=["its client waits", "its client left"])
async def test_a_slow_sink_keeps_no_capacity_of_the_engine(starter, monkeypatch, leaves) -> None:
    running, sink = await with_slow(starter, monkeypatch, "finish")
    running.manager.admission_queue._capacity = sites_with(capture_rows=40).capacity
    call = running.client.generation.Generate(
        request(request_id="a", sampling=sampled(3), captures=[stored(1)])
    )
    await until(lambda: "finish" in sink.calls)
    if leaves:
        call.cancel()
    await until(lambda: not running.manager.ledger.requests)
    assert running.manager.open_requests == 1
    assert running.manager.store.pins == 0
    sink.gate.set()
    if not leaves:
        assert (await rest(call))[-1].HasField("receipt")
    assert (await settled(running)).leaked_count == 0


@pytest.mark.parametrize("how", ["resumed", "failed"])
async def test_a_call_whose_client_does_not_read_gives_its_place_back(
    starter, monkeypatch, how
) -> None:
    for name in ("call", "forwarder"):
        monkeypatch.setattr(f"rheostat_server.front_ends.{name}.STATUS_SECONDS", 0.1)
    running = await starter(
        Paced(info=replace(INFO, model_tokens=8192), sites=sites_with(capture_rows=1 << 20)),
        maximum_concurrent_rpcs=2,
    )
    async with narrow(running) as client:
        unread = client.capture.Subscribe()
        size = 8 << 20 if how == "resumed" else 64 << 10
        request_message = opening(EVERY, [wanted(0, 1, 2)], buffer_bytes=size)
        await unread.write(capture_service_pb2.SubscribeRequest(open=request_message))
        name = (await unread.read()).opened.subscription_id
        await running.client.generate(request(sampling=sampled(2000, 4)))
        await asyncio.sleep(0.3)  # until unread events have filled the connection of the call
        again = resuming(name) if how == "resumed" else opening(EVERY, [wanted()])
        await Subscriber.open(running, again)
        async with asyncio.timeout(10):
            while await generated(running) == "REASON_QUEUE_FULL":
                await asyncio.sleep(0.05)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(unread)
        expected = "REASON_SUPERSEDED" if how == "resumed" else "REASON_CAPTURE_OVERFLOW"
        assert Refusal.of(caught.value).reason == expected


async def generated(running) -> str:
    """The reason for which a new request is refused; empty if it runs."""
    try:
        await running.client.generate(request())
    except grpc.aio.AioRpcError as error:
        return Refusal.of(error).reason
    return ""
