"""Subscribe: rows of requests that others run, in order, each once, whatever connections do."""

import asyncio
import random
from itertools import groupby

import grpc
import grpc.aio
import pytest

from rheostat_wire.v1 import (
    capture_pb2,
    capture_service_pb2,
    types_pb2,
)

from ..conftest import rest
from ..fakes import ScriptedBackend
from ..messages import capture, request, selector, site_set, window
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
    site,
    wanted,
)

Code = grpc.StatusCode


async def test_every_row_of_every_request_comes_once_and_each_request_ends(running) -> None:
    one = await Subscriber.open(running, opening(EVERY, [wanted(0, 2)]))
    await asyncio.gather(generate(running, "a"), generate(running, "b", n=2))
    await one.until("end_of_request", 2)
    assert rows_of(one.events) == expected("a", 0, 2) | expected("b", 0, 2, samples=2)
    ends = ends_of(one.events)
    assert {name: list(end.finish_reasons) for name, end in ends.items()} == {
        "a": [types_pb2.FINISH_REASON_LENGTH],
        "b": [types_pb2.FINISH_REASON_LENGTH] * 2,
    }
    assert [event.sequence for event in one.numbered] == list(range(1, len(one.numbered) + 1))


def kinds(events: list) -> list[str]:
    """The kinds of events. Tokens may come in any number of messages, which count once."""
    return [kind for kind, _ in groupby(event.WhichOneof("event") for event in events)]


def tokens(events: list) -> list[int]:
    """All tokens of events."""
    return [token for event in events for token in event.tokens.token_ids]


async def test_a_request_does_not_notice_its_observers(running) -> None:
    before = await generate(running, "plain")
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    after = await generate(running, "seen")
    assert kinds(before) == kinds(after)
    assert tokens(before) == tokens(after)
    assert not after[-1].receipt.captures
    await one.until("end_of_request")
    assert len(rows_of(one.events)) == 5


@pytest.mark.parametrize(
    ("filter", "seen"),
    [
        (by_id("a", "c"), {"a"}),
        (by_label(team="red"), {"a", "b"}),
        (by_label(team="red", run="2"), {"b"}),
        (by_label(team="blue"), set()),
        (EVERY, {"a", "b"}),
    ],
    ids=["ids", "label", "labels", "no such label", "every"],
)
async def test_a_filter_selects_requests(running, filter, seen) -> None:
    one = await Subscriber.open(running, opening(filter, [wanted(1)]))
    await generate(running, "a", labels={"team": "red", "run": "1"})
    await generate(running, "b", labels={"team": "red", "run": "2"})
    await one.rest()
    assert set(ends_of(one.events)) == seen


async def test_several_subscribers_get_what_each_wants_of_one_request(running) -> None:
    last = selector(window(-1))
    first = await Subscriber.open(running, opening(EVERY, [wanted(0), wanted(1, where=last)]))
    second = await Subscriber.open(running, opening(by_id("a"), [wanted(0, 1, 2)]))
    await generate(running, "a", captures=[capture(site_set(POST, layers=[2]), where=last)])
    for one in (first, second):
        await one.until("end_of_request")
    (plan,) = {job.plan.captures for job in running.backend.jobs}
    assert sorted(s for one in plan for s in one.sites) == [site(0), site(1), site(2)]
    assert len(rows_of(second.events)) == 15
    parts = [event.captured for event in first.events if event.HasField("captured")]
    assert sum(len(part.token_ids) for part in parts if part.capture_index == 0) == 5
    assert [list(part.token_ids) for part in parts if part.capture_index == 1] == [[12]]


async def test_a_request_sends_rows_to_a_subscription_and_its_receipt_says_so(running) -> None:
    one = await Subscriber.open(running, opening(by_id("nobody")))
    spec = capture_pb2.CaptureSpec(sites=site_set(POST, layers=[0, 1]), subscription_id=one.name)
    events = await generate(running, "a", captures=[capture(), spec])
    (_, receipt) = events[-1].receipt.captures
    assert [(part.row_count, part.dropped_row_count) for part in receipt.sites] == [(5, 0), (5, 0)]
    await one.until("end_of_request")
    assert rows_of(one.events) == expected("a", 0, 1)
    assert {e.captured.capture_index for e in one.events if e.HasField("captured")} == {1}


async def test_a_subscription_that_is_not_there_cannot_be_sent_to(running) -> None:
    spec = capture_pb2.CaptureSpec(sites=site_set(POST, layers=[0]), subscription_id="none")
    refusal = await running.client.refusal(request(captures=[capture(), spec]))
    assert refusal.brief == (
        Code.NOT_FOUND,
        "REASON_SUBSCRIPTION_NOT_FOUND",
        "captures[1].subscription_id",
    )


