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
from .test_gates import ACT, EVERY_LAYER, LATE, LAYERS, MOOD, PUSH, READ, probe, push, site
from .test_steering_rules import Act, Float, Followed, follow, last_within, tokens_of

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


OWN, OTHER = (
    (2 * v / np.linalg.norm(v)).astype(np.float32)
    for v in np.random.default_rng(9).normal(size=(2, 128))
)
NEAR = 1e-4


def at_act(row: Float) -> rheostat.Intervention:
    return rheostat.inline(row[None]).at(points="resid_post", layers=ACT)


def above(bound: float) -> Callable[[Float], bool]:
    def fires(numbers: Float) -> bool:
        assert abs(numbers[-1] - bound) > NEAR, "too near to a bound"
        return bool(numbers[-1] > bound)

    return fires


def bounds(engine: rheostat.Engine) -> tuple[float, float]:
    """Numbers that half of what is read at the layers READ and LATE exceeds."""
    out = engine.generate(PROMPT, capture=EVERY_LAYER, max_tokens=60, **OPTIONS)
    numbers = (out.activations["resid_post", layer] @ MOOD[0] for layer in (READ, LATE))
    early, late = (float(np.median(one)) for one in numbers)
    return early, late


def check_followed(
    reference: HfReference, out: rheostat.Generation, late: float, act: Act
) -> Followed:
    """A rule that reads late pushes the token behind; `act` steers beside it."""
    length = len(out.prompt_token_ids)
    expected = follow(reference, tokens_of(out), length, above(late), last_within(1), act)
    for layer in range(LAYERS):
        found = out.activations["resid_post", layer]
        np.testing.assert_allclose(found, expected.streams[site(layer)], atol=2e-3, rtol=0)
    assert out.signals.firings["cheer"].tolist() == expected.fired
    return expected


def test_an_update_of_a_session_leaves_a_rule_as_it_is(
    engine: rheostat.Engine, reference: HfReference
) -> None:
    _, late = bounds(engine)
    rule = rheostat.Rule(
        "cheer", probe(layers=LATE).above(late), rheostat.Steer(push()), hold="next_token"
    )
    firsts: list[int] = []
    with engine.session(
        PROMPT,
        steering=at_act(OWN),
        rules=rule,
        capture=EVERY_LAYER,
        max_tokens=60,
        **OPTIONS,
    ) as session:
        for event in session:
            if isinstance(event, rheostat.Tokens) and not firsts:
                firsts.append(session.steer(at_act(OTHER)))
            if isinstance(event, rheostat.UpdateApplied):
                firsts[0] = event.first_positions[0]
            assert not isinstance(event, rheostat.UpdateRefused), event
        out = session.result()
    (first,) = firsts
    length = len(out.prompt_token_ids)
    assert length < first < length + 50

    def act(x: Float, holds: Float) -> Float:
        own = np.where(np.arange(len(x))[:, None] < first, OWN, OTHER)
        return x + own + holds * PUSH[0]

    expected = check_followed(reference, out, late, act)
    assert {*expected.opened[length:first]} == {*expected.opened[first:]} == {False, True}
    found = {(one.origin, one.update_id): one for one in out.receipt.interventions}
    assert set(found) == {("request", None), ("rule", None), ("update", 1)}
    acted = sum(expected.opened)
    assert 0 <= found["rule", None].sites[0].row_count - acted <= 1


def test_a_layer_of_a_watch_leaves_gates_and_rules_as_they_are(
    server: Server, engine: rheostat.Engine, reference: HfReference
) -> None:
    early, late = bounds(engine)
    when = rheostat.gate(probe(name="early").above(early, for_tokens=2), hold=1)
    rule = rheostat.Rule(
        "cheer",
        probe(layers=LATE, name="late").above(late),
        rheostat.Steer(push()),
        hold="next_token",
    )
    never = rheostat.Rule("never", probe(name="mood").above(1e6))
    firsts: list[int] = []

    def steer(watch: Steerer) -> None:
        watch.until("signals", 6)
        watch._steer("red", layer=steering_to_wire([at_act(OTHER)]))
        (answer,) = watch.until("applied")
        firsts.append(answer.applied.first_positions[0].position)

    with Steerer(server, (never,)) as watch, ThreadPoolExecutor(1) as threads:
        future = threads.submit(steer, watch)
        out = engine.generate(
            PROMPT,
            request_id="red",
            labels=RED,
            steering=at_act(OWN).when(when),
            rules=rule,
            capture=EVERY_LAYER,
            max_tokens=60,
            **OPTIONS,
        )
        future.result()
    (first,) = firsts
    tokens, length = tokens_of(out), len(out.prompt_token_ids)
    assert length < first < length + 50
    z = reference.run(tokens, []).streams[site(READ)] @ MOOD[0].astype(np.float64)
    assert np.abs(z - early).min() > NEAR
    fired = (z > early) & np.append(False, z[:-1] > early)
    opened = (fired | np.append(False, fired[:-1])).astype(np.float32)[:, None]
    assert {*opened[first:, 0].tolist()} == {0.0, 1.0}

    def act(x: Float, holds: Float) -> Float:
        layer = (np.arange(len(x))[:, None] >= first) * OTHER
        return x + opened[: len(x)] * OWN + holds * PUSH[0] + layer

    expected = check_followed(reference, out, late, act)
    assert {*expected.opened[length:first]} == {*expected.opened[first:]} == {False, True}
    assert [one.origin for one in out.receipt.interventions] == ["request", "rule", "watch"]
    (by,) = out.receipt.watches
    assert by.changes[0].layer_size == 1
