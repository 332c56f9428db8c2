"""Watches over gRPC, with a scripted engine."""

import asyncio
import threading
from dataclasses import replace

import grpc
import numpy as np
import pytest

from rheostat_engine import SignalsWait
from rheostat_server.api import generation
from rheostat_server.monitors import registry, watch
from rheostat_server.tasks.offload import PLANNER
from rheostat_wire.v1 import capture_pb2, generation_pb2, monitor_service_pb2, types_pb2

from ..conftest import Refusal, Running, rest
from ..fakes import ScriptedBackend, reading
from ..messages import capture, generated, probe, request, selector, site_set, window
from ..streams import settled
from ..subscribers import by_id, by_label
from ..uploads import refusal_of
from ..watchers import Request, Watcher, opening, rule

pb = monitor_service_pb2
Code = grpc.StatusCode
SAMPLING = generation_pb2.Sampling(max_tokens=4)
WIDE = site_set(types_pb2.POINT_RESID_POST, layers=[0, 1])


def finished(events) -> list[generation_pb2.Finished]:
    return [event.finished for event in events if event.HasField("finished")]


async def test_a_watch_reads_every_token_of_others_requests(running: Running) -> None:
    watcher = await Watcher.open(running, opening(probe("a", sites=WIDE), probe("b")))
    table = watcher.events[0].opened.table
    named = [(one.probe_name, one.site.layer) for one in table.columns]
    assert named == [("a", 0), ("a", 1), ("b", 0)]
    await running.client.generate(
        request(request_id="r", sampling=SAMPLING, labels={"team": "red"})
    )
    ended = (await watcher.until("ended")).ended
    begun = watcher.of("begun")[0].begun
    assert (begun.request_id, begun.number, begun.sample_count) == ("r", 1, 1)
    assert (begun.prompt_token_count, dict(begun.labels)) == (3, {"team": "red"})
    expected = {p: [reading(column, p) for column in range(3)] for p in range(6)}
    assert watcher.read() == expected
    assert (ended.position_count, ended.dropped_position_count) == (6, 0)
    assert list(ended.finish_reasons) == [types_pb2.FINISH_REASON_LENGTH]
    for one in ended.summaries:
        values = [reading(one.column, p) for p in range(6)]
        assert one.position_count == 6
        assert one.max == np.float32(max(values))
        assert one.max_position == int(np.argmax(np.float32(values)))
        assert one.mean == pytest.approx(np.mean(values), rel=1e-6)
    assert [event.sequence for event in watcher.events[1:]] == list(range(1, len(watcher.events)))
    await watcher.rest()
    await settled(running)


async def test_a_small_watch_opens_while_a_large_plan_is_made(running: Running) -> None:
    end = threading.Event()
    PLANNER.submit(1 << 30, end.wait, 30)
    try:
        async with asyncio.timeout(20):
            watcher = await Watcher.open(running, opening(probe("a", sites=WIDE)))
    finally:
        end.set()
    await watcher.rest()


async def test_the_owner_gets_what_it_would_get_unwatched(running: Running) -> None:
    mine = probe("mine")
    mine.signals = True
    message = request(probes=[mine], rules=[rule(1e9, probe_name="mine")], sampling=SAMPLING)
    before = await running.client.generate(message)
    watcher = await Watcher.open(running, opening(probe("a", sites=WIDE), rules=[rule(1e9)]))
    after = await running.client.generate(message)
    plain = await running.client.generate(request(sampling=SAMPLING))

    def signals(events) -> list[bytes]:
        return [e.signals.values.inline for e in events if e.HasField("signals")]

    assert b"".join(signals(before)) == b"".join(signals(after)) != b""
    tables = [e.signal_table for e in after if e.HasField("signal_table")]
    assert [[c.probe_name for c in table.columns] for table in tables] == [["mine"]]
    assert not any(e.HasField("signal_table") or e.HasField("signals") for e in plain)
    assert [one.rule_name for one in after[-1].receipt.rules] == ["high"]
    assert not plain[-1].receipt.rules
    await watcher.until("ended", 2)
    # The watch's columns follow the request's own.
    assert watcher.read(1) == {p: [reading(1, p), reading(2, p)] for p in range(6)}
    assert watcher.read(2) == {p: [reading(0, p), reading(1, p)] for p in range(6)}