async def test_an_aborted_request_ends_with_the_rows_that_it_had(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event(), hold_from=2))
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    call = running.client.generation.Generate(request(request_id="a", sampling=sampled(tokens=9)))
    while not (await call.read()).HasField("tokens"):
        pass
    await one.until("captured")
    call.cancel()
    await one.until("end_of_request")
    end = ends_of(one.events)["a"]
    assert list(end.finish_reasons) == [types_pb2.FINISH_REASON_ABORTED]
    assert len(rows_of(one.events)) == end.row_count > 0
    await settled(running)


async def test_no_payload_leaves_without_credit(starter) -> None:
    running = await starter(heartbeat=0.05)
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)], credit=0))
    await generate(running, "a")
    await one.until("heartbeat", 2)
    beat = one.events[-1].heartbeat
    assert (beat.buffered_bytes, beat.credit_bytes, beat.last_sequence) == (5 * ROW, 0, 0)
    assert not one.numbered
    await one.credit(5 * ROW - 1)
    await one.until("heartbeat", 4)
    assert not one.numbered
    await one.credit(1)
    await one.until("end_of_request")
    assert rows_of(one.events) == expected("a", 0)


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
async def test_chunks_are_no_larger_than_the_credit_that_comes_back(running, rows) -> None:
    credit = rows * ROW
    one = await Subscriber.open(running, opening(EVERY, [wanted(0, 1, 2)], credit=credit))
    await generate(running, "a", tokens=6)
    async with asyncio.timeout(10):
        while not ends_of(one.events):
            event = await one.hear()
            if event.HasField("captured"):
                size = len(event.captured.tensor.inline)
                assert size <= max(ROW, credit // 2)
                await one.credit(size)
    assert rows_of(one.events) == expected("a", 0, 1, 2, tokens=6)


@pytest.mark.parametrize("left", [0, 1])
async def test_a_call_that_goes_on_with_little_credit_cuts_chunks_as_before(running, left) -> None:
    request_message = opening(EVERY, [wanted(0, 1)], credit=4 * ROW)
    one = await Subscriber.open(running, request_message)
    one.call.cancel()
    two = await Subscriber.open(running, resuming(one.name, credit=left))
    await generate(running, "a", tokens=1)
    await two.credit(6 * ROW)
    await two.until("end_of_request")
    sizes = [len(event.captured.tensor.inline) for event in two.numbered[:-1]]
    assert sizes == [2 * ROW] * 3


async def test_closing_ones_side_brings_what_waits_and_the_end(running) -> None:
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)], credit=0))
    await generate(running, "a")
    await one.rest()
    assert rows_of(one.events) == expected("a", 0)
    assert set(ends_of(one.events)) == {"a"}
    assert not len(running.manager.subscriptions)


async def test_closing_ends_requests_that_still_run(starter) -> None:
    running = await starter(ScriptedBackend(hold=asyncio.Event(), hold_from=2))
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    call = running.client.generation.Generate(request(request_id="a", sampling=sampled(4)))
    while not (await call.read()).HasField("tokens"):
        pass
    await one.until("captured")
    await one.rest()
    assert not ends_of(one.events)["a"].finish_reasons
    running.backend.hold.set()
    assert (await rest(call))[-1].HasField("receipt")


async def test_what_was_not_acknowledged_comes_again_after_a_break(running) -> None:
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    await generate(running, "a")
    await one.until("end_of_request")
    one.call.cancel()
    await until(lambda: running.manager.subscriptions.waiting == 1)
    await generate(running, "b")
    two = await Subscriber.open(running, resuming(one.name, after=1))
    await two.until("end_of_request", 2)
    assert [e.sequence for e in two.numbered] == list(range(2, 2 + len(two.numbered)))
    assert two.numbered[: len(one.numbered) - 1] == one.numbered[1:]
    everything = [one.numbered[0], *two.numbered]
    assert rows_of(everything) == expected("a", 0) | expected("b", 0)
    assert set(ends_of(everything)) == {"a", "b"}


async def test_an_acknowledged_cursor_cannot_be_gone_back_behind(running) -> None:
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    await generate(running, "a")
    await one.until("end_of_request")
    await one.ack(one.numbered[-1].sequence)
    await until(lambda: not running.manager.subscriptions.named(one.name, "").buffer.kept)
    one.call.cancel()
    two = Subscriber(running)
    await two.call.write(Message(open=resuming(one.name, after=0)))
    refusal = await failure(two)
    assert (refusal.code, refusal.reason) == (Code.OUT_OF_RANGE, "REASON_CURSOR_EXPIRED")
    assert dict(refusal.metadata)["oldest"] == str(one.numbered[-1].sequence + 1)
    three = await Subscriber.open(running, resuming(one.name, after=one.numbered[-1].sequence))
    await generate(running, "b")
    await three.until("end_of_request")
    assert rows_of(three.events) == expected("b", 0)


