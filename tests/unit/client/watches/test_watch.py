"""Watches of both clients on a real server with a scripted engine."""

import asyncio
import gc
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from google.protobuf.message import Message

import rheostat
from rheostat import _notebook
from rheostat._connection.calls import BidiCall
from rheostat._watches import state
from rheostat_wire.v1.monitor_service_pb2 import WatchRequest

from ...server.fakes import WIDTH, ScriptedBackend, reading
from ..notebooks import KERNEL, notebook
from ..rows_server import RowsServer, inner, until

ALONG = rheostat.inline(np.ones((1, WIDTH), np.float32))
MOOD = rheostat.probe(ALONG, points="resid_post", layers=0, name="mood")
WIDE = rheostat.probe(ALONG, points="resid_post", layers=[0, 1], name="wide")
NEW = rheostat.probe(ALONG, points="resid_post", layers=1, where="generated", name="new")
RED = {"team": "red"}


def high(position: int) -> ScriptedBackend:
    """An engine whose rules fire at a position."""
    return ScriptedBackend(openness=lambda gate, p: float(p == position))


def events_of(watch, count: int = 1) -> list:
    """The events until so many requests have ended."""
    events = []
    while count:
        events.append(next(watch))
        count -= isinstance(events[-1], rheostat.WatchedRequestEnded)
    return events


def table_of(events) -> rheostat.WatchTable:
    table = rheostat.WatchTable()
    for event in events:
        table.add(event)
    return table


def test_readings_come_by_request_and_probe(running: RowsServer, subscriber) -> None:
    with subscriber.watch(probes=[WIDE, NEW], labels=RED) as watch:
        named = [(one.probe, one.site) for one in watch.columns]
        assert named == [
            ("wide", ("resid_post", 0)),
            ("wide", ("resid_post", 1)),
            ("new", ("resid_post", 1)),
        ]
        running.generate("a", labels=RED)
        running.generate("b", labels={"team": "blue"})
        running.generate("c", labels=RED, tokens=5)
        events = events_of(watch, 2)
        assert watch.missed == {}
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    begun = [event for event in events if isinstance(event, rheostat.WatchedRequestBegun)]
    assert [(one.request_id, one.labels, one.sample_count) for one in begun] == [
        ("a", RED, 1),
        ("c", RED, 1),
    ]
    assert begun[0].prompt_token_count == 3
    table = table_of(events)
    assert list(table) == [("a", 0), ("c", 0)]
    for name, rows in (("a", 5), ("c", 7)):
        readings = table[name, 0]
        assert readings.positions.tolist() == list(range(rows))
        assert readings[WIDE].tolist() == [[reading(0, p), reading(1, p)] for p in range(rows)]
        assert np.isnan(readings["new"][:3]).all()
        assert readings[NEW][3:].tolist() == [reading(2, p) for p in range(3, rows)]
        assert (readings.firings, readings.dropped.tolist()) == ({}, [])
        ended = table.ended[name]
        assert (ended.position_count, ended.dropped_position_count) == (rows, 0)
        assert ended.finish_reasons == ("length",)
        summary = ended.summary(NEW)
        assert (summary.position_count, summary.max_position) == (rows - 3, rows - 1)
        assert summary.max == reading(2, rows - 1)
        assert summary.mean == np.mean([reading(2, p) for p in range(3, rows)])
    with pytest.raises(KeyError, match="there are those of new, wide"):
        table["a", 0]["sad"]
    with pytest.raises(KeyError, match="there are those of new, wide"):
        table.ended["a"].summary("sad")
    assert running.ask_watches(len) == 0


def test_a_rule_of_a_watch_stops_a_request(starter, kind) -> None:
    running = starter(high(4))
    rule = rheostat.Rule("grim", MOOD.above(1), rheostat.Stop("too grim"))
    with kind(running.target).watch(rules=rule, every=True) as watch:
        out = running.generate("a", tokens=50)
        events = events_of(watch)
    assert (out.finish_reason, out.samples[0].label) == ("watch", "too grim")
    readings = table_of(events)["a", 0]
    assert readings.positions.tolist() == list(range(5))
    assert {name: at.tolist() for name, at in readings.firings.items()} == {"grim": [4]}
    assert "fired={'grim': 1}" in repr(readings)