@pytest.mark.parametrize(
    ("filter", "selected"),
    [(by_id("a"), ["a"]), (by_label(team="red"), ["b"])],
)
async def test_only_selected_requests_are_read(running: Running, filter, selected) -> None:
    watcher = await Watcher.open(running, opening(filter=filter))
    await running.client.generate(request(request_id="a"))
    await running.client.generate(request(request_id="b", labels={"team": "red"}))
    await watcher.rest()
    assert [event.begun.request_id for event in watcher.of("begun")] == selected


async def test_probes_read_the_tokens_that_they_select(running: Running) -> None:
    last = probe("last", where=selector(window(-1)))
    later = probe("new", where=selector(generated()))
    watcher = await Watcher.open(running, opening(last, later))
    await running.client.generate(request(sampling=SAMPLING))
    await watcher.until("ended")
    read = watcher.read()
    assert sorted(read) == [2, 3, 4, 5]
    assert read[2][0] == reading(0, 2)
    assert np.isnan(read[2][1])
    assert all(np.isnan(read[p][0]) and read[p][1] == reading(1, p) for p in (3, 4, 5))


async def test_samples_are_told_apart(running: Running) -> None:
    watcher = await Watcher.open(running, opening())
    sampling = generation_pb2.Sampling(max_tokens=3, n=3, temperature=1)
    await running.client.generate(request(sampling=sampling))
    await watcher.until("ended")
    assert watcher.of("begun")[0].begun.sample_count == 3
    for sample in range(3):
        assert watcher.read(1, sample) == {p: [reading(0, p)] for p in range(5)}


async def test_rows_behind_the_last_token_do_not_count(starter) -> None:
    running = await starter(ScriptedBackend(overrun=3))
    watcher = await Watcher.open(running, opening())
    await running.client.generate(request(sampling=SAMPLING))
    ended = (await watcher.until("ended")).ended
    assert sorted(watcher.read()) == list(range(6))
    assert ended.position_count == 6


async def test_reports_of_firings_alone_and_of_summaries(starter) -> None:
    backend = ScriptedBackend(openness=lambda gate, position: float(position == 4))
    running = await starter(backend)
    fired = await Watcher.open(running, opening(rules=[rule(1.0)], report=pb.WATCH_REPORT_FIRED))
    summed = await Watcher.open(running, opening(report=pb.WATCH_REPORT_SUMMARY))
    await running.client.generate(request(sampling=SAMPLING))
    ends = [(await one.until("ended")).ended for one in (fired, summed)]
    assert sorted(fired.read()) == [4]
    (signals,) = [event.signals for event in fired.of("signals")]
    assert [(one.row, one.rule) for one in signals.firings] == [(0, 0)]
    assert not summed.of("signals")
    assert [end.summaries[0].position_count for end in ends] == [6, 6]


async def test_a_rule_of_a_watch_stops_a_request(starter) -> None:
    backend = ScriptedBackend(openness=lambda gate, position: float(position == 4))
    running = await starter(backend)
    stop = rule(1.0, stop={"label": "too high"})
    watcher = await Watcher.open(running, opening(rules=[stop]))
    events = await running.client.generate(request(sampling=generation_pb2.Sampling(max_tokens=50)))
    (end,) = finished(events)
    assert (end.reason, end.watch_label) == (types_pb2.FINISH_REASON_WATCH, "too high")
    (by,) = events[-1].receipt.watches
    assert (by.watch_id, list(by.stopped_samples)) == (watcher.name, [0])
    # The tokens at positions 3 and 4; the one that was sampled at 4 is withheld.
    assert end.token_count == 2
    ended = (await watcher.until("ended")).ended
    assert list(ended.finish_reasons) == [types_pb2.FINISH_REASON_WATCH]
    assert sorted(watcher.read()) == list(range(5))
    await watcher.rest()
    await settled(running)


async def test_a_sink_keeps_the_rows_of_a_request_that_a_watch_has_stopped(starter) -> None:
    backend = ScriptedBackend(openness=lambda gate, position: float(position == 4))
    running = await starter(backend, sinks=("mem=memory",))
    watcher = await Watcher.open(running, opening(rules=[rule(1.0, stop={"label": "too high"})]))
    rows = capture(sink=capture_pb2.SinkTarget(sink_name="mem"), inline=None)
    events = await running.client.generate(request(captures=[rows], sampling=SAMPLING))
    assert finished(events)[0].reason == types_pb2.FINISH_REASON_WATCH
    (captured,) = events[-1].receipt.captures
    assert [(site.row_count, site.dropped_row_count) for site in captured.sites] == [(5, 0)]
    await watcher.rest()
    await settled(running)


