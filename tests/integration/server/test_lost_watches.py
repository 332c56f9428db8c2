"""What becomes of requests whose watcher is killed and never comes back, on a real engine.

`tight_server` loses a watch half a second after its connection. In `test_held_watching`, a watch is
resumed in time.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import NamedTuple

import grpc
import pytest

import rheostat

from .conftest import Server, assert_empty, watched
from .test_gates import PROMPT, READ, probe
from .test_held_watching import CHELDIT, Killable, Reading, pb, resume

pytestmark = pytest.mark.integration

COUNT = 240
"""Tokens of a request. It runs for longer than a watch can be resumed."""
OPTIONS = {
    "max_tokens": COUNT,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 0,
    "capture": rheostat.Capture("resid_post", READ),
}
FATES = {
    "continue": pb.WATCH_LOST_CONTINUE,
    "stop": pb.WATCH_LOST_STOP,
    "hold": pb.WATCH_LOST_HOLD,
}
UNWATCHED = "unwatched"
AHEAD = 2
"""Steps that the engine may compute before it hears that a request is held."""


def labels(name: str) -> dict[str, str]:
    """By which the watcher with this fate selects requests."""
    return {"killed-watcher": name}


class Lost(NamedTuple):
    """What became of requests that ran together while the watchers of all but one were killed."""

    alone: rheostat.Generation
    """A request that ran before."""
    outs: Mapping[str, rheostat.Generation]
    """By the fate of its watch, and the unwatched one."""
    watch_ids: Mapping[str, str]
    at_hold: int
    """Tokens of the held request that had come once it was held."""


def wait_for_line(server: Server, text: str) -> None:
    """Returns once the server's log has a text."""
    deadline = time.monotonic() + 60
    while text not in server.log.read_text():
        assert time.monotonic() < deadline, server.log.read_text()[-2000:]
        time.sleep(0.02)


def watcher(server: Server, fate: str) -> Killable:
    opening = pb.WatchOpen(on_lost=FATES[fate], credit_bytes=CHELDIT)
    opening.filter.labels.labels.update(labels(fate))
    opening.probes.append(probe(name="mood").to_wire("probes[0]"))
    return Killable(server.target, opening)


@pytest.fixture(scope="module")
def lost(tight_server: Server) -> Iterator[Lost]:
    with rheostat.connect(tight_server.target) as client, ExitStack() as streams:
        alone = client.generate(PROMPT, **OPTIONS)
        watchers = {fate: watcher(tight_server, fate) for fate in FATES}
        running = {}
        for name in (*FATES, UNWATCHED):
            stream = client.stream(PROMPT, labels=labels(name), **OPTIONS)
            running[name] = Reading(streams.enter_context(stream))
        for fate, one in watchers.items():
            assert (one.said(), one.said()) == ("begun", "signals")
            running[fate].wait()
        for fate, one in watchers.items():
            one.kill()
            assert len(running[fate].came) < COUNT
        wait_for_line(tight_server, f"watch {watchers['hold'].name} has no reader")
        at_hold = running["hold"].until_quiet(0.3)
        outs = {name: reading.result() for name, reading in running.items()}
        for name, out in outs.items():
            assert running[name].came == list(out.token_ids)
        names = {fate: one.name for fate, one in watchers.items()}
        yield Lost(alone, outs, names, at_hold)
        assert_empty(client)


@pytest.fixture
def engine(tight_server: Server) -> Iterator[rheostat.Engine]:
    """A client of `tight_server`; see `watched`."""
    yield from watched(tight_server)


@pytest.mark.parametrize("name", ["continue", UNWATCHED])
def test_a_request_goes_on_to_its_last_token(lost: Lost, name: str) -> None:
    out, alone = lost.outs[name], lost.alone
    assert (out.finish_reason, len(out.token_ids)) == ("length", COUNT)
    assert (out.token_ids, out.text) == (alone.token_ids, alone.text)
    assert len(out.activations["resid_post", READ]) == len(out.prompt_token_ids) + COUNT - 1
    assert out.receipt.watches == ()


@pytest.mark.parametrize("fate", ["stop", "hold"])
def test_a_request_ends_with_the_finish_reason_of_its_watch(lost: Lost, fate: str) -> None:
    out, alone = lost.outs[fate], lost.alone
    assert (out.finish_reason, out.samples[0].label) == ("watch", "the watch was lost")
    count = len(out.token_ids)
    assert 0 < count < COUNT
    assert out.token_ids == alone.token_ids[:count]
    assert alone.text.startswith(out.text)
    assert len(out.logprobs) == count
    (by,) = out.receipt.watches
    assert (by.watch_id, by.stopped_samples, by.changes) == (lost.watch_ids[fate], (0,), ())
    assert by.hold_count == (fate == "hold")


def test_a_held_request_gets_no_token_between_the_loss_and_its_end(lost: Lost) -> None:
    out = lost.outs["hold"]
    assert len(out.token_ids) == lost.at_hold
    assert (
        out.receipt.watches[0].held_seconds > 0.45
    )  # of the half second in which it may be resumed
    computed = len(out.prompt_token_ids) + len(out.token_ids) - 1 + AHEAD
    assert len(out.activations["resid_post", READ]) <= computed
    assert len(out.token_ids) < len(lost.outs["stop"].token_ids)


@pytest.mark.parametrize("fate", FATES)
def test_a_lost_watch_cannot_be_resumed_and_selects_requests_until_it_is_replaced(
    lost: Lost, engine: rheostat.Engine, tight_server: Server, fate: str
) -> None:
    with pytest.raises(grpc.RpcError) as gone:
        next(resume(tight_server.target, lost.watch_ids[fate]))
    assert gone.value.code() == grpc.StatusCode.NOT_FOUND
    short = {**OPTIONS, "max_tokens": 4}
    if fate != "continue":
        with pytest.raises(rheostat.Unavailable) as refused:
            engine.generate(PROMPT, labels=labels(fate), **short)
        assert refused.value.reason == "REASON_WATCH_LOST"
        engine.watch(probes=probe(name="mood"), labels=labels(fate)).close()
    out = engine.generate(PROMPT, labels=labels(fate), **short)
    assert out.token_ids == lost.alone.token_ids[:4]
