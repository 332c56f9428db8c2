"""Rows of other requests, live, from the real engine: Hugging Face's rows, each once."""

import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import rheostat
from rheostat import captures, generated, positions, token_ids, window
from rheostat._subscriptions import shared_memory
from rheostat_engine import Point, Site
from rheostat_wire.v1 import tensor_pb2

from ..engine.reference import HfReference
from .conftest import Server

pytestmark = pytest.mark.integration

OPTIONS = {"temperature": 0, "ignore_eos": True}
POINTS = ("resid_pre", "attn_out", "resid_mid", "mlp_out", "resid_post")
LAYERS = 6
TOLERANCE = 2e-5

Holds = Callable[[int, int, int], bool]
"""Whether a selector selects (position, token, P), said in the simplest way."""
Row = np.ndarray
Key = tuple[str, int, int]
"""Point, layer, position."""


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng([seed, 5]).integers(3, 1900, length).tolist()


def collected(events: Sequence[rheostat.SubscriptionEvent]) -> dict[str, dict[Key, Row]]:
    """Rows by request; each once."""
    found: dict[str, dict[Key, Row]] = {}
    for event in events:
        if isinstance(event, rheostat.CapturedRows):
            mine = found.setdefault(event.request_id, {})
            for rows in event.rows:
                for position, row in zip(rows.positions.tolist(), rows.values, strict=True):
                    key = (str(rows.point), rows.layer, position)
                    assert key not in mine
                    mine[key] = row
    return found


def until_ended(
    subscription: rheostat.Subscription, count: int
) -> list[rheostat.SubscriptionEvent]:
    """Everything up to the end of so many requests."""
    events: list[rheostat.SubscriptionEvent] = []
    while count:
        events.append(next(subscription))
        count -= isinstance(events[-1], rheostat.EndOfRequest)
    return events


def assert_huggingface(
    mine: dict[Key, Row],
    reference: HfReference,
    out: rheostat.Generation,
    sites: Sequence[tuple[str, int]],
    holds: Holds,
) -> None:
    """Exactly the rows that are selected have come, and they are Hugging Face's."""
    length, tokens = len(out.prompt_token_ids), [*out.prompt_token_ids, *out.token_ids[:-1]]
    wanted = [p for p, token in enumerate(tokens) if holds(p, token, length)]
    assert sorted(mine) == sorted((point, layer, p) for point, layer in sites for p in wanted)
    streams = reference.run(tokens).streams
    for (point, layer, position), row in mine.items():
        expected = streams[Site(Point(point), layer).index][position]
        np.testing.assert_allclose(row, expected, rtol=TOLERANCE, atol=TOLERANCE)


def everywhere(points: Sequence[str], layers: Sequence[int]) -> list[tuple[str, int]]:
    return [(point, layer) for point in points for layer in layers]