async def test_a_watcher_stops_a_request(starter) -> None:
    backend = ScriptedBackend(hold=asyncio.Event())
    running = await starter(backend)
    watcher = await Watcher.open(running, opening())
    call = running.client.generation.Generate(request(request_id="r", sampling=SAMPLING))
    await watcher.until("begun")
    stop = pb.WatchStop(update_id=1, request_id="r", label="enough")
    await watcher.say(stop=stop)
    assert (await watcher.until("applied")).applied.update_id == 1
    events = await rest(call)
    (end,) = finished(events)
    assert (end.reason, end.watch_label) == (types_pb2.FINISH_REASON_WATCH, "enough")
    (by,) = events[-1].receipt.watches
    assert (by.watch_id, list(by.stopped_samples)) == (watcher.name, [0])
    await watcher.say(stop=pb.WatchStop(update_id=2, request_id="r"))
    refused = (await watcher.until("refused")).refused
    refusal = Refusal.of_status(refused.status, Code.OK, "")
    assert (refused.update_id, refusal.reason) == (2, "REASON_REQUEST_NOT_FOUND")
    backend.hold.set()
    assert backend.jobs[0].plan.signals_wait is SignalsWait.FEW_STEPS
    await running.client.generate(request(sampling=SAMPLING))
    assert backend.jobs[-1].plan.signals_wait is SignalsWait.NEVER  # it may stop that one too
    await watcher.rest()


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"stop": pb.WatchStop(request_id="r")}, "REASON_INVALID_VALUE", "update_id"),
        (
            {"stop": pb.WatchStop(update_id=1, request_id="no id")},
            "REASON_INVALID_VALUE",
            "stop.request_id",
        ),
        (
            {"stop": pb.WatchStop(update_id=1, request_id="r", label="x" * 256)},
            "REASON_INVALID_VALUE",
            "stop.label",
        ),
        ({"steer": pb.WatchSteer(update_id=1, request_id="r")}, "REASON_NOT_SUPPORTED", "steer"),
    ],
)
async def test_a_refused_update_leaves_the_watch(running, fields, reason, field) -> None:
    watcher = await Watcher.open(running, opening())
    await watcher.say(**fields)
    status = (await watcher.until("refused")).refused.status
    refusal = Refusal.of_status(status, Code.OK, "")
    assert (refusal.reason, refusal.field) == (reason, field)
    await running.client.generate(request())
    await watcher.until("ended")


async def test_a_broken_watch_is_resumed_without_loss(running: Running) -> None:
    watcher = await Watcher.open(running, opening())
    await running.client.generate(request(sampling=SAMPLING))
    first = await watcher.until("begun")
    watcher.call.cancel()
    await running.client.generate(request(sampling=SAMPLING))
    again = await Watcher.resume(running, watcher.name, first.sequence)
    assert again.events[0].opened.next_sequence == first.sequence + 1
    await again.until("ended", 2)
    assert again.read(1) == again.read(2) == {p: [reading(0, p)] for p in range(6)}
    numbers = [event.sequence for event in again.events[1:]]
    assert numbers == list(range(first.sequence + 1, first.sequence + 1 + len(numbers)))
    await again.say(ack={"sequence": numbers[-1]})
    await again.rest()


async def test_a_slow_watcher_loses_the_oldest_and_is_told_how_many(running: Running) -> None:
    watcher = await Watcher.open(running, opening(credit=0, buffer_bytes=1 << 16))
    for _ in range(4):
        sampling = generation_pb2.Sampling(max_tokens=60)
        await running.client.generate(request(sampling=sampling))
    await settled(running)
    await watcher.say(credit={"bytes": 1 << 20})
    await watcher.until("ended", 4)
    lost: dict[int, list[int]] = {number: [] for number in range(1, 5)}
    for event in watcher.of("dropped"):
        for run in event.dropped.positions:
            lost[event.dropped.number] += range(run.start, run.start + run.count)
    assert lost[1]
    assert not lost[4]
    for event in watcher.of("ended"):
        ended = event.ended
        read = watcher.read(ended.number)
        assert sorted([*lost[ended.number], *read]) == list(range(62))
        assert min(read, default=62) > max(lost[ended.number], default=-1)
        assert ended.position_count == len(read)
        assert ended.dropped_position_count == len(lost[ended.number])
        assert ended.summaries[0].position_count == 62


