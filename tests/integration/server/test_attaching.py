"""Subscriptions join requests that run, on the real engine: Hugging Face's rows, each once."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event
from typing import Any

import numpy as np
import pytest

import rheostat
from rheostat import positions

from ..engine.reference import HfReference
from .test_subscriptions import (
    LAYERS,
    POINTS,
    assert_huggingface,
    collected,
    everywhere,
    prompt,
    until_ended,
)

pytestmark = pytest.mark.integration

OPTIONS = {"temperature": 0, "ignore_eos": True}
LONG = 150
OWN: dict[str, dict[str, Any]] = {
    "no plan": {},
    "its own capture": {"capture": rheostat.Capture("resid_post", layers=[1, 2])},
    "a capture of one position": {"capture": rheostat.Capture("attn_out", where=positions(0))},
}


def until_token(stream: Iterator[rheostat.Event], count: int = 3) -> None:
    """Reads until some tokens have come."""
    while count:
        count -= isinstance(next(stream), rheostat.Tokens)


def first_of(subscription: rheostat.Subscription, request_id: str) -> int:
    """From where a request is captured."""
    (one,) = (one for one in subscription.attached if one.request_id == request_id)
    assert one.first_position is not None
    return one.first_position


def assert_from(
    first: int,
    mine: dict[tuple[str, int, int], np.ndarray],
    reference: HfReference,
    out: rheostat.Generation,
    sites: Sequence[tuple[str, int]],
) -> None:
    assert first > len(out.prompt_token_ids)
    assert_huggingface(mine, reference, out, sites, lambda p, token, n: p >= first)


@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
def test_rows_begin_where_it_is_said_and_are_those_of_a_full_capture(
    engine: rheostat.Engine, reference: HfReference, own: dict[str, Any]
) -> None:
    alone = engine.generate(prompt(1, 30), max_tokens=LONG, **OPTIONS)
    with engine.stream(
        prompt(1, 30), request_id="runs", max_tokens=LONG, **own, **OPTIONS
    ) as stream:
        until_token(stream)
        with (
            engine.subscribe(every=True, capture=rheostat.Capture(POINTS)) as one,
            engine.subscribe(
                requests=["runs"], capture=rheostat.Capture("resid_post", layers=[1, 4])
            ) as two,
        ):
            firsts = [first_of(each, "runs") for each in (one, two)]
            out = stream.result()
            events = [until_ended(each, 1) for each in (one, two)]
    assert out.token_ids == alone.token_ids
    assert firsts[0] <= firsts[1]
    for first, sites, (*rows, end) in zip(
        firsts,
        (everywhere(POINTS, range(LAYERS)), everywhere(["resid_post"], [1, 4])),
        events,
        strict=True,
    ):
        assert_from(first, collected(rows)["runs"], reference, out, sites)
        assert isinstance(end, rheostat.EndOfRequest)
        assert end.attached == (rheostat.Attached("runs", 0, False, first),)
        assert end.dropped_row_count == 0


def test_every_sample_is_joined(engine: rheostat.Engine) -> None:
    with engine.stream(
        prompt(2, 20), request_id="many", n=2, seed=7, max_tokens=LONG, ignore_eos=True
    ) as stream:
        until_token(stream, 6)
        with engine.subscribe(every=True, capture=rheostat.Capture("resid_mid", layers=[3])) as sub:
            firsts = {one.sample: one.first_position for one in sub.attached}
            stream.result()
            events = until_ended(sub, 1)
    found: dict[int, list[int]] = {0: [], 1: []}
    for event in events:
        if isinstance(event, rheostat.CapturedRows):
            found[event.sample] += event.positions.tolist()
    for sample, first in firsts.items():
        assert first is not None
        assert found[sample] == list(range(first, 20 + LONG - 1))


def test_a_full_server_is_joined_and_every_request_ends(engine: rheostat.Engine) -> None:
    """More requests than run at a time: those that wait are captured from their beginnings."""
    subscribed = Event()

    def run(number: int) -> dict[str, rheostat.Generation]:
        """Requests one after the other, until the subscription is open."""
        found: dict[str, rheostat.Generation] = {}
        while not found or not subscribed.is_set():
            name = f"crowd-{number}-{len(found)}"
            found[name] = engine.generate(
                prompt(number, 24), request_id=name, max_tokens=60, **OPTIONS
            )
        return found

    with ThreadPoolExecutor(48) as pool, ExitStack() as stack:
        stack.callback(subscribed.set)
        runs = [pool.submit(run, number) for number in range(48)]
        with engine.stream(prompt(99, 20), request_id="sign", max_tokens=4, **OPTIONS) as stream:
            until_token(stream, 1)
            with engine.subscribe(
                every=True, capture=rheostat.Capture("resid_post", layers=[0])
            ) as subscription:
                subscribed.set()
                outs = {name: out for one in runs for name, out in one.result().items()}
                late = engine.generate(prompt(3, 10), request_id="late", max_tokens=3, **OPTIONS)
                events = []
                while not any(
                    isinstance(e, rheostat.EndOfRequest) and e.request_id == "late" for e in events
                ):
                    events.append(next(subscription))
    rows = collected(events)
    assert len(rows["late"]) == 12
    assert late.token_ids
    ends = {e.request_id: e for e in events if isinstance(e, rheostat.EndOfRequest)}
    assert not subscription.missed or set(subscription.missed) <= set(outs) | {"sign"}
    joined = [end for name, end in ends.items() if name in outs and end.attached]
    for end in joined:
        first = end.attached[0].first_position
        got = sorted(position for _, _, position in rows.get(end.request_id, {}))
        last = 24 + 60 - 1
        assert got == list(range(last if first is None else first, last))
        assert end.dropped_row_count == 0
    assert joined