SELECTORS: st.SearchStrategy[tuple[rheostat.Selector | str, Holds]] = st.one_of(
    st.just(("prompt", lambda p, token, n: p < n)),
    st.just(("generated", lambda p, token, n: p >= n)),
    st.just(("all", lambda p, token, n: True)),
    st.tuples(st.integers(0, 30), st.integers(1, 20)).map(
        lambda at: (window(at[0], sum(at)), lambda p, token, n: at[0] <= p < sum(at))
    ),
    st.tuples(st.integers(0, 7), st.integers(-8, -1)).map(
        lambda at: (positions(*at), lambda p, token, n: p in (at[0], n + at[1]))
    ),
    st.tuples(st.integers(0, 4), st.integers(1, 4)).map(
        lambda at: (
            generated(at[0], sum(at)),
            lambda p, token, n: n + at[0] <= p < n + sum(at),
        )
    ),
    st.sets(st.integers(3, 60), min_size=1).map(
        lambda ids: (token_ids(*ids), lambda p, token, n: token in ids)
    ),
    st.sets(st.integers(3, 60), min_size=1).map(
        lambda ids: ("prompt" - token_ids(*ids), lambda p, token, n: p < n and token not in ids)
    ),
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    picked=SELECTORS,
    length=st.integers(9, 40),
    tokens=st.integers(2, 6),
    points=st.lists(st.sampled_from(POINTS), min_size=1, max_size=3, unique=True),
    layers=st.lists(st.integers(0, LAYERS - 1), min_size=1, max_size=2, unique=True),
    seed=st.integers(0, 9),
)
def test_a_subscriber_gets_hugging_faces_rows_for_any_selector(
    engine: rheostat.Engine,
    reference: HfReference,
    picked: tuple[rheostat.Selector | str, Holds],
    length: int,
    tokens: int,
    points: list[str],
    layers: list[int],
    seed: int,
) -> None:
    where, holds = picked
    ids = (np.array(prompt(seed, length)) % 60 + 3).tolist()
    capture = rheostat.Capture(points, layers=sorted(layers), where=where)
    with engine.subscribe(every=True, capture=capture) as subscription:
        out = engine.generate(ids, max_tokens=tokens, **OPTIONS)
        *events, end = until_ended(subscription, 1)
    mine = collected(events).get(out.request_id, {})
    assert_huggingface(mine, reference, out, everywhere(points, layers), holds)
    assert isinstance(end, rheostat.EndOfRequest)
    assert (end.row_count, end.dropped_row_count) == (len(mine), 0)


def test_several_subscribers_watch_a_full_batch_and_it_does_not_notice(
    engine: rheostat.Engine, reference: HfReference
) -> None:
    prompts = [prompt(seed, 20 + 7 * seed) for seed in range(16)]

    def run(number: int) -> rheostat.Generation:
        return engine.generate(
            prompts[number], request_id=f"watched-{number}", max_tokens=12, **OPTIONS
        )

    alone = [run(number) for number in range(16)]
    everything = rheostat.Capture(POINTS)
    last = rheostat.Capture("resid_post", layers=[2], where=positions(-1))
    with (
        engine.subscribe(every=True, capture=everything) as one,
        engine.subscribe(requests=["watched-3", "watched-5"], capture=last) as two,
        ThreadPoolExecutor(16) as pool,
    ):
        outs = list(pool.map(run, range(16)))
        first, second = collected(until_ended(one, 16)), collected(until_ended(two, 2))
    assert [out.token_ids for out in outs] == [out.token_ids for out in alone]
    sites = everywhere(POINTS, range(LAYERS))
    for out in outs[:6]:
        assert_huggingface(first[out.request_id], reference, out, sites, lambda p, t, n: True)
    total = sum(len(out.prompt_token_ids) + 11 for out in outs) * len(sites)
    assert sum(map(len, first.values())) == total
    assert {name: sorted(rows) for name, rows in second.items()} == {
        f"watched-{number}": [("resid_post", 2, len(prompts[number]) - 1)] for number in (3, 5)
    }


def test_a_stalled_reader_loses_rows_and_nobody_else_does(engine: rheostat.Engine) -> None:
    capture = rheostat.Capture(POINTS)
    request_message = {"overload": "drop_newest", "buffer_bytes": 1 << 20, "credit": 1 << 20}
    with engine.subscribe(every=True, capture=capture, **request_message) as subscription:

        def run(number: int) -> rheostat.Generation:
            own = rheostat.Capture("resid_post", layers=[1])
            return engine.generate(prompt(number, 30), capture=own, max_tokens=10, **OPTIONS)

        with ThreadPoolExecutor(16) as pool:
            outs = list(pool.map(run, range(64)))
        assert all(len(out.activations["resid_post", 1]) == 39 for out in outs)
        ends = [e for e in until_ended(subscription, 64) if isinstance(e, rheostat.EndOfRequest)]
    assert {end.row_count + end.dropped_row_count for end in ends} == {39 * len(POINTS) * LAYERS}
    assert sum(end.dropped_row_count for end in ends) > 0


