"""What watches change of requests, against hooks in Hugging Face's model that do the same."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Self

import grpc
import numpy as np
import pytest

import rheostat
from rheostat._steering.rules import probes_to_wire
from rheostat._steering.steering import steering_to_wire
from rheostat_wire.v1 import gain_pb2, monitor_service_pb2, monitor_service_pb2_grpc

from ..engine.reference import HfReference
from .conftest import Server
from .naive import OPS, Placed, everywhere
from .test_gains import OPTIONS, PROMPT, Gains, check, check_sample, multiplied, schedule, where
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
        self._number = 0

    def run(
        self, request_id: str, gains: Gains, factors: Iterator[tuple[float, tuple[int, ...]]]
    ) -> None:
        """Sets a gain for each step of a request until it ends."""
        unanswered, ended = 0, False
        while unanswered or not ended:
            event = next(self._events)
            ended = ended or event.HasField("ended")
            if event.HasField("signals") and not ended:
                factor, chosen = next(factors)
                gain = gain_pb2.Gain(factor=factor, interventions=chosen)
                gains.note_sent(self._steer(request_id, gain=gain), factor, *chosen)
                unanswered += 1
            elif event.HasField("applied"):
                firsts = {one.sample: one.position for one in event.applied.first_positions}
                gains.note_applied(event.applied.update_id, firsts)
                unanswered -= 1
            elif event.HasField("refused"):
                assert event.refused.status.code == grpc.StatusCode.NOT_FOUND.value[0]
                unanswered -= 1

    def _steer(self, request_id: str, **change: object) -> int:
        """Sends a change; its number."""
        self._number += 1
        steer = pb.WatchSteer(update_id=self._number, request_id=request_id, **change)
        self._requests.put(pb.WatchRequest(steer=steer))
        return self._number

    def until(self, kind: str, count: int = 1) -> list[pb.WatchResponse]:
        """Reads until so many events of a kind have come; these."""
        found: list[pb.WatchResponse] = []
        while len(found) < count:
            event = next(self._events)
            if event.HasField(kind):
                found.append(event)
        return found

    def set(self, kind: str, request_id: str, steering: Sequence[Placed]) -> int:
        """Sets steering of a request of one sample; the first position on which it acts."""
        wire = steering_to_wire([one.ours for one in steering]) or {}
        number = self._steer(request_id, **{kind: wire})
        (answer,) = self.until("applied")
        assert answer.applied.update_id == number
        return answer.applied.first_positions[0].position

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._requests.put(pb.WatchRequest(leave={"end": True}))
        self._requests.put(None)
        list(self._events)
        self._channel.close()


def placed() -> list[Placed]:
    return [everywhere(OPS["add"], [1, 3]), everywhere(OPS["ablate"], [3])]


def beside(
    steer: Callable[[], None], engine: rheostat.Engine, steering: Sequence[Placed], tokens: int
) -> rheostat.Generation:
    """What the request "red" generates while `steer` runs in another thread."""
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(steer)
        out = engine.generate(
            PROMPT,
            request_id="red",
            labels=RED,
            steering=[one.ours for one in steering],
            max_tokens=tokens,
            **OPTIONS,
        )
        future.result()
    return out


def test_gains_of_a_watch_are_those_of_hugging_faces_hooks(
    server: Server, engine: rheostat.Engine, reference: HfReference
) -> None:
    gains, steering = Gains(2), placed()
    high = probe(name="mood").above(1e6)
    with Steerer(server, (rheostat.Rule("never", high),)) as watch:
        out = beside(lambda: watch.run("red", gains, schedule(3, 2)), engine, steering, 120)
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


def within(placed: Sequence[Placed], start: int, end: int, length: int) -> list[Placed]:
    """Ops between two positions."""
    at = np.arange(length)
    return [one._replace(holds=where(one, (at >= start) & (at < end))) for one in placed]


def test_a_layer_of_a_watch_is_that_of_hugging_faces_hooks(
    server: Server, engine: rheostat.Engine, reference: HfReference
) -> None:
    own = [everywhere(OPS["add"], [1])]
    layers = [[everywhere(OPS["ablate"], [1, 3])], [everywhere(OPS["norm_add"], [2])], []]
    firsts: list[int] = []
    gains = Gains(1)

    def steer(watch: Steerer) -> None:
        for layer in layers:
            watch.until("signals", 8)
            firsts.append(watch.set("layer", "red", layer))
        watch.run("red", gains, schedule(6, 1))

    with Steerer(server) as watch:
        out = beside(lambda: steer(watch), engine, own, 120)
    length = len(out.prompt_token_ids) + len(out.token_ids)
    assert firsts == sorted(set(firsts))
    assert len(out.prompt_token_ids) < firsts[0] < firsts[-1] < length - 10
    assert gains.applied > 5  # of the request's own steering, behind the last layer
    wanted = gains.placed(own, 0, length)
    for layer, start, end in zip(layers, firsts, [*firsts[1:], length], strict=True):
        wanted += within(layer, start, end, length)
    check_sample(reference, out, 0, wanted)
    origins = [(one.origin, one.update_id, one.watch_id) for one in out.receipt.interventions]
    of = watch.watch_id
    assert origins == [("request", None, ""), ("watch", 1, of), ("watch", 2, of)]
    for done, start, end in zip(out.receipt.interventions[1:], firsts, firsts[1:], strict=False):
        assert [rows.positions for rows in done.rows] == [(range(start, end),)]
        assert {site.row_count for site in done.sites} == {end - start}
    (by,) = out.receipt.watches
    sizes = [one.layer_size for one in by.changes]
    assert sizes[:3] == [1, 1, 0]
    assert [one.first_positions[0] for one in by.changes[:3]] == firsts


def test_steering_that_a_watch_puts_in_place_of_the_own_is_that_of_hooks(
    server: Server, engine: rheostat.Engine, reference: HfReference
) -> None:
    own, other = placed(), [everywhere(OPS["norm_add"], [2])]
    gains = Gains(1)
    firsts: list[int] = []

    def steer(watch: Steerer) -> None:
        watch.until("signals", 8)
        firsts.append(watch.set("replace", "red", other))
        watch.run("red", gains, schedule(7, 1))

    with Steerer(server) as watch:
        out = beside(lambda: steer(watch), engine, own, 80)
    length = len(out.prompt_token_ids) + len(out.token_ids)
    (first,) = firsts
    assert gains.applied > 5
    later = multiplied(within(other, first, length, length), gains.table(0, length))
    check_sample(reference, out, 0, [*within(own, 0, first, length), *later])
    origins = [(one.origin, one.update_id, one.watch_id) for one in out.receipt.interventions]
    assert origins == [*2 * [("request", None, "")], ("update", 1, watch.watch_id)]
    assert out.receipt.watches[0].changes[0].replace_size == 1
