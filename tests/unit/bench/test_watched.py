"""The benchmark of watches: its figures, its reader, and the order of its turns."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import rheostat
from rheostat_bench.tables import tables
from rheostat_bench.watched import (
    CONTROLLER,
    EVERY,
    GAINS,
    REFERENCES,
    STEERED,
    SUMMARIES,
    UNWATCHED,
    Read,
    Stream,
    Turn,
    figures,
    measure,
    probes,
    read_events,
    summary,
)

from .pages import DOCS, PAGES


def test_cpu_time_is_that_of_the_servers_own_processes() -> None:
    streams = [
        Stream(10.0, 10.5, 12.5, 5, [0.5, 0.5, 0.5, 0.5]),
        Stream(11.0, 12.0, 14.0, 3, [0.5, 1.5]),
    ]
    cpu = {
        "server, main thread": 1.0,
        "server, other threads": 0.5,
        "front ends, main thread": 0.25,
        "VLLM::EngineCor, main thread": 3.0,
    }
    read = Read(positions=7, lost=2, gains=10, cpu_s=1.0)
    assert figures(streams, read, cpu, 5.0, 64) == Turn(
        tokens_per_s=2.0,
        per_token_ms=750.0,
        p99_ms=1500.0,
        server_cores=0.35,
        engine_cores=0.6,
        reader_cores=0.2,
        readings_per_s=7 * 64 / 5,
        lost=2,
        gains_per_s=2.0,
    )


@pytest.mark.parametrize("layers", [4, 36])
def test_a_position_has_64_readings(layers: int) -> None:
    wanted = probes(8, layers)
    assert sum(len(probe.to_wire("").sites.list.layers) for probe in wanted) == 64
    assert len({probe.name for probe in wanted}) == 16


def signals(*requests: str) -> rheostat.WatchedSignals:
    rows = len(requests)
    ones = np.ones(rows, np.int64)
    values = np.zeros((rows, 1), np.float32)
    return rheostat.WatchedSignals(
        1, (), (), requests, ones - 1, ones, ones, values, np.zeros((0, 2), np.int64)
    )


def ended(request: str, *, dropped: int = 0, missed: str = "") -> rheostat.WatchedRequestEnded:
    return rheostat.WatchedRequestEnded(1, request, 2, dropped, (), (), missed)


def test_a_reader_counts_positions_and_losses_until_all_requests_have_ended() -> None:
    events = [signals("a", "b"), signals("b"), ended("a", dropped=3), ended("b"), signals("c")]
    assert read_events(events, 2, None) == Read(positions=3, lost=3)


def test_a_request_gets_a_gain_once_its_last_gain_was_answered() -> None:
    sent: list[str] = []

    def gain(request: str, factor: float) -> int:
        assert 0 <= factor < 1
        sent.append(request)
        return len(sent)

    def events() -> Iterator[rheostat.WatchEvent]:
        yield signals("a")
        assert sent == ["a"]
        yield signals("a", "b")
        assert sent == ["a", "b"]
        yield rheostat.UpdateApplied(1, {0: 5})
        yield signals("a", "b")
        assert sent == ["a", "b", "a"]
        yield ended("a")
        yield ended("b")
        yield rheostat.UpdateApplied(2, {0: 6})
        yield rheostat.UpdateRefused(3, rheostat.NotFound("it has ended"))
        raise AssertionError("a reader that has all answers reads no further")

    assert read_events(events(), 2, gain) == Read(positions=5, gains=2)


def test_a_request_that_was_not_read_ends_the_benchmark() -> None:
    with pytest.raises(RuntimeError, match="not read: no room"):
        read_events([ended("a", missed="no room")], 1, None)


ROW = Turn(100.0, 10.0, 12.0, 0.5, 0.9, 0.1, 6400.0, 0, 5.0)


def test_arms_take_turns_after_a_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, int, int]] = []

    def turn(arm: str, streams: int, tokens: int) -> Turn:
        asked.append((arm, streams, tokens))
        return ROW

    saved: list[list[str]] = []
    measure(turn, [2, 4], 7, 2, lambda turns: saved.append(list(turns[EVERY])))
    names = [arm for arm, _, _ in asked]
    arms = list(REFERENCES)
    assert names == [*arms, *arms, *reversed(arms)] * 2
    assert [tokens for _, _, tokens in asked[: len(arms) + 1]] == [150] * len(arms) + [7]
    assert saved == [["2"], ["2", "4"]]
    assert "4 streams" in capsys.readouterr().out


def test_arms_are_compared_with_the_arm_that_is_steered_alike() -> None:
    read = ROW._replace(per_token_ms=10.1, server_cores=0.6, lost=1)
    steered = ROW._replace(per_token_ms=20.0, server_cores=0.3)
    looped = ROW._replace(per_token_ms=22.0, server_cores=0.7)
    turns = {UNWATCHED: ROW, SUMMARIES: ROW, EVERY: read, STEERED: steered}
    turns |= {GAINS: looped, CONTROLLER: steered}
    table = summary({arm: {"8": [row, row]} for arm, row in turns.items()})
    assert table[EVERY]["8"]["per_token_to_reference"] == pytest.approx(1.01)
    assert table[EVERY]["8"]["server_cores_more"] == pytest.approx(0.1)
    assert table[EVERY]["8"]["lost"] == 2
    assert table[GAINS]["8"]["per_token_to_reference"] == pytest.approx(1.1)
    assert table[GAINS]["8"]["server_cores_more"] == pytest.approx(0.4)


def test_a_table_shows_times_and_cores_beside_the_reference(tmp_path: Path) -> None:
    faster = ROW._replace(per_token_ms=9.9, server_cores=0.25)
    found = summary({UNWATCHED: {"1": [ROW], "8": [ROW]}, EVERY: {"1": [faster], "8": [ROW]}})
    path = tmp_path / "watched.json"
    path.write_text(json.dumps({"benchmark": "watched", "summary": found}))
    times, cores, rates = (one.splitlines() for one in tables(path))
    assert times[0] == "| ms per token | 1 stream | 8 streams |"
    minus = "\N{MINUS SIGN}"
    assert times[3] == (
        f"| {EVERY} | 9.90 ({minus}1.00 %), p99 12.00 | 10.00 (+0.00 %), p99 12.00 |"
    )
    assert cores[3].startswith(f"| {EVERY} | server 0.250 ({minus}0.250), reader 0.100 | ")
    assert rates[3].endswith(" | 100 tokens, 6400 numbers, 5 gains; 0 lost |")


def test_the_page_shows_every_file() -> None:
    for path in DOCS.glob("*/watched*.json"):
        for one in tables(path):
            assert one in PAGES