@pytest.mark.parametrize(("report", "positions"), [("fired", [4]), ("summary", [])])
def test_fewer_tokens_are_reported_if_asked_for(starter, kind, report, positions) -> None:
    running = starter(high(4))
    rule = rheostat.Rule("seen", MOOD.above(1), rheostat.Observe())
    with kind(running.target).watch(rules=rule, every=True, report=report) as watch:
        running.generate("a", tokens=4)
        table = table_of(events_of(watch))
    found = table["a", 0].positions.tolist() if table else []
    assert found == positions
    assert table.ended["a"].summary(MOOD).position_count == 6


def test_a_watcher_stops_a_request_and_gets_an_answer(starter, kind) -> None:
    running = starter(ScriptedBackend(hold=asyncio.Event()))
    with kind(running.target).watch(probes=MOOD, requests="a") as watch:
        stream = running.engine.stream([10, 11, 12], request_id="a", max_tokens=9)
        assert isinstance(next(watch), rheostat.WatchedRequestBegun)
        first = watch.stop("a", "enough")
        assert stream.result().samples[0].label == "enough"
        second = watch.stop("a")
        answers = []
        while len(answers) < 2:
            event = next(watch)
            if isinstance(event, rheostat.UpdateApplied | rheostat.UpdateRefused):
                answers.append(event)
        third = watch.stop("no id")
        while not isinstance(refused := next(watch), rheostat.UpdateRefused):
            pass
    applied, gone = answers
    assert isinstance(applied, rheostat.UpdateApplied)
    assert isinstance(gone, rheostat.UpdateRefused)
    assert [applied.update_id, gone.update_id, refused.update_id] == [first, second, third]
    assert isinstance(gone.error, rheostat.NotFound)
    assert (gone.reason, refused.field) == ("REASON_REQUEST_NOT_FOUND", "stop.request_id")
    with pytest.raises(rheostat.Refused, match="the watch is closed"):
        watch.stop("a")


def test_a_watcher_changes_the_gain_of_a_request(starter, kind) -> None:
    running = starter(ScriptedBackend(hold=asyncio.Event(), hold_from=2))
    with kind(running.target).watch(probes=MOOD, every=True, steers=True) as watch:
        stream = running.engine.stream(
            [10, 11, 12],
            request_id="a",
            steering=2 * ALONG.at(points="resid_post", layers=0),
            max_tokens=6,
            temperature=0,
        )
        until(lambda: set(running.backend.positions.values()) == {4})
        sent = watch.gain("a", 0.5)
        while not isinstance(applied := next(watch), rheostat.UpdateApplied):
            pass
        running.do(running.backend.hold.set)
        receipt = stream.result().receipt
        with pytest.raises(rheostat.InvalidRequest):
            watch.gain("a", "half")
    assert (applied.update_id, applied.first_positions) == (sent, {0: 4})
    assert receipt.interventions[0].last_gain == 0.5
    assert [one.watch_id for one in receipt.watches] == [watch.id]


def test_gains_that_are_set_together_are_sent_in_one_message(starter, kind, monkeypatch) -> None:
    made: list[int] = []
    join = state.join_gains

    def counted(requests: Sequence[Message]) -> Iterator[Message]:
        for message in join(requests):
            made.append(len(message.steer_batch.steers) or int(message.HasField("steer")))
            yield message

    monkeypatch.setattr(
        state, "_CALL", BidiCall(state._CALL.path, state._Response, join_requests=counted)
    )
    running = starter(ScriptedBackend(hold=asyncio.Event(), hold_from=2))
    push = ALONG.at(points="resid_post", layers=0)
    with kind(running.target).watch(probes=MOOD, every=True, steers=True) as watch:
        stream = running.engine.stream(
            [10, 11, 12], request_id="a", steering=push, max_tokens=6, temperature=0
        )
        until(lambda: set(running.backend.positions.values()) == {4})
        sent: list[int] = []

        def all_are_made() -> bool:
            return sum(made) == len(sent)

        def send(own: rheostat.Watch | rheostat.aio.Watch) -> list[int]:
            return [own.gain("a", number / 200) for number in range(200)]

        for _ in range(5):  # a sender that is quick finds only one gain at a time
            # The asyncio client sets all of them in its loop, so it sends nothing in between.
            driven = hasattr(watch, "inner")
            sent += watch.thread.do(lambda: send(watch.inner)) if driven else send(watch)
            until(all_are_made)
            if max(made) > 1:
                break
        sent.append(watch.gain("gone", 0.5))
        answers = {}
        while len(answers) < len(sent):
            event = next(watch)
            if isinstance(event, rheostat.UpdateApplied | rheostat.UpdateRefused):
                answers[event.update_id] = isinstance(event, rheostat.UpdateApplied)
        running.do(running.backend.hold.set)
        assert stream.result().receipt.interventions[0].last_gain == pytest.approx(199 / 200)
    assert [answers.pop(update) for update in sent[:-1]] == [True] * (len(sent) - 1)
    assert answers.pop(sent[-1]) is False
    assert not answers
    assert sum(made) == len(sent)
    assert max(made) > 1


