"""Subscriptions whose connection or whose reader goes: nothing is lost, nothing comes twice."""

import asyncio
import gc
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import rheostat
from rheostat import Capture, Cursor

from ....effort import FACTOR, at_length
from ..rows_server import (
    ROW,
    LoadingServer,
    RowsServer,
    ends_of,
    expected,
    inner,
    rows_of,
    until,
    until_ends,
)

POST = Capture("resid_post", [0, 1])
ONE = Capture("resid_post", 0)


@at_length
@pytest.mark.parametrize(("ack", "cuts"), [("auto", 100 * FACTOR), ("manual", 50 * FACTOR)])
def test_connections_that_are_cut_anywhere_lose_and_repeat_nothing(running, subscriber, ack, cuts):
    def ask() -> None:
        while not enough.is_set():
            asked.append(f"r{len(asked)}")
            running.generate(asked[-1])

    rng = random.Random(3)
    asked: list[str] = []
    enough = threading.Event()
    events = []
    with (
        ThreadPoolExecutor(1) as threads,
        subscriber.subscribe(capture=POST, every=True, ack=ack, credit=5 * ROW) as subscription,
    ):
        asking = threads.submit(ask)
        done = 0
        try:
            while done < cuts:
                events.append(next(subscription))
                if rng.random() < 0.1:
                    subscription.ack()
                if rng.random() < 0.8:
                    subscriber.cut(subscription)
                    done += 1
        finally:
            enough.set()
        asking.result(30)
        while len(ends_of(events)) < len(asked):
            events.append(next(subscription))
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert rows_of(events) == {
        key: value for name in asked for key, value in expected(name, 0, 1).items()
    }


def test_a_loop_that_failed_and_left_is_resumed_with_the_event_in_hand(running, subscriber):
    subscription = subscriber.subscribe(capture=ONE, every=True)

    def read() -> None:
        with subscription:
            until_ends(subscription)
            subscription.leave()
            raise ValueError("no room on the disk")

    running.generate("a")
    running.generate("b")
    with pytest.raises(ValueError, match="no room"):
        read()
    in_hand = subscription.cursor.sequence
    assert subscription.acknowledged.sequence == in_hand - 1
    with subscriber.resume(subscription.acknowledged) as again:
        second = until_ends(again, 2)
    assert second[0].sequence == in_hand
    assert set(ends_of(second)) == {"a", "b"}


