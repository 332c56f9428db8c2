"""What the latency benchmark counts, and that it notices a change that acts elsewhere."""

import os
import sys
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest

import rheostat
from rheostat_bench import controllers, latency
from rheostat_bench.latency import (
    Answers,
    Broken,
    Stream,
    Watcher,
    gate_latencies,
    lag,
    percentile,
    summary,
)
from rheostat_engine import CONTROLLERS_GROUP
from rheostat_wire.v1 import monitor_service_pb2


def bools(text: str) -> np.ndarray:
    return np.array([letter == "x" for letter in text])


@pytest.mark.parametrize(
    ("fired", "acted", "found"),
    [
        (".xx.x", ".xx.x", [0, 0]),
        (".xx.x.", "..x..x", [1, 1]),
        ("xx.x", "xx.x", [0]),  # row 0 may have been open before
        ("....", "....", []),
    ],
)
def test_a_gate_is_late_by_the_rows_from_its_onset(fired, acted, found) -> None:
    assert gate_latencies(bools(fired), bools(acted)) == found


def test_a_gate_that_never_acts_is_no_latency() -> None:
    with pytest.raises(Broken):
        gate_latencies(bools(".x"), bools(".."))


@pytest.mark.parametrize("rows", [0, 1, 2, 8])
def test_the_lag_of_a_controller_is_that_of_all_its_gains(rows: int) -> None:
    readings = np.random.default_rng(0).normal(size=60).astype(np.float32)
    readings[0] = np.nan
    named = controllers.stepped(readings)
    assert named[0] == 1
    assert len(set(named.tolist())) > 10
    acted = np.concatenate([np.full(rows, 0.03), named])[:60]
    assert lag(named, acted.astype(np.float32)) == rows
    acted[40] += 1 / 16
    with pytest.raises(Broken):
        lag(named, acted.astype(np.float32))


def test_controllers_of_the_benchmarks_are_found_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "before")
    controllers.install(tmp_path / "plugins")
    for name, made in controllers.PLUGINS.items():
        (point,) = entry_points(group=CONTROLLERS_GROUP, name=name)
        assert point.load() is made
    assert os.environ["PYTHONPATH"] == f"{tmp_path / 'plugins'}{os.pathsep}before"


def test_percentiles_are_numbers_that_occur() -> None:
    counts = Counter([2] * 98 + [3, 9])
    assert [percentile(counts, share) for share in (0.5, 0.98, 0.99, 1)] == [2, 2, 3, 9]


def signals(readings: list[float]) -> rheostat.Signals:
    columns = (rheostat.SignalColumn("after", None),)
    values = latency._DOSE * np.array(readings, np.float32)[:, None]
    return rheostat.Signals(0, columns, np.arange(len(readings)), values=values)


def test_answers_are_compared_with_what_was_read_behind_the_site() -> None:
    answers = Answers()
    for update, (position, factor) in enumerate([(-1, 0.0), (1, 0.25), (2, 0.5)]):
        answers.sent(update, position, factor)
        answers.answered(update, position + 2)
    assert answers.positions == [2, 2]
    answers.check(signals([1, 0, 0, 0.25, 0.5, 0.5]))
    with pytest.raises(Broken):
        answers.check(signals([1, 0, 0, 0, 0.5, 0.5]))


def test_a_summary_has_the_histogram_of_all_streams() -> None:
    found = summary([Stream([2, 3], [1.0], 5.0), Stream([2], [3.0], 7.0)])
    assert found["positions"] == {"2": 2, "3": 1}
    assert (found["p50"], found["p99"], found["answer_ms"]) == (2, 3, 2.0)


def signals_event(sequence: int, number: int, first: int, readings: list[float]):
    event = monitor_service_pb2.WatchResponse(sequence=sequence)
    event.signals.numbers.append(number)
    event.signals.first_positions.append(first)
    event.signals.row_counts.append(len(readings))
    event.signals.values.inline = np.array(readings, "<f4").tobytes()
    return event


def test_a_watch_answers_each_reading_of_a_generated_token_with_another_gain() -> None:
    watcher = Watcher("label")
    begun = monitor_service_pb2.WatchResponse(sequence=1)
    begun.begun.request_id, begun.begun.number = "a", 7
    (first,) = watcher.take(begun)
    assert first.steer.request_id == "a"
    assert list(watcher.take(signals_event(2, 7, 0, [np.nan, np.nan]))) == []  # prompt tokens
    assert list(watcher.take(signals_event(3, 7, 2, [1.0]))) == []  # the first gain waits
    applied = monitor_service_pb2.WatchResponse()
    applied.applied.update_id = first.steer.update_id
    applied.applied.first_positions.add(sample=0, position=3)
    assert list(watcher.take(applied)) == []
    (second,) = watcher.take(signals_event(4, 7, 3, [1.0]))
    assert second.steer.gain.factor != first.steer.gain.factor
    applied.applied.update_id = second.steer.update_id
    applied.applied.first_positions[0].position = 5
    assert list(watcher.take(applied)) == []
    assert watcher.answers["a"].positions == [2]
    (ack,) = watcher.take(signals_event(63, 7, 4, [np.nan]))
    assert ack.ack.sequence == 63