SUBSCRIBER = """
import sys, rheostat
engine = rheostat.connect(sys.argv[1])
subscription = engine.subscribe(every=True, capture=rheostat.Capture("resid_post"), ack="manual")
print(subscription.id, flush=True)
for event in subscription:
    ended = isinstance(event, rheostat.EndOfRequest)
    rows = 0 if ended else event.values.shape[0] * event.values.shape[1]
    line = f"{event.sequence} {rows} {int(ended)}\\n"
    sys.stdout.write(line)  # in one piece, so that a kill never leaves half a line
    sys.stdout.flush()
    subscription.ack()
"""


def test_a_subscriber_that_is_killed_is_taken_up_where_it_was(
    server: Server, engine: rheostat.Engine, reference: HfReference
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SUBSCRIBER, server.target], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child.stdout as said, ThreadPoolExecutor(4) as pool:
        name = said.readline().strip()
        runs = [
            pool.submit(engine.generate, prompt(number, 20), max_tokens=20, **OPTIONS)
            for number in range(12)
        ]
        lines = [said.readline() for _ in range(5)]
        child.send_signal(signal.SIGKILL)
        lines += said.readlines()
        child.wait()
        outs = [run.result() for run in runs]
    told = [tuple(map(int, line.split())) for line in lines]
    last, ended = told[-1][0], sum(one[2] for one in told)
    assert [one[0] for one in told] == list(range(1, last + 1))
    with engine.resume(rheostat.Cursor(name, last)) as subscription:
        events = until_ended(subscription, 12 - ended)
    assert [event.sequence for event in events] == list(range(last + 1, last + 1 + len(events)))
    mine = collected(events)
    rows = sum(one[1] for one in told) + sum(map(len, mine.values()))
    assert rows == sum(len(out.prompt_token_ids) + 19 for out in outs) * LAYERS
    for out in outs:
        streams = reference.run([*out.prompt_token_ids, *out.token_ids[:-1]]).streams
        for (point, layer, position), row in mine.get(out.request_id, {}).items():
            expected = streams[Site(Point(point), layer).index][position]
            np.testing.assert_allclose(row, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_rows_through_shared_memory_are_those_inside_messages_bit_for_bit(
    engine: rheostat.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    payload = shared_memory.Mapping.payload

    def counted(mapping: shared_memory.Mapping, ref: tensor_pb2.ShmRef) -> shared_memory.Payload:
        lengths.append(ref.length)
        return payload(mapping, ref)

    monkeypatch.setattr(shared_memory.Mapping, "payload", counted)
    capture = rheostat.Capture(POINTS)
    with (
        engine.subscribe(every=True, capture=capture, shared_memory=False) as plain,
        engine.subscribe(every=True, capture=capture, shared_memory=True) as shared,
    ):
        for number in range(4):
            engine.generate(prompt(number, 400 + number), max_tokens=6, **OPTIONS)
        one, other = collected(until_ended(plain, 4)), collected(until_ended(shared, 4))
    assert sum(lengths) > 4 * 400 * len(POINTS) * LAYERS * 128 * 4 // 2
    assert set(one) == set(other)
    assert sorted(map(len, one.values())) == [
        (400 + number + 5) * len(POINTS) * LAYERS for number in range(4)
    ]
    for name, rows in one.items():
        assert rows.keys() == other[name].keys()
        assert all(row.tobytes() == other[name][key].tobytes() for key, row in rows.items())


def test_rows_in_a_sink_are_those_of_the_answer(engine: rheostat.Engine, sink_root: Path) -> None:
    sink = rheostat.Sink("disk", tag="as-answered", layout="sharded")
    out = engine.generate(
        prompt(1, 30),
        capture=[rheostat.Capture(POINTS, to=sink), rheostat.Capture(POINTS)],
        max_tokens=9,
        **OPTIONS,
    )
    store = captures.open_captures(sink_root, tag="as-answered")
    for point, layer in everywhere(POINTS, range(LAYERS)):
        found = store.rows_of(out.request_id, point, layer)
        assert np.array_equal(found.values, out.activations[point, layer])
    assert {one.state for one in engine.artifacts(out.request_id)} == {"complete"}