async def test_signals_that_the_workers_lose_are_counted(starter) -> None:
    running = await starter(ScriptedBackend(lost_signals=frozenset({4})))
    watcher = await Watcher.open(running, opening())
    events = await running.client.generate(request(sampling=SAMPLING))
    assert not any(event.HasField("signals") for event in events)  # its client reads nothing
    ended = (await watcher.until("ended")).ended
    assert sorted(watcher.read()) == [0, 1, 2, 3, 5]
    assert (ended.position_count, ended.dropped_position_count) == (5, 1)


async def test_a_lost_watch_lets_its_requests_go_on(starter) -> None:
    running = await starter(resume_window=0.05)
    watcher = await Watcher.open(running, opening())
    watcher.call.cancel()
    while len(running.manager.watches):
        await asyncio.sleep(0.01)
    (end,) = finished(await running.client.generate(request(sampling=SAMPLING)))
    assert end.reason == types_pb2.FINISH_REASON_LENGTH


async def test_a_lost_watch_stops_its_requests_and_refuses_new_ones(starter) -> None:
    backend = ScriptedBackend(hold=asyncio.Event())
    running = await starter(backend, resume_window=0.05)
    watched = opening(filter=by_label(team="red"), on_lost=pb.WATCH_LOST_STOP)
    watcher = await Watcher.open(running, watched)
    red = request(sampling=SAMPLING, labels={"team": "red"})
    call = running.client.generation.Generate(red)
    await watcher.until("begun")
    watcher.call.cancel()
    (end,) = finished(await rest(call))
    assert (end.reason, end.watch_label) == (types_pb2.FINISH_REASON_WATCH, "the watch was lost")
    backend.hold.set()
    refusal = await refusal_of(running.client.generation.Generate(red).read())
    assert (refusal.code, refusal.reason) == (Code.UNAVAILABLE, "REASON_WATCH_LOST")
    assert f"the watch {watcher.name} of requests with the labels {{'team': 'red'}} selects" in (
        refusal.message
    )
    await running.client.generate(request(sampling=SAMPLING))  # another team's
    again = await Watcher.open(running, watched)
    await running.client.generate(red)
    await again.until("ended")
    await again.rest()
    await running.client.generate(red)  # the watch was closed, not lost
    await settled(running)


STOP = pb.WATCH_LOST_STOP


async def lost(running: Running, watcher: Watcher) -> None:
    """Returns once a watch without a reader is lost."""
    watcher.call.cancel()
    while len(running.manager.watches):
        await asyncio.sleep(0.01)


async def test_a_request_that_waits_while_its_watch_is_lost_is_refused(
    starter, monkeypatch
) -> None:
    running = await starter(resume_window=0.05)
    waiting, room = asyncio.Event(), asyncio.Event()
    prepare = running.manager._prepare

    async def wait_for_room(active) -> None:
        waiting.set()
        await room.wait()
        await prepare(active)

    monkeypatch.setattr(running.manager, "_prepare", wait_for_room)
    watcher = await Watcher.open(running, opening(on_lost=STOP))
    call = running.client.generation.Generate(request(sampling=SAMPLING))
    await waiting.wait()
    await lost(running, watcher)
    room.set()
    assert (await refusal_of(call.read())).reason == "REASON_WATCH_LOST"
    await settled(running)


async def test_a_watch_hears_of_a_request_whose_admission_began_before(
    starter, monkeypatch
) -> None:
    running = await starter()
    admitted, goes_on, admit = asyncio.Event(), asyncio.Event(), generation.admit

    async def slow_admit(*args):
        result = await admit(*args)
        admitted.set()
        await goes_on.wait()
        return result

    monkeypatch.setattr(generation, "admit", slow_admit)
    call = running.client.generation.Generate(request(sampling=SAMPLING, request_id="early"))
    await admitted.wait()
    watcher = await Watcher.open(running, opening())
    assert not watcher.events[0].opened.missed
    goes_on.set()
    await rest(call)
    ended = (await watcher.until("ended")).ended
    assert (ended.request_id, ended.missed_reason) == (
        "early",
        "its admission began before the watch",
    )


async def test_lost_watches_count_among_the_most(starter, monkeypatch) -> None:
    monkeypatch.setattr(registry, "SUBSCRIPTIONS", 2)
    running = await starter(resume_window=0.05)
    teams = [opening(filter=by_label(team=team), on_lost=STOP) for team in "abc"]
    for message in teams[:2]:
        await lost(running, await Watcher.open(running, message))
    call = running.client.monitor.Watch()
    await call.write(Request(open=teams[2]))
    refusal = await refusal_of(call.read())
    assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_QUEUE_FULL", "open.buffer_bytes")
    for team in "ab":
        refusal = await refusal_of(
            running.client.generation.Generate(request(labels={"team": team})).read()
        )
        assert refusal.reason == "REASON_WATCH_LOST"
    await (await Watcher.open(running, teams[0])).rest()
    await Watcher.open(running, teams[2])


