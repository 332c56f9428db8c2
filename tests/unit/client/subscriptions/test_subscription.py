"""Subscriptions of both clients to a real server: every row once, whatever connections do."""

import asyncio
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

import rheostat
from rheostat import Capture, CapturedRows, Cursor, DroppedRows

from ...server.fakes import ScriptedBackend, sites_with
from ..rows_server import (
    ROW,
    AioSubscriber,
    SyncSubscriber,
    ends_of,
    expected,
    inner,
    rows_of,
    until,
    until_ends,
)

POST = Capture("resid_post", [0, 1])
ONE = Capture("resid_post", 0)


def test_every_row_of_every_request_comes_once_and_each_request_ends(running, subscriber):
    with subscriber.subscribe(capture=POST, every=True) as subscription:
        running.generate("a")
        running.generate("b", tokens=5)
        events = until_ends(subscription, 2)
    assert rows_of(events) == expected("a", 0, 1) | expected("b", 0, 1, tokens=5)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert ends_of(events)["a"].finish_reasons == ("length",)
    assert ends_of(events)["b"].row_count == 14
    assert running.ask(len) == 0


def test_a_request_sends_its_rows_to_a_subscription(running, subscriber):
    with subscriber.subscribe() as subscription:
        elsewhere = Capture("resid_post", 2, to=inner(subscription))
        out = running.generate("a", capture=[ONE, elsewhere])
        other = running.generate("b", capture=Capture("resid_post", 1, to=subscription.id))
        events = until_ends(subscription, 2)
    assert rows_of(events) == expected("a", 2) | expected("b", 1)
    assert {event.capture for event in events if isinstance(event, CapturedRows)} == {0, 1}
    assert list(out.activations) == [("resid_post", 0)]
    assert [site.row_count for site in out.receipt.captures[1].sites] == [5]
    with pytest.raises(KeyError, match=f"they went to the subscription '{subscription.id}'"):
        other.activations["resid_post", 1]


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"requests": "b"}, {"b"}),
        ({"requests": ["a", "c"]}, {"a"}),
        ({"labels": {"team": "red"}}, {"a", "b"}),
        ({"labels": {"team": "red", "run": "2"}}, {"b"}),
    ],
)
def test_requests_are_selected_by_id_or_labels(running, subscriber, options, seen):
    with subscriber.subscribe(capture=ONE, **options) as subscription:
        running.generate("a", labels={"team": "red", "run": "1"})
        running.generate("b", labels={"team": "red", "run": "2"})
        running.generate("d")
        subscription.finish()
        assert set(ends_of(subscription)) == seen


def test_requests_that_began_before_come_from_where_it_is_said(starter, kind):
    hold = asyncio.Event()
    running = starter(ScriptedBackend(hold=hold))
    with running.engine.stream([10], request_id="early", max_tokens=2) as stream:
        while not isinstance(next(stream), rheostat.Tokens):
            pass
        with kind(running.target).subscribe(capture=ONE, every=True) as subscription:
            assert subscription.missed == {}
            assert subscription.attached == (rheostat.Attached("early", 0, False, None),)
            running.do(hold.set)
            stream.result()
            rows, end = next(subscription), next(subscription)
            assert rows.positions.tolist() == [1]
            assert end.attached == (rheostat.Attached("early", 0, False, 1),)


def test_requests_that_cannot_be_joined_are_named_with_the_reason(starter, kind):
    room = sites_with(capture_rows=1)
    running = starter(ScriptedBackend(sites=room, hold=asyncio.Event()))
    with running.engine.stream([10, 11], request_id="early", max_tokens=2) as stream:
        while not isinstance(next(stream), rheostat.Tokens):
            pass
        with kind(running.target).subscribe(capture=POST, every=True) as subscription:
            assert list(subscription.missed) == ["early"]
            assert "no capacity" in subscription.missed["early"]
            assert subscription.attached == ()