async def test_a_client_that_leaves_has_all_its_acknowledgements_carried_out(running) -> None:
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    await generate(running, "a")
    await one.until("end_of_request")
    last = one.numbered[-1].sequence
    await one.ack(last - 1)
    await one.call.write(Message(leave=capture_service_pb2.SubscribeLeave()))
    assert await asyncio.wait_for(one.call.read(), 10) is grpc.aio.EOF
    assert await one.call.code() == Code.OK
    two = Subscriber(running)
    await two.call.write(Message(open=resuming(one.name, after=last - 2)))
    assert (await failure(two)).reason == "REASON_CURSOR_EXPIRED"
    three = await Subscriber.open(running, resuming(one.name, after=last - 1))
    await generate(running, "b")
    await three.until("end_of_request", 2)
    assert next(event.sequence for event in three.numbered) == last


async def test_what_is_acknowledged_while_it_is_sent_again_is_skipped(starter) -> None:
    running = await starter(heartbeat=0.05)
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    for number in range(4):
        await generate(running, f"r{number}")
    await one.until("end_of_request", 4)
    last = one.numbered[-1].sequence
    one.call.cancel()
    two = await Subscriber.open(running, resuming(one.name, after=0, credit=5 * ROW))
    await two.until("heartbeat")
    await two.ack(last - 1)
    await two.credit(PLENTY)
    await generate(running, "x")
    while two.events[-1].end_of_request.request_id != "x":
        await two.hear()
    numbers = [event.sequence for event in two.numbered]
    assert numbers == sorted(set(numbers))
    assert numbers[-2:] == [last + 1, last + 2]
    assert {key[0] for key in rows_of(two.numbered)} == {"r0", "x"}


async def test_a_request_that_is_watched_and_sends_rows_ends_once(running) -> None:
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    spec = capture_pb2.CaptureSpec(sites=site_set(POST, layers=[2]), subscription_id=one.name)
    events = await generate(running, "a", captures=[capture(), spec])
    (_, receipt) = events[-1].receipt.captures
    assert [part.row_count for part in receipt.sites] == [5]
    await one.rest()
    assert rows_of(one.events) == expected("a", 0, 2)
    assert set(ends_of(one.events)) == {"a"}
    assert {e.captured.capture_index for e in one.events if e.HasField("captured")} == {0, 2}


async def test_a_later_call_takes_over(running) -> None:
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    two = await Subscriber.open(running, resuming(one.name))
    refusal = await failure(one)
    assert (refusal.code, refusal.reason) == (Code.ABORTED, "REASON_SUPERSEDED")
    await generate(running, "a")
    await two.until("end_of_request")
    assert rows_of(two.events) == expected("a", 0)


async def test_a_subscription_whose_reader_stays_away_is_gone(starter) -> None:
    running = await starter(resume_window=0.05)
    one = await Subscriber.open(running, opening(EVERY, [wanted(0)]))
    one.call.cancel()
    await until(lambda: not len(running.manager.subscriptions))
    two = Subscriber(running)
    await two.call.write(Message(open=resuming(one.name)))
    assert (await failure(two)).brief == (
        Code.NOT_FOUND,
        "REASON_SUBSCRIPTION_NOT_FOUND",
        "open.resume.subscription_id",
    )
    await generate(running, "a")
    await settled(running)


async def test_connections_that_are_cut_anywhere_lose_and_repeat_nothing(starter) -> None:
    running = await starter()
    rng = random.Random(5)
    one = await Subscriber.open(running, opening(EVERY, [wanted(0, 1)]))
    name, have, seen = one.name, 0, []
    running_requests = asyncio.create_task(_keep_asking(running, 20, rng))
    cuts = 0
    while len(ends_of(seen)) < 20:
        for _ in range(rng.randrange(1, 4)):
            event = await one.hear()
            if event.sequence:
                assert event.sequence == have + 1
                have = event.sequence
                seen.append(event)
            if len(ends_of(seen)) == 20:
                break
            if rng.random() < 0.3:
                await one.ack(have)
        else:
            one.call.cancel()
            one = await Subscriber.open(running, resuming(name, after=have))
            cuts += 1
    await running_requests
    assert cuts > 10
    assert rows_of(seen) == {
        key: value for i in range(20) for key, value in expected(f"r{i}", 0, 1).items()
    }


async def _keep_asking(running, count: int, rng: random.Random) -> None:
    for i in range(count):
        await generate(running, f"r{i}")
        await asyncio.sleep(rng.random() / 50)