async def test_the_order_of_the_ids_of_a_filter_does_not_count(starter) -> None:
    running = await starter(resume_window=0.05)
    first, second = (opening(filter=by_id(*ids), on_lost=STOP) for ids in ("ab", "ba"))
    await lost(running, await Watcher.open(running, first))
    await Watcher.open(running, second)
    await running.client.generate(request(request_id="a"))


async def test_many_firings_are_split_into_messages(starter, monkeypatch) -> None:
    monkeypatch.setattr(watch, "MESSAGE_FIRINGS", 256)
    backend = ScriptedBackend(openness=lambda gate, position: 1.0)
    running = await starter(backend)
    rules = [rule(1.0 + number, name=f"rule{number}") for number in range(16)]
    watcher = await Watcher.open(running, opening(rules=rules, report=pb.WATCH_REPORT_FIRED))
    prompt = types_pb2.TokenIds(ids=range(10, 60))
    await running.client.generate(request(token_ids=prompt, sampling=SAMPLING))
    await watcher.until("ended")
    counts = [len(event.signals.firings) for event in watcher.of("signals")]
    assert max(counts) == 256
    assert sum(counts) == 16 * 53
    assert watcher.read() == {p: [reading(0, p)] for p in range(53)}
    for event in watcher.of("signals"):
        signals = event.signals
        fired = {(one.row, one.rule) for one in signals.firings}
        assert fired == {(r, rule) for r in range(sum(signals.row_counts)) for rule in range(16)}


async def test_leaving_keeps_a_watch_and_ending_removes_it(running: Running) -> None:
    watcher = await Watcher.open(running, opening())
    await watcher.say(leave={})
    await watcher.rest()
    again = await Watcher.resume(running, watcher.name, 0)
    await again.say(leave={"end": True})
    await again.rest()
    point = pb.WatchResume(watch_id=watcher.name)
    call = running.client.monitor.Watch()
    await call.write(Request(open=pb.WatchOpen(resume=point)))
    refusal = await refusal_of(call.read())
    assert refusal.brief == (Code.NOT_FOUND, "REASON_WATCH_NOT_FOUND", "open.resume.watch_id")


async def test_requests_that_run_already_are_named_as_missed(starter) -> None:
    backend = ScriptedBackend(hold=asyncio.Event())
    running = await starter(backend)
    call = running.client.generation.Generate(request(request_id="early"))
    await call.read()
    watcher = await Watcher.open(running, opening())
    missed = watcher.events[0].opened.missed
    assert [(one.request_id, one.reason) for one in missed] == [
        ("early", "it began before the watch")
    ]
    backend.hold.set()
    await rest(call)
    await watcher.rest()
    assert not watcher.of("begun")


async def test_a_request_with_too_many_readings_is_missed_and_runs(running: Running) -> None:
    many = [probe(f"p{number}") for number in range(64)]  # as many steps as a site may have
    for one in many:
        one.signals = True
    watcher = await Watcher.open(running, opening())
    events = await running.client.generate(request(probes=many, sampling=SAMPLING))
    assert finished(events)[0].reason == types_pb2.FINISH_REASON_LENGTH
    ended = (await watcher.until("ended")).ended
    assert "64" in ended.missed_reason


async def test_what_a_watch_must_be_able_to_stop_is_refused_if_it_cannot(running) -> None:
    await Watcher.open(running, opening(rules=[rule(1.0, stop={})]))
    message = request(with_baseline=True, sampling=SAMPLING)
    refusal = await refusal_of(running.client.generation.Generate(message).read())
    assert refusal.brief == (
        Code.FAILED_PRECONDITION,
        "REASON_NOT_SUPPORTED",
        "with_baseline",
    )


async def test_a_request_whose_readings_do_not_fit_beside_a_watch_that_stops_is_refused(
    running: Running,
) -> None:
    many = [probe(f"p{number}") for number in range(64)]
    for one in many:
        one.signals = True
    watcher = await Watcher.open(running, opening(rules=[rule(1.0, stop={})]))
    message = request(probes=many, sampling=SAMPLING)
    refusal = await refusal_of(running.client.generation.Generate(message).read())
    assert refusal.brief == (Code.FAILED_PRECONDITION, "REASON_NOT_SUPPORTED", "")
    assert "64" in refusal.message
    await watcher.rest()
    assert not watcher.of("begun")
    assert not running.backend.jobs