@pytest.mark.parametrize("kind_of_error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_block_that_ends_with_an_error_ends_the_subscription(running, subscriber, kind_of_error):
    subscription = subscriber.subscribe(capture=ONE, every=True)

    def read() -> None:
        with subscription:
            until_ends(subscription)
            raise kind_of_error

    running.generate("a")
    running.generate("b")
    with pytest.raises(kind_of_error):
        read()
    assert running.ask(len) == 0


def test_a_cursor_that_was_stored_makes_every_event_count_once(running, subscriber):
    stored = []
    subscription = subscriber.subscribe(capture=ONE, every=True, ack="manual")
    running.generate("a")
    running.generate("b")
    cursor = Cursor(subscription.id, 0)
    while len(ends_of(stored)) < 2:
        stored.append(next(subscription))
        cursor = subscription.cursor
        subscription.leave()
        subscription = subscriber.resume(Cursor(*cursor), ack="manual")
    subscription.close()
    assert rows_of(stored) == expected("a", 0) | expected("b", 0)
    assert cursor.sequence == len(stored)


def test_a_subscription_that_is_gone_is_not_found(starter, kind):
    running = starter(resume_window=0.05)
    subscriber = kind(running.target)
    subscription = subscriber.subscribe(capture=ONE, every=True)
    subscription.leave()
    until(lambda: running.ask(len) == 0)
    with pytest.raises(rheostat.NotFound) as raised:
        subscriber.resume(subscription.cursor)
    assert raised.value.reason == "REASON_SUBSCRIPTION_NOT_FOUND"


def test_a_new_connection_does_not_wait_with_one_that_lost_the_server(kind):
    """Connections of a process to the same address do not share when to try again."""
    first = RowsServer()
    old = kind(first.target)
    old.subscribe(capture=ONE, every=True).leave()
    first.stop()
    for _ in range(3):  # so often that gRPC waits before it tries again
        with pytest.raises(rheostat.Unavailable):
            old.subscribe(capture=ONE, every=True)
    second = RowsServer(port=first.port)
    with kind(second.target).subscribe(capture=ONE, every=True) as subscription:
        second.generate("a")
        assert rows_of(until_ends(subscription)) == expected("a", 0)
    second.stop()


@pytest.mark.parametrize("loading", [True, False], ids=["it loads its model", "it serves"])
def test_a_subscription_of_a_server_that_was_restarted_is_gone(kind, loading):
    first = RowsServer()
    subscriber = kind(first.target)
    subscription = subscriber.subscribe(capture=ONE, every=True)
    first.generate("a")
    until_ends(subscription)
    first.crash()
    second = LoadingServer(first.port) if loading else RowsServer(port=first.port)
    for read in (lambda: next(subscription), lambda: subscriber.resume(subscription.acknowledged)):
        with pytest.raises(rheostat.NotFound, match="the server was restarted") as raised:
            read()
        assert raised.value.reason == "REASON_SUBSCRIPTION_NOT_FOUND"
        assert raised.value.resource == ("subscription", subscription.id)
    second.stop()
    first.stop()


def test_a_server_that_ends_says_so_to_its_subscribers(kind):
    running = RowsServer()
    subscriber = kind(running.target)
    subscription = subscriber.subscribe(capture=ONE, every=True)
    running.generate("a")
    running.stop()
    assert rows_of(until_ends(subscription)) == expected("a", 0)
    with pytest.raises(rheostat.Unavailable, match="the server has ended") as raised:
        next(subscription)
    assert raised.value.reason == "REASON_DRAINING"


def test_what_was_acknowledged_cannot_be_had_again(running, subscriber):
    subscription = subscriber.subscribe(capture=ONE, every=True)
    running.generate("a")
    until_ends(subscription)
    subscription.ack()
    until(lambda: not running.kept(subscription.id))
    subscription.leave()
    with pytest.raises(rheostat.OutOfRange) as raised:
        subscriber.resume(Cursor(subscription.id, 0))
    assert raised.value.reason == "REASON_CURSOR_EXPIRED"
    assert raised.value.metadata["oldest"] == str(subscription.cursor.sequence + 1)


def test_what_was_dealt_with_before_leaving_is_not_replayed(running, subscriber):
    subscription = subscriber.subscribe(capture=ONE, every=True)
    for name in "ab":
        running.generate(name)
    events = until_ends(subscription, 2)
    subscription.leave()
    assert subscription.acknowledged.sequence == len(events) - 1
    for sequence in (0, len(events) - 2):
        with pytest.raises(rheostat.OutOfRange) as raised:
            subscriber.resume(Cursor(subscription.id, sequence))
        assert raised.value.metadata["oldest"] == str(len(events))
    with subscriber.resume(subscription.acknowledged) as again:
        running.generate("c")
        assert next(event.sequence for event in until_ends(again, 2)) == len(events)


def test_a_subscription_that_was_left_by_hand_keeps_what_was_not_acknowledged(running, subscriber):
    subscription = subscriber.subscribe(capture=ONE, every=True, ack="manual")
    running.generate("a")
    events = until_ends(subscription)
    subscription.leave()
    with subscriber.resume(Cursor(subscription.id, 0)) as again:
        assert [one.sequence for one in until_ends(again)] == [one.sequence for one in events]


def test_leaving_does_not_take_a_subscription_away_from_who_has_taken_it_up(running, subscriber):
    first = subscriber.subscribe(capture=ONE, every=True)
    running.generate("a")
    until_ends(first)
    with subscriber.resume(first.cursor) as second:
        running.generate("b")
        until_ends(second)
        first.leave()
        running.generate("c")
        assert set(ends_of(until_ends(second))) == {"c"}


def test_leaving_a_server_that_is_gone_takes_no_time(kind):
    running = RowsServer()
    subscription = kind(running.target).subscribe(capture=ONE, every=True)
    running.generate("a")
    until_ends(subscription)
    running.stop()
    subscription.leave()


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_subscription_that_is_closed_without_a_connection_ends_once_there_is_one(
    running, subscriber, monkeypatch, caplog, forgotten
):
    for module in ("stream", "aio_stream", "worker"):
        monkeypatch.setattr(f"rheostat._event_streams.{module}.CLOSE_TIMEOUT", 0.2)
    subscription = subscriber.subscribe(capture=ONE, every=True, credit=ROW)
    running.generate("a")
    connection = inner(subscription)._worker._connection
    begin_call, reachable = connection.bidi, threading.Event()

    def bidi(*arguments):
        if not reachable.is_set():
            raise rheostat.Unavailable("no route to the server")
        return begin_call(*arguments)

    monkeypatch.setattr(connection, "bidi", bidi)
    subscriber.cut(subscription)
    subscription.close()
    assert "has not confirmed it" in caplog.text
    assert running.ask(len) == 1
    if forgotten:
        del subscription
        gc.collect()
    reachable.set()
    until(lambda: running.ask(len) == 0)


def test_a_call_that_another_took_over_hands_nothing_more_over(running, subscriber):
    first = subscriber.subscribe(capture=ONE, every=True)
    running.generate("a")
    until(lambda: first._state._queue)
    with subscriber.resume(Cursor(first.id, 0)) as second:
        assert rows_of(until_ends(second)) == expected("a", 0)
        until(lambda: first._worker._ended)
        with pytest.raises(rheostat.Aborted) as raised:
            next(first)
    assert raised.value.reason == "REASON_SUPERSEDED"


def test_a_subscription_that_is_forgotten_is_left_to_the_server(running, subscriber):
    subscription = subscriber.subscribe(capture=ONE, every=True)
    cursor = subscription.cursor
    del subscription
    gc.collect()
    until(lambda: running.ask(lambda them: them.waiting) == 1)
    running.generate("a")
    with subscriber.resume(cursor) as again:
        assert rows_of(until_ends(again)) == expected("a", 0)


async def test_a_block_whose_task_is_cancelled_ends_the_subscription(running):
    async def read() -> None:
        async with engine.subscribe(capture=ONE, every=True) as subscription:
            made.set_result(subscription)
            async for _ in subscription:
                pass

    async with rheostat.aio.connect(running.target) as engine:
        made = asyncio.get_running_loop().create_future()
        reading = asyncio.create_task(read())
        await made
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await asyncio.to_thread(running.ask, len) == 0