def test_nothing_more_is_sent_while_nothing_is_taken(starter, kind):
    hold = asyncio.Event()
    running = starter(ScriptedBackend(hold=hold, hold_from=2))
    with kind(running.target).subscribe(capture=ONE, every=True, credit=4 * ROW) as subscription:
        with running.engine.stream([10, 11, 12], request_id="a", max_tokens=9) as stream:
            while not isinstance(next(stream), rheostat.Tokens):
                pass
            until(lambda: subscription._state._queued_bytes > 0)
            running.do(hold.set)
            stream.result()
        until(lambda: subscription.last_heartbeat and subscription.last_heartbeat.buffered_bytes)
        beat = subscription.last_heartbeat
        held = subscription._state._queued_bytes
        assert 0 < held <= 4 * ROW
        assert (held + beat.credit_bytes, beat.buffered_bytes) == (4 * ROW, 11 * ROW - held)
        assert rows_of(until_ends(subscription)) == expected("a", 0, tokens=9)


def test_credit_for_a_single_row_brings_every_row(running, subscriber):
    with subscriber.subscribe(capture=POST, every=True, credit=ROW) as subscription:
        running.generate("a")
        assert rows_of(until_ends(subscription)) == expected("a", 0, 1)


def test_rows_sent_here_that_the_credit_never_covers_come_all_the_same(running, subscriber):
    with subscriber.subscribe(credit=1) as subscription:
        running.generate("a", capture=Capture("resid_post", [0, 1], to=inner(subscription)))
        assert rows_of(until_ends(subscription)) == expected("a", 0, 1)


@pytest.mark.parametrize(
    ("options", "path", "least"),
    [
        ({"credit": 1}, "open.credit_bytes", ROW),
        ({"buffer_bytes": 10}, "open.buffer_bytes", 2 * ROW),
    ],
)
def test_room_that_is_too_small_is_refused_with_the_least_that_works(
    subscriber, options, path, least
):
    with pytest.raises(rheostat.InvalidRequest, match=f"takes {least} bytes") as seen:
        subscriber.subscribe(capture=POST, every=True, **options)
    assert seen.value.path == path
    assert ("give credit= at least as much" in str(seen.value)) == ("credit" in options)
    assert "0 now and more" not in str(seen.value)


def test_a_sinks_name_that_is_given_as_a_subscription_is_told_how_a_sink_is_written(running):
    told = r'such as a sink \(rows go to a sink by to=rheostat\.Sink\("disk"\)\)'
    with pytest.raises(rheostat.NotFound, match=told):
        running.generate("a", capture=Capture("resid_post", to="disk"))
    with pytest.raises(rheostat.NotFound) as raised:
        running.engine.resume(Cursor("disk", 0))
    assert "Sink" not in str(raised.value)


def test_an_event_is_acknowledged_once_the_next_is_asked_for(running, subscriber):
    with (
        ThreadPoolExecutor(1) as threads,
        subscriber.subscribe(capture=ONE, every=True) as subscription,
    ):
        running.generate("a")
        until_ends(subscription)
        last = subscription.cursor.sequence
        assert subscription.acknowledged == Cursor(subscription.id, last - 1)
        assert running.kept(subscription.id) > 0
        waiting = threads.submit(next, subscription, None)
        until(lambda: not running.kept(subscription.id))
        assert subscription.acknowledged == Cursor(subscription.id, last)
        subscription.close()
        assert waiting.result(10) is None


def test_by_hand_only_ack_acknowledges(running, subscriber):
    with subscriber.subscribe(capture=ONE, every=True, ack="manual") as subscription:
        running.generate("a")
        until_ends(subscription)
        running.generate("b")
        until_ends(subscription)
        assert subscription.acknowledged.sequence == 0
        assert running.kept(subscription.id) > 10 * ROW
        subscription.ack()
        until(lambda: not running.kept(subscription.id))
        assert subscription.acknowledged == subscription.cursor


def test_closing_from_another_thread_ends_the_loop(running, subscriber):
    with (
        ThreadPoolExecutor(1) as threads,
        subscriber.subscribe(capture=ONE, every=True) as subscription,
    ):
        loop = threads.submit(list, subscription)
        running.generate("a")
        until(lambda: subscription.cursor.sequence > 1)
        subscription.close()
        assert ends_of(loop.result(10)).keys() == {"a"}
    assert running.ask(len) == 0
    subscription.close()


def test_closing_drops_what_was_not_taken(running, subscriber):
    subscription = subscriber.subscribe(capture=ONE, every=True, credit=ROW)
    running.generate("a")
    subscription.close()
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(list, subscription).result(10) == []
    assert running.ask(len) == 0