def test_only_consecutive_gains_are_joined() -> None:
    def steer(number: int, **change: object) -> WatchRequest:
        return WatchRequest(steer={"update_id": number, "request_id": "a", **change})

    gains = [steer(number, gain={"factor": 0.5}) for number in range(1, 5)]
    layer, stop = steer(5, layer={}), WatchRequest(stop={"update_id": 6, "request_id": "a"})
    joined = [*state.join_gains([*gains[:3], layer, stop, gains[3]])]
    assert [one.WhichOneof("action") for one in joined] == ["steer_batch", "steer", "stop", "steer"]
    assert list(joined[0].steer_batch.steers) == [one.steer for one in gains[:3]]
    many = [*state.join_gains(gains[:1] * 82)]
    assert [len(one.steer_batch.steers) for one in many] == [40, 40, 2]


def test_a_watcher_adds_a_layer_to_the_steering_of_a_request(starter, kind) -> None:
    running = starter(ScriptedBackend(hold=asyncio.Event(), hold_from=2))
    added = ALONG.at(points="resid_post", layers=0)
    with kind(running.target).watch(probes=MOOD, every=True, steers=True) as watch:
        stream = running.engine.stream(
            [10, 11, 12], request_id="a", steering=2 * added, max_tokens=6, temperature=0
        )
        until(lambda: set(running.backend.positions.values()) == {4})
        sent = [watch.steer("a", [3 * added, added]), watch.steer("a", None)]
        answers = []
        while len(answers) < 2:
            event = next(watch)
            if isinstance(event, rheostat.UpdateApplied):
                answers.append(event.update_id)
        running.do(running.backend.hold.set)
        receipt = stream.result().receipt
        with pytest.raises(rheostat.InvalidRequest):
            watch.steer("a", "joy")
    assert answers == sent
    (by,) = receipt.watches
    assert [one.layer_size for one in by.changes] == [2, 0]


def test_an_update_whose_answer_was_lost_is_sent_again(starter, kind) -> None:
    """The connection breaks as soon as the stop is sent; it still gets one answer."""
    running = starter(ScriptedBackend(hold=asyncio.Event()))
    client = kind(running.target)
    with client.watch(probes=MOOD, requests="a") as watch:
        with running.engine.stream([10, 11, 12], request_id="a", max_tokens=9) as stream:
            assert isinstance(next(watch), rheostat.WatchedRequestBegun)
            client.cut(watch)
            sent = watch.stop("a", "enough")
            assert stream.result().samples[0].label == "enough"
        watch.finish()
        events = list(watch)
    answers = [
        event
        for event in events
        if isinstance(event, rheostat.UpdateApplied | rheostat.UpdateRefused)
    ]
    assert [one.update_id for one in answers] == [sent]
    assert isinstance(events[-1], rheostat.WatchedRequestEnded) or answers


def test_updates_whose_answers_nobody_reads_have_a_limit(running, subscriber, monkeypatch) -> None:
    monkeypatch.setattr(state, "_MOST_UPDATES", 3)
    with subscriber.watch(probes=MOOD, every=True) as watch:
        for _ in range(3):
            watch.stop("a")
        with pytest.raises(rheostat.ResourceExhausted, match="read the watch's events") as caught:
            watch.stop("a")
        assert caught.value.reason == "REASON_QUEUE_FULL"
        assert isinstance(next(watch), rheostat.UpdateRefused)
        watch.stop("a")


def test_updates_that_get_no_answer_are_refused_once_the_watch_has_ended(
    running, subscriber
) -> None:
    with subscriber.watch(probes=MOOD, every=True) as watch:
        worker = watch._worker
        silent = worker._responses.send
        worker._responses.send = lambda request: request is None and silent(request)
        sent = watch.stop("a")
        watch.finish()
        (event,) = list(watch)
    assert (event.update_id, str(event.error)) == (sent, "the watch has ended")
    assert isinstance(event.error, rheostat.NotFound)


