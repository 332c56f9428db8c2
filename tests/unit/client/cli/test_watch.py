"""``rheostat watch`` against a real server: what it prints, draws and refuses."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
from google.protobuf import text_format

import rheostat
from rheostat._cli import main
from rheostat._cli._readings import Curves
from rheostat._cli._stops import Bound
from rheostat._responses.signals import SignalColumn
from rheostat_wire.v1 import (
    gate_pb2,
    monitor_pb2,
    monitor_service_pb2,
    steering_service_pb2,
    vector_pb2,
)

from ...server.fakes import WIDTH, ScriptedBackend, reading
from ..rows_server import RowsServer

FLAGS = ["--probe", "mood", "--points", "resid_post", "--layers", "0"]
COLUMN = SignalColumn("mood", None)
Response = monitor_service_pb2.WatchResponse
MOOD = steering_service_pb2.ListVectorsResponse()
MOOD.vectors.add(name="mood", digest=b"\xab" * 32, dtype="DTYPE_FLOAT32", shape=[1, 8])


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
    line = ["--label", "team=red", "--stop-above", "mood:1", "--json"]

    def act() -> None:
        running.generate("a", labels={"team": "red"}, tokens=9)

    assert watching(running, act, *line, "--limit", "1") == 0
    begun, first, second, ended = map(json.loads, capsys.readouterr().out.splitlines())
    assert (begun["event"], begun["request_id"], begun["labels"]) == ("begun", "a", {"team": "red"})
    assert (first["positions"], first["values"]) == ([3], {"mood": [reading(0, 3)]})
    assert (second["positions"], second["firings"]) == ([4], {"mood above 1": [4]})
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


def test_a_stop_is_told_in_words(starter, capsys) -> None:
    running = starter(ScriptedBackend(openness=lambda gate, position: float(position == 4)))
    ended: list[rheostat.Generation] = []

    def act() -> None:
        ended.append(running.generate("a", tokens=9))

    assert watching(running, act, "--every", "--stop-above", "mood:0.4", "--limit", "1") == 0
    assert capsys.readouterr().out.splitlines() == [
        "a begins: 3 prompt tokens",
        "a sample 0 at 3: mood 0.375",
        "a sample 0 at 4: mood 0.5; stop: mood 0.5 is above 0.4 at 4",
        "a end: watch; mood mean 0.4375, largest 0.5 at 4",
    ]
    assert (ended[0].finish_reason, ended[0].samples[0].label) == ("watch", "mood above 0.4")


def test_a_stop_is_told_beside_its_curve(starter, capsys, monkeypatch) -> None:
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    running = starter(ScriptedBackend(openness=lambda gate, position: float(position == 4)))
    flags = ["--every", "--stop-below", "mood:0.6", "--limit", "1"]
    assert watching(running, lambda: running.generate("a", tokens=9), *flags) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split(maxsplit=4) == [
        "a/0", "mood", "0.5", "▁█", "watch: mood 0.5 is below 0.6 at 4",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "where"),
    [
        ([], range(5)),
        (["--stop-above", "mood:9"], range(3, 5)),
        (["--stop-below", "mood:-9"], range(3, 5)),
        (["--stop-above", "mood:9", "--where", "all"], range(5)),
        (["--stop-above", "mood:9", "--where", "-1"], [2]),
        (["--stop-above", "mood:9", "--pool", "max"], range(3, 5)),
        (["--stop-above", "mood:9", "--pool", "mean", "--after-prompt"], range(3)),
    ],
)
def test_bounds_leave_prompts_alone_unless_the_flags_say_otherwise(
    running, capsys, flags, where
) -> None:
    act = partial(running.generate, "a")
    assert watching(running, act, "--every", "--limit", "1", "--json", *flags) == 0
    events = map(json.loads, capsys.readouterr().out.splitlines())
    assert [position for event in events for position in event.get("positions", ())] == list(where)


@pytest.mark.parametrize(
    ("flags", "probe", "rule"),
    [
        (
            "--stop-above mood:2.5",
            "where { include { phase: PHASE_GENERATED } }",
            """conditions {
                 probe_name: "mood" pool: POOL_LAST combine_sites: COMBINE_ANY above: 2.5
                 for_tokens: 1
               }
               stop { drop_sampled: true label: "mood above 2.5" }""",
        ),
        (
            "--stop-below mood:-2 --where all",
            "",
            """conditions {
                 probe_name: "mood" pool: POOL_LAST combine_sites: COMBINE_ANY below: -2
                 for_tokens: 1
               }
               stop { drop_sampled: true label: "mood below -2" }""",
        ),
        (
            "--normalise cosine --pool mean --after-prompt --stop-below mood:0.25",
            "where { include { phase: PHASE_PROMPT } } read { normalise: NORMALISE_COSINE }",
            """conditions {
                 probe_name: "mood" pool: POOL_MEAN combine_sites: COMBINE_ANY below: 0.25
                 for_tokens: 1 after_prompt: true
               }
               stop { drop_sampled: true label: "mean of mood below 0.25" }""",
        ),
        (
            "--normalise projected_cosine --rows prompt_mean --stop-above mood:0.25",
            """rows: PROBE_ROWS_PROMPT_MEAN where { include { phase: PHASE_PROMPT } }
               read { normalise: NORMALISE_PROJECTED_COSINE }""",
            """conditions {
                 probe_name: "mood" pool: POOL_LAST combine_sites: COMBINE_ANY above: 0.25
                 for_tokens: 1
               }
               stop { drop_sampled: true label: "mood above 0.25" }""",
        ),
    ],
)
def test_flags_become_probes_and_rules(server, capsys, flags, probe, rule) -> None:
    server.on("ListVectors", MOOD)
    server.on("Watch", read_once)
    line = ["watch", "--target", server.target, *FLAGS, *flags.split()]
    assert main([*line, "--every", "--limit", "1"]) == 0
    opened = server.asked[1].open
    wanted = gate_pb2.Probe(
        name="mood",
        sites={"points": ["POINT_RESID_POST"], "list": {"layers": [0]}},
        read={"vector": {"digest": b"\xab" * 32}, "bias": 0},
        signals=True,
    )
    wanted.read.normalise = vector_pb2.NORMALISE_NONE
    wanted.read.activation = vector_pb2.ACTIVATION_IDENTITY
    text_format.Merge(probe, wanted)
    assert list(opened.probes) == [wanted]
    head = 'name: "stop-0" combine: COMBINE_ALL '
    assert list(opened.rules) == [text_format.Parse(head + rule, monitor_pb2.Rule())]
    assert capsys.readouterr().out == "a end: length\n"


def read_once(requests: Iterator, context: object) -> Iterator[Response]:
    """A server's part of a watch that one request passes without a reading."""
    next(requests)
    yield Response(opened={"watch_id": "w1", "next_sequence": 1})
    yield Response(
        sequence=1, ended={"request_id": "a", "finish_reasons": ["FINISH_REASON_LENGTH"]}
    )
    for _ in requests:  # until the client has closed its side
        pass