@pytest.mark.parametrize(
    ("message", "reason", "field"),
    [
        (opening(filter=None), "REASON_MISSING_FIELD", "open.filter"),
        (pb.WatchOpen(filter={"every": {}}), "REASON_MISSING_FIELD", "open.probes"),
        (opening(probe("no name")), "REASON_INVALID_VALUE", "open.probes[0].name"),
        (opening(probe("a"), probe("a")), "REASON_INVALID_VALUE", "open.probes[1].name"),
        (opening(report=9), "REASON_UNKNOWN_ENUM", "open.report"),
        (opening(on_lost=9), "REASON_UNKNOWN_ENUM", "open.on_lost"),
        (opening(buffer_bytes=1), "REASON_INVALID_VALUE", "open.buffer_bytes"),
        (
            opening(rules=[rule(1.0, probe_name="z")]),
            "REASON_INVALID_VALUE",
            "open.rules[0].conditions[0].probe_name",
        ),
        (
            opening(rules=[rule(1.0, stop={"all_samples": True})]),
            "REASON_INVALID_VALUE",
            "open.rules[0].stop.all_samples",
        ),
        (
            pb.WatchOpen(resume={"watch_id": "x"}, buffer_bytes=1 << 20),
            "REASON_INVALID_VALUE",
            "open.buffer_bytes",
        ),
        (opening(filter=by_id()), "REASON_INVALID_VALUE", "open.filter.requests.request_ids"),
    ],
)
async def test_an_invalid_opening_is_refused_by_field(running, message, reason, field) -> None:
    call = running.client.monitor.Watch()
    await call.write(Request(open=message))
    refusal = await refusal_of(call.read())
    assert (refusal.reason, refusal.field) == (reason, field)


async def test_watches_share_the_memory_of_subscriptions(starter) -> None:
    running = await starter(subscriptions_bytes=1 << 20)
    one = await Watcher.open(running, opening(buffer_bytes=900 << 10))
    call = running.client.monitor.Watch()
    await call.write(Request(open=opening(buffer_bytes=200 << 10)))
    refusal = await refusal_of(call.read())
    assert refusal.brief == (Code.RESOURCE_EXHAUSTED, "REASON_QUEUE_FULL", "open.buffer_bytes")
    await one.rest()
    await Watcher.open(running, opening(buffer_bytes=200 << 10))


async def test_watches_that_are_opened_together_share_the_memory(starter, monkeypatch) -> None:
    running = await starter(subscriptions_bytes=1 << 20)
    loading, loaded = asyncio.Event(), asyncio.Event()
    ensure = running.manager.worker_vectors.ensure

    async def slow_ensure(vectors) -> None:
        loading.set()
        await loaded.wait()
        await ensure(vectors)

    monkeypatch.setattr(running.manager.worker_vectors, "ensure", slow_ensure)
    message = opening(buffer_bytes=600 << 10)
    first = asyncio.ensure_future(Watcher.open(running, message))
    await loading.wait()
    call = running.client.monitor.Watch()
    await call.write(Request(open=message))
    loaded_later = asyncio.get_running_loop().call_later(0.2, loaded.set)
    refusal = await refusal_of(call.read())
    assert refusal.reason == "REASON_QUEUE_FULL"
    loaded_later.cancel()
    loaded.set()
    await (await first).rest()


async def test_a_server_that_drains_ends_watches_once_all_was_sent(starter) -> None:
    running = await starter()
    watcher = await Watcher.open(running, opening())
    await running.client.generate(request(sampling=SAMPLING))
    drain = asyncio.ensure_future(running.manager.drain(5.0))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await watcher.until("nothing")
    assert Refusal.of(caught.value).reason == "REASON_DRAINING"
    assert len(watcher.of("ended")) == 1
    await drain


async def test_a_model_without_gates_is_not_watched(starter) -> None:
    backend = ScriptedBackend()
    backend.info = replace(backend.info, pipeline_parallel=2)
    running = await starter(backend)
    call = running.client.monitor.Watch()
    await call.write(Request(open=opening()))
    refusal = await refusal_of(call.read())
    assert (refusal.reason, refusal.field) == ("REASON_NOT_SUPPORTED", "open.probes")