def test_a_slow_watcher_is_told_what_it_lost(running: RowsServer, subscriber) -> None:
    with subscriber.watch(probes=MOOD, every=True, buffer_bytes=1 << 16, credit=1) as watch:
        for number in range(4):
            running.generate(f"r{number}", tokens=60)
        watch._state._window = 1 << 20
        events = events_of(watch, 4)
    table = table_of(events)
    lost = [event for event in events if isinstance(event, rheostat.SignalsDropped)]
    assert lost
    assert lost[0].request_id == "r0"
    for number in range(4):
        readings = table[f"r{number}", 0]
        together = sorted([*readings.positions.tolist(), *readings.dropped.tolist()])
        assert together == list(range(62))
        ended = table.ended[f"r{number}"]
        assert ended.dropped_position_count == len(readings.dropped)


def test_requests_that_run_already_are_missed(starter, kind) -> None:
    running = starter(ScriptedBackend(hold=asyncio.Event()))
    with running.engine.stream([10], request_id="early", max_tokens=2) as stream:
        next(stream)
        with kind(running.target).watch(probes=MOOD, every=True) as watch:
            assert watch.missed == {"early": "it began before the watch"}


def test_samples_are_told_apart(running: RowsServer, subscriber) -> None:
    with subscriber.watch(probes=MOOD, every=True) as watch:
        running.engine.generate([10, 11, 12], request_id="a", n=3, max_tokens=3)
        table = table_of(events_of(watch))
    assert list(table) == [("a", 0), ("a", 1), ("a", 2)]
    for key in table:
        assert table[key][MOOD].tolist() == [reading(0, p) for p in range(5)]
    assert {one.sample for one in table.ended["a"].summaries} == {0, 1, 2}
    table.drop("a")
    assert not table
    assert not table.ended


def test_a_table_becomes_a_dataframe(starter, kind) -> None:
    running = starter(high(4))
    rule = rheostat.Rule("seen", MOOD.above(1), rheostat.Observe())
    with kind(running.target).watch(probes=WIDE, rules=rule, every=True) as watch:
        running.generate("a", tokens=4)
        running.generate("b", tokens=2)
        frame = table_of(events_of(watch, 2)).to_dataframe()
    names = ["wide resid_post[0]", "wide resid_post[1]", "mood"]
    assert list(frame) == ["request_id", "sample", "position", *names, "fired"]
    assert frame["request_id"].tolist() == ["a"] * 6 + ["b"] * 4
    assert frame["position"].tolist() == [*range(6), *range(4)]
    assert frame[names[1]].tolist() == [reading(1, p) for p in [*range(6), *range(4)]]
    assert frame["fired"].tolist() == ["", "", "", "", "seen", ""] + [""] * 4
    assert list(rheostat.WatchTable().to_dataframe()) == [
        "request_id",
        "sample",
        "position",
        "fired",
    ]


@pytest.mark.parametrize("name", ["request_id", "sample", "position", "fired"])
def test_a_probe_named_as_a_column_of_the_dataframe_keeps_its_readings(running, kind, name) -> None:
    probe = rheostat.probe(ALONG, points="resid_post", layers=0, name=name)
    with kind(running.target).watch(probes=probe, every=True) as watch:
        running.generate("a", tokens=2)
        frame = table_of(events_of(watch)).to_dataframe()
    column = f"{name} resid_post[0]"
    assert list(frame) == ["request_id", "sample", "position", column, "fired"]
    assert frame[column].tolist() == [reading(0, p) for p in range(4)]


