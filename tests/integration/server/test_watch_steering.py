"""What watches change of requests, against hooks in Hugging Face's model that do the same."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Self

import grpc
import numpy as np
import pytest

import rheostat
from rheostat._steering.rules import probes_to_wire
from rheostat_wire.v1 import gain_pb2, monitor_service_pb2, monitor_service_pb2_grpc

from ..engine.reference import HfReference
from .conftest import Server
from .naive import OPS, Placed, everywhere
from .test_gains import OPTIONS, PROMPT, Gains, check, check_sample, multiplied, schedule
from .test_gates import probe

pytestmark = pytest.mark.integration

pb = monitor_service_pb2
RED = {"team": "red"}


class Steerer:
    """A watch that steers the requests of team red with every step of theirs."""

    def __init__(self, server: Server, rules: tuple[rheostat.Rule, ...] = ()) -> None:
        reads = [probe(name="mood")]
        opened = pb.WatchOpen(
            filter={"labels": {"labels": RED}},
            probes=probes_to_wire((), reads, rules),
            rules=[rule.to_wire("rule") for rule in rules],
            steers=True,
            credit_bytes=1 << 24,
        )
        self._channel = grpc.insecure_channel(server.target)
        self._requests: SimpleQueue[pb.WatchRequest | None] = SimpleQueue()
        self._requests.put(pb.WatchRequest(open=opened))
        messages = iter(self._requests.get, None)
        stub = monitor_service_pb2_grpc.MonitorServiceStub(self._channel)
        self._events: Iterator[pb.WatchResponse] = stub.Watch(messages)
        self.watch_id = next(self._events).opened.watch_id
        self.answered = 0

    def run(self, request_id: str, gains: Gains, factors: Iterator[tuple[float, tuple[int, ...]]]):
        """Sets a gain for each step of a request until it ends."""
        number = 0
        for event in self._events:
            if event.HasField("signals"):
                number += 1
                factor, chosen = next(factors)
                gains.note_sent(number, factor, *chosen)
                gain = gain_pb2.Gain(factor=factor, interventions=chosen)
                steer = pb.WatchSteer(update_id=number, request_id=request_id, gain=gain)
                self._requests.put(pb.WatchRequest(steer=steer))
            elif event.HasField("applied"):
                firsts = {one.sample: one.position for one in event.applied.first_positions}
                gains.note_applied(event.applied.update_id, firsts)
                self.answered += 1
            elif event.HasField("refused"):
                assert event.refused.status.code == grpc.StatusCode.NOT_FOUND.value[0]
                self.answered += 1
            if event.HasField("ended"):
                break
        while self.answered < number:
            event = next(self._events)
            if event.HasField("applied"):
                firsts = {one.sample: one.position for one in event.applied.first_positions}
                gains.note_applied(event.applied.update_id, firsts)
            self.answered += event.HasField("applied") or event.HasField("refused")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._requests.put(pb.WatchRequest(leave={"end": True}))
        self._requests.put(None)
        list(self._events)
        self._channel.close()


def placed() -> list[Placed]:
    return [everywhere(OPS["add"], [1, 3]), everywhere(OPS["ablate"], [3])]


def test_gains_of_a_watch_are_those_of_hugging_faces_hooks(
    server: Server, engine: rheostat.Engine, reference: HfReference
) -> None:
    gains, steering = Gains(2), placed()
    high = probe(name="mood").above(1e6)
    with (
        Steerer(server, (rheostat.Rule("never", high),)) as watch,
        ThreadPoolExecutor(1) as threads,
    ):
        future = threads.submit(watch.run, "red", gains, schedule(3, 2))
        out = engine.generate(
            PROMPT,
            request_id="red",
            labels=RED,
            steering=[one.ours for one in steering],
            max_tokens=120,
            **OPTIONS,
        )
        future.result()
    assert out.receipt.gain_count == gains.applied > 20
    check(reference, out, steering, gains)
    (by,) = out.receipt.watches
    assert (by.watch_id, by.change_count) == (watch.watch_id, gains.applied)
    for change in by.changes:
        first = change.first_positions[0]
        for index in change.interventions or (0, 1):
            later = [one for one in by.changes if one.first_positions[0] == first]
            last = [one for one in later if index in (one.interventions or (0, 1))][-1]
            assert gains.at(0, first)[index] == last.factor


def test_gains_of_a_session_and_a_watch_multiply_each_other(
    server: Server, engine: rheostat.Engine, reference: HfReference
) -> None:
    own, watched, steering = Gains(2), Gains(2), placed()
    factors = schedule(5, 2)
    with (
        Steerer(server) as watch,
        ThreadPoolExecutor(1) as threads,
        engine.session(
            PROMPT,
            request_id="red",
            labels=RED,
            steering=[one.ours for one in steering],
            max_tokens=120,
            **OPTIONS,
        ) as session,
    ):
        future = threads.submit(watch.run, "red", watched, schedule(4, 2))
        for event in session:
            own.note(event)
            if isinstance(event, rheostat.Tokens):
                factor, chosen = next(factors)
                own.send(session, factor, *chosen)
        out = session.result()
        future.result()
    assert min(own.applied, watched.applied) > 20
    assert out.receipt.gain_count == own.applied + watched.applied
    length = len(out.prompt_token_ids) + len(out.token_ids)
    table = own.table(0, length) * watched.table(0, length)
    check_sample(reference, out, 0, multiplied(steering, table))
    assert np.unique(table).size > 5
