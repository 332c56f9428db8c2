"""Watchers that are killed while they read: what becomes of the requests is what they asked for."""

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import rheostat

from ...server.fakes import WIDTH
from ...server.holding import HoldingBackend
from ..cutting_proxy import CuttingProxy
from ..rows_server import PROMPT, RowsServer, until

RED, BLUE = {"team": "red"}, {"team": "blue"}
MOOD = rheostat.probe(
    rheostat.inline(np.ones((1, WIDTH), np.float32)), points="resid_post", layers=0
)
PROGRAM = f"""
import sys, numpy as np, rheostat
target, on_lost = sys.argv[1:]
probe = rheostat.probe(
    rheostat.inline(np.ones((1, {WIDTH}), np.float32)), points="resid_post", layers=0
)
with rheostat.connect(target) as engine:
    with engine.watch(probes=probe, labels={RED!r}, on_lost=on_lost) as watch:
        print("open", flush=True)
        for event in watch:
            print(type(event).__name__, flush=True)
"""

Kill = Callable[[], None]


@pytest.fixture
def running(starter) -> RowsServer:
    """A server whose samples stop after two tokens until they are let go."""
    return starter(HoldingBackend(hold=asyncio.Event(), hold_from=2), resume_window=0.3)


@pytest.fixture
def watcher(running: RowsServer) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts programs that watch team red."""
    started = []

    def start(on_lost: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, running.target, on_lost]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert said(started[-1]) == "open"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def said(process: subprocess.Popen[str]) -> str:
    """Its next line."""
    return process.stdout.readline().strip()


def kill_while_it_reads(process: subprocess.Popen[str]) -> None:
    """Waits until it has read signals of a request, and kills it."""
    while said(process) != "WatchedSignals":
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()


def begin(running: RowsServer, name: str, labels: dict[str, str]) -> rheostat.Stream:
    return running.engine.stream(
        PROMPT, request_id=name, labels=labels, max_tokens=5, temperature=0
    )


def test_requests_of_a_killed_watcher_go_on_if_it_said_so(running: RowsServer, watcher) -> None:
    process = watcher("continue")
    with begin(running, "red", RED) as stream:
        kill_while_it_reads(process)
        until(lambda: running.ask_watches(len) == 0)
        running.do(running.backend.hold.set)
        out = stream.result()
    assert (out.finish_reason, len(out.token_ids)) == ("length", 5)
    assert running.generate("later", labels=RED).finish_reason == "length"


def test_requests_of_a_killed_watcher_end_if_it_said_so(running: RowsServer, watcher) -> None:
    process = watcher("stop")
    with begin(running, "red", RED) as stream, begin(running, "blue", BLUE) as other:
        kill_while_it_reads(process)
        out = stream.result()
        assert (out.finish_reason, out.samples[0].label) == ("watch", "the watch was lost")
        assert len(out.token_ids) == 2
        with pytest.raises(rheostat.Unavailable) as raised:
            running.generate("refused", labels=RED)
        assert raised.value.reason == "REASON_WATCH_LOST"
        running.do(running.backend.hold.set)
        assert other.result().finish_reason == "length"
    with running.engine.watch(probes=MOOD, labels=RED) as watch:
        assert running.generate("watched", labels=RED).finish_reason == "length"
        assert next(watch).request_id == "watched"
    assert running.generate("unwatched", labels=RED).finish_reason == "length"


def test_requests_of_a_killed_watcher_are_held_and_end_if_it_said_so(
    running: RowsServer, watcher
) -> None:
    process = watcher("hold")
    with begin(running, "red", RED) as stream, begin(running, "blue", BLUE) as other:
        kill_while_it_reads(process)
        until(lambda: bool(running.backend.held))
        running.do(running.backend.hold.set)
        unwatched = other.result()
        assert unwatched.finish_reason == "length"
        out = stream.result()
    assert (out.finish_reason, out.samples[0].label) == ("watch", "the watch was lost")
    assert out.token_ids == unwatched.token_ids[:2]
    (held,) = out.receipt.watches
    assert (held.hold_count, held.changes) == (1, ())
    assert held.held_seconds > 0
    assert "held 1 time for 0." in str(out.receipt)
    with pytest.raises(rheostat.Unavailable) as raised:
        running.generate("refused", labels=RED)
    assert raised.value.reason == "REASON_WATCH_LOST"


def test_held_requests_go_on_when_their_watcher_comes_back(running: RowsServer) -> None:
    with (
        contextlib.closing(CuttingProxy(running.port)) as proxy,
        rheostat.connect(proxy.target) as client,
        client.watch(probes=MOOD, labels=RED, on_lost="hold") as watch,
        begin(running, "red", RED) as stream,
    ):
        events = [next(watch), next(watch)]
        assert proxy.cut() > 0
        until(lambda: any(held for held, _ in running.backend.hold_messages))
        running.do(running.backend.hold.set)
        out = stream.result()
        while not isinstance(events[-1], rheostat.WatchedRequestEnded):
            events.append(next(watch))
    assert (out.finish_reason, len(out.token_ids)) == ("length", 5)
    assert [one.hold_count for one in out.receipt.watches] == [1]
    assert (events[-1].position_count, events[-1].dropped_position_count) == (7, 0)
