"""Requests of watches without a reader are held, with a scripted engine."""

import asyncio

import grpc

from rheostat_wire.v1 import generation_pb2, monitor_service_pb2, types_pb2

from ..conftest import rest
from ..fakes import reading
from ..holding import HoldingBackend
from ..messages import request
from ..streams import settled, tokens, until
from ..subscribers import by_label
from ..talks import P
from ..uploads import refusal_of
from ..watchers import Watcher, clean, opening

HOLD = monitor_service_pb2.WATCH_LOST_HOLD
RED = {"team": "red"}
SAMPLING = generation_pb2.Sampling(max_tokens=6)


async def held(starter, *, count: int = 1, **settings: object):
    """A server, `count` watches without a reader, and a call that they hold after two tokens."""
    backend = HoldingBackend(hold=asyncio.Event(), hold_from=2)
    running = await starter(backend, **settings)
    message = opening(filter=by_label(team="red"), on_lost=HOLD)
    watchers = [await Watcher.open(running, message) for _ in range(count)]
    call = running.client.generation.Generate(
        request(request_id="r", sampling=SAMPLING, labels=RED)
    )
    for watcher in watchers:
        while len(watcher.read()) < P + 1:
            await watcher.hear()
    for watcher in watchers:
        watcher.call.cancel()
    await until(lambda: backend.held.keys() == backend.tasks.keys() != set())
    backend.hold.set()
    return running, watchers, call


def finished(events) -> generation_pb2.Finished:
    (end,) = [event.finished for event in events if event.HasField("finished")]
    return end


async def test_held_requests_go_on_once_their_watch_is_resumed(starter) -> None:
    running, (watcher,), call = await held(starter)
    events = []
    while len(tokens(events)) < 2:
        events.append(await call.read())
    more = asyncio.ensure_future(call.read())
    await asyncio.sleep(0.2)
    assert not more.done()
    assert set(running.backend.positions.values()) == {P + 2}  # the step that ran is the last
    again = await Watcher.resume(running, watcher.name, watcher.events[-1].sequence)
    events += [await more, *await rest(call)]
    assert tokens(events) == [13, 14, 15, 16, 17, 18]
    assert finished(events).reason == types_pb2.FINISH_REASON_LENGTH
    (one,) = events[-1].receipt.watches
    assert (one.watch_id, one.hold_count, one.change_count) == (watcher.name, 1, 0)
    assert one.held_duration.ToTimedelta().total_seconds() >= 0.2
    ended = (await again.until("ended")).ended
    assert (ended.position_count, ended.dropped_position_count) == (P + 5, 0)
    assert watcher.read() | again.read() == {p: [reading(0, p)] for p in range(P + 5)}
    assert await clean(running)


async def test_a_token_that_comes_while_a_request_is_held_waits(starter) -> None:
    running, (watcher,), call = await held(starter)
    (sequence,) = running.manager._active_requests["r"].sequences
    await until(lambda: sequence.token_hold._generated == 3)
    assert len(sequence.tokens) == 2
    await Watcher.resume(running, watcher.name, watcher.events[-1].sequence)
    assert len(tokens(await rest(call))) == 6
    assert await clean(running)


async def test_held_requests_end_if_the_watch_is_not_resumed_in_time(starter) -> None:
    running, (watcher,), call = await held(starter, resume_window=0.1)
    events = await rest(call)
    end = finished(events)
    assert (end.reason, end.watch_label) == (types_pb2.FINISH_REASON_WATCH, "the watch was lost")
    assert len(tokens(events)) == 2
    (one,) = events[-1].receipt.watches
    assert (one.watch_id, one.hold_count) == (watcher.name, 1)
    red = request(sampling=SAMPLING, labels=RED)
    refusal = await refusal_of(running.client.generation.Generate(red).read())
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "REASON_WATCH_LOST")
    await running.client.generate(request(sampling=SAMPLING))  # another team's
    assert await clean(running)


async def test_a_request_of_a_watch_without_a_reader_begins_once_it_is_resumed(starter) -> None:
    running, (watcher,), call = await held(starter)
    later = running.client.generation.Generate(
        request(request_id="later", sampling=SAMPLING, labels=RED)
    )
    await until(lambda: "later" in running.manager._active_requests)
    await asyncio.sleep(0.1)
    assert len(running.backend.jobs) == 1
    again = await Watcher.resume(running, watcher.name, watcher.events[-1].sequence)
    events = await rest(later)
    assert len(tokens(events)) == 6
    assert [one.hold_count for one in events[-1].receipt.watches] == [1]
    await rest(call)
    await again.until("ended", 2)
    assert await clean(running)


async def test_a_request_that_waits_to_begin_is_refused_if_the_watch_is_lost(starter) -> None:
    running, _, call = await held(starter, resume_window=0.3)
    later = running.client.generation.Generate(request(request_id="later", labels=RED))
    await until(lambda: "later" in running.manager._active_requests)
    assert (await refusal_of(later.read())).reason == "REASON_WATCH_LOST"
    assert finished(await rest(call)).reason == types_pb2.FINISH_REASON_WATCH
    assert len(running.backend.jobs) == 1
    assert await clean(running)


async def test_draining_ends_a_request_that_waits_to_begin(starter) -> None:
    running, _, call = await held(starter, resume_window=60)
    later = running.client.generation.Generate(request(request_id="later", labels=RED))
    await until(lambda: "later" in running.manager._active_requests)
    await asyncio.wait_for(running.manager.drain(0.1), 12)
    for one in (call, later):
        assert finished(await rest(one)).reason == types_pb2.FINISH_REASON_ABORTED
    assert len(running.backend.jobs) == 1


async def test_a_request_goes_on_once_no_watch_holds_it(starter) -> None:
    running, (first, second), call = await held(starter, count=2)
    await Watcher.resume(running, first.name, first.events[-1].sequence)
    await asyncio.sleep(0.1)
    assert running.backend.held
    await Watcher.resume(running, second.name, second.events[-1].sequence)
    events = await rest(call)
    assert len(tokens(events)) == 6
    assert {one.watch_id for one in events[-1].receipt.watches} == {first.name, second.name}
    assert await clean(running)


async def test_held_requests_can_be_cancelled(starter) -> None:
    running, _, call = await held(starter)
    call.cancel()
    assert await clean(running)


async def test_a_request_that_the_engine_cannot_hold_fails(starter) -> None:
    backend = HoldingBackend(hold=asyncio.Event(), hold_error=ValueError("no"))
    running = await starter(backend)
    watcher = await Watcher.open(running, opening(on_lost=HOLD))
    call = running.client.generation.Generate(request(sampling=SAMPLING))
    await watcher.until("begun")
    await until(lambda: bool(backend.jobs))
    watcher.call.cancel()
    assert (await refusal_of(rest(call))).code == grpc.StatusCode.INTERNAL
    backend.hold.set()
    await settled(running)


async def test_a_client_that_ends_its_watch_holds_nothing(starter) -> None:
    running = await starter(HoldingBackend())
    watcher = await Watcher.open(running, opening(on_lost=HOLD))
    await watcher.rest()
    await running.client.generate(request(sampling=SAMPLING))
    assert not running.backend.hold_messages
    assert await clean(running)
