"""Requests of a killed watcher are held on a real engine, until another resumes its watch."""

import queue
import subprocess
import sys
import threading
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

import rheostat
from rheostat_wire.v1 import monitor_service_pb2, monitor_service_pb2_grpc

from .conftest import Server
from .test_gates import EVERY_LAYER, MOOD, OPTIONS, PROMPT, READ, probe

pytestmark = pytest.mark.integration

pb = monitor_service_pb2
HELD = {"watched": "until-killed"}
"""No other test selects requests by it: a lost watch refuses them."""
CHELDIT = 1 << 30
QUIET = 0.7
"""Seconds without a token after which a request is held."""
WATCHER = """
import sys, threading, grpc
from rheostat_wire.v1 import monitor_service_pb2 as pb, monitor_service_pb2_grpc
def messages():
    yield pb.WatchRequest.FromString(bytes.fromhex(sys.argv[2]))
    threading.Event().wait()
stub = monitor_service_pb2_grpc.MonitorServiceStub(grpc.insecure_channel(sys.argv[1]))
for event in stub.Watch(messages()):
    if not event.HasField("heartbeat"):
        print(event.opened.watch_id or event.WhichOneof("event"), flush=True)
"""


class Killable:
    """A program that watches, and can be killed."""

    def __init__(self, target: str, opening: pb.WatchOpen) -> None:
        message = pb.WatchRequest(open=opening).SerializeToString().hex()
        command = [sys.executable, "-c", WATCHER, target, message]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.name = self.said()

    def said(self) -> str:
        """Its next line: the id of its watch, then the kind of each event."""
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def resume(target: str, name: str) -> Iterator[pb.WatchResponse]:
    """The events of a watch, from the first one on."""
    opening = pb.WatchOpen(resume={"watch_id": name}, credit_bytes=CHELDIT)

    def messages() -> Iterator[pb.WatchRequest]:
        yield pb.WatchRequest(open=opening)
        threading.Event().wait(60)

    with grpc.insecure_channel(target) as channel:
        yield from monitor_service_pb2_grpc.MonitorServiceStub(channel).Watch(messages())


class Reading:
    """A stream that a thread reads."""

    def __init__(self, stream: rheostat.Stream) -> None:
        self.stream = stream
        self.count = 0
        self.came: list[int] = []
        """The tokens that have come, whether or not a test has waited for them."""
        self._tokens: queue.Queue[int] = queue.Queue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns once some tokens have come."""
        self.count += self._tokens.get(timeout=60)

    def until_quiet(self, seconds: float = QUIET) -> int:
        """The number of its tokens, once none has come for some seconds."""
        while True:
            try:
                self.count += self._tokens.get(timeout=seconds)
            except queue.Empty:
                return self.count

    def result(self) -> rheostat.Generation:
        """The whole, once it has ended."""
        self._thread.join(60)
        return self.stream.result()

    def _read(self) -> None:
        for event in self.stream:
            if isinstance(event, rheostat.Tokens):
                self.came += event.token_ids
                self._tokens.put(len(event.token_ids))


def test_requests_of_a_killed_watcher_wait_until_their_watch_is_resumed(
    server: Server, engine: rheostat.Engine
) -> None:
    options = {**OPTIONS, "max_tokens": 500, "capture": EVERY_LAYER}
    alone = engine.generate(PROMPT, **options)
    opening = pb.WatchOpen(on_lost=pb.WATCH_LOST_HOLD, credit_bytes=CHELDIT)
    opening.filter.labels.labels.update(HELD)
    opening.probes.append(probe(name="mood").to_wire("probes[0]"))
    watcher = Killable(server.target, opening)
    with engine.stream(PROMPT, labels=HELD, **options) as stream:
        reading = Reading(stream)
        assert (watcher.said(), watcher.said()) == ("begun", "signals")
        reading.wait()
        watcher.kill()
        assert 0 < reading.until_quiet() < 500
        other = engine.generate(PROMPT, **OPTIONS)  # the engine serves others meanwhile
        events = resume(server.target, watcher.name)
        read: dict[int, float] = {}
        for event in events:
            for signals in [event.signals] if event.HasField("signals") else []:
                values = iter(np.frombuffer(signals.values.inline, "<f4").tolist())
                spans = zip(signals.first_positions, signals.row_counts, strict=True)
                for position in [p for first, count in spans for p in range(first, first + count)]:
                    assert position not in read
                    read[position] = next(values)
            if event.HasField("ended"):
                break
        out = reading.result()
    assert other.token_ids == alone.token_ids[: len(other.token_ids)]
    assert out.token_ids == alone.token_ids
    assert out.receipt.preemption_count == 1
    (held,) = out.receipt.watches
    assert (held.watch_id, held.hold_count, held.changes) == (watcher.name, 1, ())
    assert held.held_seconds > QUIET
    assert (event.ended.position_count, event.ended.dropped_position_count) == (len(read), 0)
    rows = out.activations["resid_post", READ]
    assert sorted(read) == list(range(len(rows)))
    assert len(rows) == len(alone.activations["resid_post", READ])
    numbers = np.array([read[position] for position in sorted(read)])
    np.testing.assert_allclose(numbers, rows @ MOOD[0], atol=1e-3, rtol=0)
    np.testing.assert_allclose(rows, alone.activations["resid_post", READ], atol=1e-3, rtol=0)