def test_finishing_brings_what_the_server_has(running, subscriber):
    with subscriber.subscribe(capture=ONE, every=True, credit=ROW) as subscription:
        running.generate("a")
        running.generate("b")
        subscription.finish()
        assert rows_of(subscription) == expected("a", 0) | expected("b", 0)


def test_finishing_ends_requests_that_still_run(starter, kind):
    running = starter(ScriptedBackend(hold=asyncio.Event(), hold_from=2))
    with (
        kind(running.target).subscribe(capture=ONE, every=True) as subscription,
        running.engine.stream([10, 11, 12], request_id="a", max_tokens=4) as stream,
    ):
        while not isinstance(next(stream), rheostat.Tokens):
            pass
        assert isinstance(next(subscription), CapturedRows)
        subscription.finish()
        assert ends_of(subscription)["a"].finish_reasons == ()


def test_closing_the_client_ends_it(running, subscriber):
    subscription = subscriber.subscribe(capture=ONE, every=True)
    with ThreadPoolExecutor(1) as threads:
        loop = threads.submit(list, subscription)
        if isinstance(subscriber, AioSubscriber):
            subscriber.thread.run(subscriber.engine.close())
        else:
            subscriber.engine.close()
        assert isinstance(loop.exception(10), rheostat.Cancelled)


@pytest.mark.parametrize("policy", ["drop_oldest", "drop_newest"])
def test_rows_that_are_lost_are_told(running, subscriber, policy):
    options = {"overload": policy, "buffer_bytes": 4 * ROW, "credit": ROW}
    with subscriber.subscribe(capture=ONE, every=True, **options) as subscription:
        running.generate("a", tokens=20)
        events = until_ends(subscription)
    lost = [event for event in events if isinstance(event, DroppedRows)]
    gone = sorted(position for event in lost for position in event.positions.tolist())
    have = sorted(position for _, _, position, _ in rows_of(events))
    assert sorted(gone + have) == list(range(22))
    assert ends_of(events)["a"].dropped_row_count == sum(event.row_count for event in lost) > 0


def test_a_request_that_is_missed_says_why(running, subscriber, monkeypatch):
    monkeypatch.setattr("rheostat_server.subscriptions.observer_captures.OBSERVERS_COST", 1)
    with subscriber.subscribe(capture=ONE, every=True, overload="drop_newest") as subscription:
        running.generate("a")
        (event,) = until_ends(subscription)
    assert (event.row_count, event.dropped_row_count) == (0, 0)
    assert "too many subscriptions observe it" in event.missed_reason