@pytest.mark.parametrize(
    ("bound", "told"),
    [
        (Bound("mood", False, 2.5), "mood 3 is above 2.5 at 7"),
        (Bound("mood", True, 3.5), "mood 3 is below 3.5 at 7"),
        (Bound("tone/x", False, 0.5), "tone.x resid_post[2] 4 is above 0.5 at 7"),
        (Bound("tone/x", True, 0.5), "tone.x resid_post[1] -1 is below 0.5 at 7"),
        (Bound("mood", False, 2.5, "mean"), "mean of mood is above 2.5 at 7"),
        (Bound("mood", True, 2.5, "max"), "largest mood is below 2.5 at 7"),
        (Bound("shut", False, 2.5), "shut is above 2.5 at 7"),
    ],
)
def test_the_words_of_a_stop_have_the_reading_and_the_bound(bound, told) -> None:
    sites = [rheostat.Site(rheostat.Point.RESID_POST, layer) for layer in (1, 2)]
    columns = (
        COLUMN,
        *(SignalColumn("tone.x", site) for site in sites),
        SignalColumn("shut", sites[0]),
    )
    nan = np.nan
    values = np.array([[1, 0, 0, nan], [3, -1, 4, nan], [5, 6, 7, 8]], np.float32)
    some = rheostat.Readings("a", 0, columns, np.array([6, 7, 8]), values)
    assert bound.passed(some, np.array([7, 8])) == told


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
    curves = Curves([COLUMN], {})
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
    curves = Curves([COLUMN], {})
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
        (["--every", "--stop-above", "mood:nan"], "'mood:nan' is not NAME:NUMBER"),
        (["--every", "--stop-below", "mood"], "--stop-below: 'mood' is not NAME:NUMBER"),
        (["--every", "--stop-above", "joy:2"], "--stop-above joy: there is no --probe joy"),
        (["--every", "--stop-below", "joy:2"], "--stop-below joy: there is no --probe joy"),
        (["--every", "--pool", "mean"], "--pool and --after-prompt need --stop-above or"),
        (["--every", "--after-prompt"], "--pool and --after-prompt need --stop-above or"),
        (
            ["--every", "--stop-above", "mood:2", "--after-prompt", "--where", "generated"],
            "--after-prompt compares numbers of the prompt",
        ),
        (
            ["--every", "--rows", "prompt_mean", "--where", "generated"],
            "--rows prompt_mean reads rows of the prompt",
        ),
        (["--every", "--normalise", "cosin"], "did you mean 'cosine'?"),
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