def test_a_table_is_drawn(starter, kind, tmp_path) -> None:
    running = starter(high(4))
    rule = rheostat.Rule("seen", MOOD.above(1), rheostat.Observe())
    with kind(running.target).watch(probes=WIDE, rules=rule, every=True) as watch:
        running.generate("a", tokens=4)
        running.generate("b", tokens=4)
        table = table_of(events_of(watch, 2))
    file = tmp_path / "readings.png"
    figure = table.plot(file, probe=MOOD)
    (axes,) = figure.axes
    curve, dots, *_ = axes.lines
    assert curve.get_label() == "a/0 mood"
    assert curve.get_xdata().tolist() == list(range(6))
    assert curve.get_ydata().tolist() == [reading(2, p) for p in range(6)]
    assert dots.get_xdata().tolist() == [4]
    assert len(axes.lines) == 4
    assert len(table.plot().axes[0].lines) == 12
    assert file.read_bytes().startswith(b"\x89PNG")
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_a_table_calls_a_function_while_it_grows(starter, kind, monkeypatch) -> None:
    running = starter()
    seen: list[tuple[list[str], int]] = []

    def note(table: rheostat.WatchTable) -> None:
        seen.append(([name for name, _ in table], sum(len(table[key]) for key in table)))

    table = rheostat.WatchTable(live=note)
    monkeypatch.setattr(_notebook, "_INTERVAL", 0.0)
    monkeypatch.setattr(_notebook, "_PAUSE", 0.0)
    with kind(running.target).watch(probes=MOOD, every=True) as watch:
        running.generate("a", tokens=4)
        running.generate("b", tokens=4)
        for event in events_of(watch, 2):
            table.add(event)
    assert seen[0][0] == ["a"]
    assert seen[-1] == (["a", "b"], 12)


def test_a_notebook_shows_the_readings_that_came_last(starter, kind, monkeypatch) -> None:
    pytest.importorskip("matplotlib")
    running = starter()
    output = notebook(monkeypatch, KERNEL)
    table = rheostat.WatchTable(live=True)
    with kind(running.target).watch(probes=MOOD, every=True) as watch:
        for number in range(14):
            running.generate(f"r{number}", tokens=2)
        for event in events_of(watch, 14):
            table.add(event)
    assert all(one._repr_png_().startswith(b"\x89PNG") for one in output.shown)
    assert output.shown[-1]._repr_html_() is None
    figure = table._figure([*table][-12:])
    assert [line.get_label() for line in figure.axes[0].lines[::2]] == [
        f"r{number}/0 mood" for number in range(2, 14)
    ]
    assert output.shown[-1]._repr_png_() == _notebook.png(figure)


def test_outside_of_a_notebook_a_table_shows_nothing(monkeypatch) -> None:
    output = notebook(monkeypatch, None)
    rheostat.WatchTable(live=True).add(rheostat.WatchedRequestEnded(1, "a", 0, 0, ()))
    assert output.shown == []
    assert rheostat.WatchTable().plot().axes[0].lines[:] == []


@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"probes": MOOD}, "open.filter"),
        ({"probes": MOOD, "every": True, "labels": RED}, "open.filter"),
        ({"probes": MOOD, "labels": {}}, "open.filter.labels.labels"),
        ({"probes": MOOD, "requests": [1]}, "open.filter.requests.request_ids[0]"),
        ({"every": True}, "open.probes"),
        ({"probes": "mood", "every": True}, "probes[0]"),
        ({"probes": MOOD, "every": True, "report": "all"}, "open.report"),
        ({"probes": MOOD, "every": True, "on_lost": "die"}, "open.on_lost"),
        ({"probes": MOOD, "every": True, "buffer_bytes": 0}, "open.buffer_bytes"),
        ({"probes": MOOD, "every": True, "buffer_bytes": 1}, "open.buffer_bytes"),
        ({"probes": MOOD, "every": True, "credit": 0}, "credit"),
    ],
)
def test_invalid_arguments_are_named(subscriber, options, path) -> None:
    with pytest.raises((rheostat.InvalidRequest, rheostat.Refused)) as raised:
        subscriber.watch(**options)
    assert raised.value.path == path


def test_an_unknown_option_is_no_option(running: RowsServer) -> None:
    with pytest.raises(TypeError, match="did you mean 'labels'"):
        running.engine.watch(label=RED)


def test_closing_ends_the_loop_and_the_watch(running: RowsServer, subscriber) -> None:
    with subscriber.watch(probes=MOOD, every=True) as watch:
        assert repr(inner(watch)) == f"Watch({watch.id!r})"
        running.generate("a")
        next(watch)
    assert running.ask_watches(len) == 0
    with pytest.raises(StopIteration):
        next(watch)


def test_a_watch_that_is_forgotten_is_left_to_the_server(starter, kind) -> None:
    running = starter(resume_window=0.2)
    watch = kind(running.target).watch(probes=MOOD, every=True)
    assert running.ask_watches(len) == 1
    del watch
    gc.collect()
    until(lambda: running.ask_watches(len) == 0)
