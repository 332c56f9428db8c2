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


def signals_event(first: int, readings: list[float]) -> rheostat.WatchedSignals:
    return rheostat.WatchedSignals(
        1,
        (),
        (),
        ("a",),
        np.array([0]),
        np.array([first]),
        np.array([len(readings)]),
        np.array(readings, np.float32)[:, None],
        np.zeros((0, 2), np.int64),
    )


def test_a_watch_answers_each_reading_of_a_generated_token_with_another_gain() -> None:
    sent: list[tuple[str, float]] = []

    def gain(request: str, factor: float) -> int:
        sent.append((request, factor))
        return len(sent)

    watcher = Watcher("label")
    watcher.take(rheostat.WatchedRequestBegun(1, "a", {}, 1, 2), gain)
    assert [request for request, _ in sent] == ["a"]
    watcher.take(signals_event(0, [np.nan, np.nan]), gain)  # prompt tokens
    watcher.take(signals_event(2, [1.0]), gain)  # the first gain waits
    assert len(sent) == 1
    watcher.take(rheostat.UpdateApplied(1, {0: 3}), gain)
    watcher.take(signals_event(3, [1.0]), gain)
    (_, first), (request, second) = sent
    assert request == "a"
    assert second != first
    watcher.take(rheostat.WatchedRequestEnded(2, "a", 4, 0, ()), gain)
    assert not watcher.has_all(1)
    watcher.take(rheostat.UpdateApplied(2, {0: 5}), gain)
    assert watcher.answers["a"].positions == [2]
    assert watcher.has_all(1)
    with pytest.raises(Broken, match="no room"):
        watcher.take(rheostat.WatchedRequestEnded(3, "b", 0, 0, (), (), "no room"), gain)


def test_a_reading_whose_gain_is_refused_gets_none() -> None:
    def full(request: str, factor: float) -> int:
        raise rheostat.ResourceExhausted("4096 updates have answers that were not read")

    watcher = Watcher("label")
    watcher.take(rheostat.WatchedRequestBegun(1, "a", {}, 1, 2), lambda request, factor: 1)
    watcher.take(rheostat.UpdateApplied(1, {0: 3}), full)
    watcher.take(signals_event(3, [1.0]), full)
    watcher.take(rheostat.WatchedRequestEnded(2, "a", 4, 0, ()), full)
    assert watcher.answers["a"].refused == 1
    assert watcher.has_all(1)