def test_being_too_slow_ends_the_subscription_and_says_so(running, subscriber):
    options = {"buffer_bytes": 3 * ROW, "credit": ROW, "ack": "manual"}
    with subscriber.subscribe(capture=ONE, every=True, **options) as subscription:
        running.generate("a", tokens=20)
        with pytest.raises(rheostat.ResourceExhausted) as raised:
            list(subscription)
    assert raised.value.reason == "REASON_CAPTURE_OVERFLOW"


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"capture": ONE}, "open.filter"),
        ({"requests": "a", "every": True}, "open.filter"),
        ({"capture": ONE, "labels": ["a"]}, "open.filter.labels.labels"),
        ({"capture": ONE, "labels": {}}, "open.filter.labels.labels"),
        ({"capture": ONE, "requests": [3]}, "open.filter.requests.request_ids[0]"),
        ({"capture": "resid_post", "every": True}, "captures[0]"),
        (
            {"capture": Capture("resid_post", to="x"), "every": True},
            "open.captures[0].subscription_id",
        ),
        ({"overload": "panic"}, "open.overload"),
        ({"buffer_bytes": 0}, "open.buffer_bytes"),
        ({"credit": 0}, "credit"),
        ({"ack": "never"}, "ack"),
        (
            {"capture": Capture("resid_post", 7), "every": True},
            "open.captures[0].sites.list.layers[0]",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_field(subscriber, options, path):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        subscriber.subscribe(**options)
    assert raised.value.path == path


def test_labels_name_at_least_one(subscriber):
    with pytest.raises(rheostat.InvalidRequest, match=r"^labels= is empty: name at least one"):
        subscriber.subscribe(capture=ONE, labels={})


@pytest.mark.parametrize("which", [{"every": True}, {"requests": "a"}, {"labels": {"a": "b"}}])
def test_requests_of_which_nothing_is_captured_are_refused(subscriber, which):
    with pytest.raises(
        rheostat.InvalidRequest, match=r"nothing is captured of them: add capture="
    ) as seen:
        subscriber.subscribe(**which)
    assert seen.value.path == "open.captures"


def test_what_is_no_option_and_no_cursor_is_refused(subscriber):
    told = (
        "subscribe() has no option 'filter'; rheostat.SubscribeOptions has credit, ack, "
        "shared_memory, views, capture, requests, labels, every, overload, buffer_bytes"
    )
    with pytest.raises(TypeError) as raised:
        subscriber.subscribe(filter="x")
    assert str(raised.value) == told
    with pytest.raises(rheostat.InvalidRequest, match=r"is no rheostat\.Cursor"):
        subscriber.resume("sub-1")
    with pytest.raises(rheostat.InvalidRequest, match="names no subscription"):
        subscriber.resume(Cursor("", 0))


async def test_a_task_that_is_cancelled_while_it_waits_loses_no_event(running):
    async with (
        rheostat.aio.connect(running.target) as engine,
        engine.subscribe(capture=POST, every=True) as subscription,
    ):
        events = []
        asking = asyncio.create_task(asyncio.to_thread(lambda: [
            running.generate(f"r{number}") for number in range(8)
        ]))  # fmt: skip
        while len(ends_of(events)) < 8:
            step = asyncio.ensure_future(anext(subscription))
            await asyncio.sleep(random.Random(len(events)).random() / 500)
            step.cancel()
            try:
                events.append(await step)
            except asyncio.CancelledError:
                await asyncio.sleep(0.001)
        await asking
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert len(rows_of(events)) == 80


async def test_the_id_is_there_once_the_subscription_stands(running):
    async with rheostat.aio.connect(running.target) as engine:
        subscription = engine.subscribe()
        with pytest.raises(rheostat.Refused, match="enter it with async with"):
            _ = subscription.id
        async with subscription:
            assert subscription.id


@pytest.mark.parametrize("end", ["close", "leave"])
def test_reading_on_after_closing_before_the_end_is_refused(running, end):
    with SyncSubscriber(running.target).subscribe(capture=ONE, every=True) as subscription:
        running.generate("a")
        next(subscription)
        if end == "leave":
            subscription.leave()
    assert next(subscription, None) is None
    for use in (lambda: list(subscription), lambda: list(subscription), subscription.ack):
        with pytest.raises(rheostat.Refused, match="inside its with block"):
            use()
    assert subscription.acknowledged.sequence == 0


async def test_a_loop_that_closes_its_own_subscription_ends(running):
    seen = []
    with SyncSubscriber(running.target).subscribe(capture=ONE, every=True) as subscription:
        await asyncio.to_thread(running.generate, "a")
        for event in subscription:
            seen.append(event)
            subscription.close()
    async with (
        rheostat.aio.connect(running.target) as engine,
        engine.subscribe(capture=ONE, every=True) as other,
    ):
        await asyncio.to_thread(running.generate, "b")
        async for event in other:
            seen.append(event)
            await other.close()
    assert [event.request_id for event in seen] == ["a", "b"]


async def test_a_task_that_reads_on_after_closing_before_the_end_is_refused(running):
    async with rheostat.aio.connect(running.target) as engine:
        async with engine.subscribe(capture=ONE, every=True) as subscription:
            await asyncio.to_thread(running.generate, "a")
            await anext(subscription)
        for _ in range(2):
            with pytest.raises(rheostat.Refused, match="inside its with block"):
                _ = [event async for event in subscription]
        with pytest.raises(rheostat.Refused, match="inside its with block"):
            subscription.ack()


def test_a_subscription_that_was_read_to_its_end_ends_again(running, subscriber):
    with subscriber.subscribe(capture=ONE, every=True) as subscription:
        running.generate("a")
        subscription.finish()
        assert rows_of(subscription) == expected("a", 0)
    assert list(subscription) == []
    subscription.ack()
