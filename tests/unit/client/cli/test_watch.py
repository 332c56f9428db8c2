"""``rheostat watch`` against a real server: what it prints, draws and refuses."""

import asyncio
import json
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import rheostat
from rheostat._cli import main
from rheostat._cli._readings import Curves
from rheostat._responses.signals import SignalColumn

from ...server.fakes import WIDTH, ScriptedBackend, reading
from ..rows_server import RowsServer

FLAGS = ["--probe", "mood", "--points", "resid_post", "--layers", "0"]
COLUMN = SignalColumn("mood", None)


@pytest.fixture
def starter(starter):
    """Servers that have a vector."""

    def begin(*arguments: object, **config: object) -> RowsServer:
        running = starter(*arguments, **config)
        running.engine.vectors.put(np.ones((1, WIDTH), np.float32), name="mood")
        return running

    return begin


def watching(running: RowsServer, act: Callable[[], object], *line: str) -> int:
    """The exit code of the command, which is given something to show once it stands."""

    def ask() -> None:
        while not running.ask_watches(len):
            time.sleep(0.01)
        act()

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        return main(["watch", "--target", running.target, *FLAGS, *line])
    finally:
        asking.join()


def test_every_event_is_a_line(running, capsys) -> None:
    assert watching(running, lambda: running.generate("a"), "--every", "--limit", "1") == 0
    assert capsys.readouterr().out.splitlines() == [
        "a begins: 3 prompt tokens",
        "a sample 0 at 0-2: mood 0 to 0.25",
        "a sample 0 at 3: mood 0.375",
        "a sample 0 at 4: mood 0.5",
        "a end: length; mood mean 0.25, largest 0.5 at 4",
    ]
    assert running.ask_watches(len) == 0


def test_programs_get_json(starter, capsys) -> None:
    running = starter(ScriptedBackend(openness=lambda gate, position: float(position == 4)))
    line = ["--label", "team=red", "--where", "generated", "--stop-above", "mood:1", "--json"]

    def act() -> None:
        running.generate("a", labels={"team": "red"}, tokens=9)

    assert watching(running, act, *line, "--limit", "1") == 0
    begun, first, second, ended = map(json.loads, capsys.readouterr().out.splitlines())
    assert (begun["event"], begun["request_id"], begun["labels"]) == ("begun", "a", {"team": "red"})
    assert (first["positions"], first["values"]) == ([3], {"mood": [reading(0, 3)]})
    assert (second["positions"], second["firings"]) == ([4], {"stop-0": [4]})
    assert (ended["event"], ended["finish_reasons"]) == ("ended", ["watch"])
    (summary,) = ended["summaries"]
    assert (summary["probe"], summary["site"]) == ("mood", {"point": "resid_post", "layer": 0})
    assert (summary["max"], summary["max_position"]) == (reading(0, 4), 4)


def test_a_terminal_shows_curves(running, capsys, monkeypatch) -> None:
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert (
        watching(running, lambda: running.generate("a", tokens=6), "--every", "--limit", "1") == 0
    )
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split() == ["a/0", "mood", "0.875", "▁▂▃▄▅▆▇█", "length"]


def readings(request_id: str, *numbers: float) -> rheostat.WatchedSignals:
    """The readings of a sample from position 0 on."""
    return rheostat.WatchedSignals(
        1,
        (COLUMN,),
        (),
        (request_id,),
        np.array([0]),
        np.array([0]),
        np.array([len(numbers)]),
        np.array(numbers, np.float32)[:, None],
        np.zeros((0, 2), np.int64),
    )


def test_the_oldest_samples_that_ended_leave_a_full_terminal() -> None:
    curves = Curves([COLUMN])
    for number in range(6):
        curves.add(readings(f"r{number}", 1.0, np.nan, 2.0))
        if number in (1, 2, 4):
            curves.add(rheostat.WatchedRequestEnded(1, f"r{number}", 3, 0, ("stop",)))
    shown = curves.lines(80, 4)
    assert [line.split()[0] for line in shown] == ["r0/0", "r3/0", "r4/0", "r5/0"]
    assert shown[2].split()[1:] == ["mood", "2", "▁█", "stop"]
    assert [line.split()[0] for line in curves.lines(80, 1)] == ["r5/0"]


@pytest.mark.parametrize("width", [20, 60, 120])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    curves = Curves([COLUMN])
    curves.add(readings("a-request-with-a-long-name", *np.arange(700.0)))
    (line,) = curves.lines(width, 10)
    assert len(line) < width


def test_requests_before_the_watch_are_named(starter, capsys) -> None:
    running = starter(ScriptedBackend(hold=asyncio.Event()))
    with running.engine.stream([10], request_id="early", max_tokens=2) as stream:
        next(stream)

        def act() -> None:
            running.do(running.backend.hold.set)
            running.generate("later")

        assert watching(running, act, "--every", "--limit", "1") == 0
    assert "early is not read: it began before the watch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["--every", "--stop-above", "mood"], "'mood' is not NAME:NUMBER"),
        (["--every", "--stop-above", "mood:high"], "'mood:high' is not NAME:NUMBER"),
        (["--every", "--stop-above", "joy:2"], "there is no --probe joy"),
        (["--every", "--label", "a=b"], "not allowed with"),
        ([], "one of the arguments --request --label --every is required"),
        (["--every", "--limit", "0"], "'0' is not a number of requests"),
    ],
)
def test_wrong_flags_are_one_line(running, capsys, line, told) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["watch", "--target", running.target, *FLAGS, *line])
    assert raised.value.code == 2
    assert told in capsys.readouterr().err


def test_a_vector_that_is_not_stored_is_named(running, capsys) -> None:
    line = ["watch", "--target", running.target, "--every", "--probe", "joy"]
    assert main([*line, "--points", "resid_post", "--layers", "0"]) == 1
    assert "no vector is named 'joy'" in capsys.readouterr().err
