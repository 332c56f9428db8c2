"""Tokens that a watch vetoes while they are held back never reach the client, on a real engine."""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest

import rheostat

from .test_gates import PROMPT, READ, probe
from .test_watching import RED, Watcher

pytestmark = pytest.mark.integration

BLUE = {"team": "blue"}
HELD_BACK = 100
"""Tokens. The watcher's stop comes within the time that they take, also on a busy machine."""
COUNT = HELD_BACK + 60
OPTIONS = {
    "max_tokens": COUNT,
    "temperature": 0,
    "ignore_eos": True,
    "logprobs": 0,
    "probes": probe(name="own"),
    "capture": rheostat.Capture("resid_post", READ),
}


class Streamed(NamedTuple):
    """A request, and its tokens and texts as they came."""

    tokens: list[rheostat.Tokens]
    out: rheostat.Generation

    @property
    def token_ids(self) -> list[int]:
        return [token for event in self.tokens for token in event.token_ids]

    def text_of(self, count: int) -> str:
        """The text that had come with so many tokens."""
        text = ""
        for event in self.tokens:
            if count <= 0:
                break
            text += event.text
            count -= len(event.token_ids)
        return text


def ask(engine: rheostat.Engine, request_id: str, labels: dict[str, str]) -> Streamed:
    with engine.stream(
        PROMPT, request_id=request_id, labels=labels, hold_back=HELD_BACK, **OPTIONS
    ) as stream:
        tokens = [event for event in stream if isinstance(event, rheostat.Tokens)]
        return Streamed(tokens, stream.result())


def test_a_client_gets_nothing_of_tokens_that_a_watch_vetoes(engine: rheostat.Engine) -> None:
    plain = engine.generate(PROMPT, **OPTIONS)
    length = len(plain.prompt_token_ids)
    # The watcher vetoes from the token on that reads highest once enough tokens are held back.
    first = length + HELD_BACK + 5
    numbers = plain.signals["own"][first : first + 30]
    row, bound = first + int(np.argmax(numbers)), float(np.sort(numbers)[-2:].mean())
    with Watcher(engine, probes=probe(name="mood")) as watcher, ThreadPoolExecutor(2) as threads:
        vetoed, other = (
            threads.submit(ask, engine, name, labels)
            for name, labels in (("vetoed", RED), ("other", BLUE))
        )
        readings, fired = watcher.table, np.zeros(0)
        while not len(fired):
            watcher.next()
            if ("vetoed", 0) in readings:
                read = readings["vetoed", 0]
                fired = read.positions[(read.positions >= first) & (read["mood"] > bound)]
        watcher.watch.stop("vetoed", "too high")
        red, blue = vetoed.result(), other.result()
        watcher.ended("vetoed")
    assert fired[0] == row
    count, out = len(red.token_ids), red.out
    assert red.token_ids == list(out.token_ids) == list(plain.token_ids[:count])
    # Row r yields token r - length + 1. Tokens of the rows before `row` may come, and of no other.
    computed = int(readings["vetoed", 0].positions[-1]) - length + 2
    assert 0 < count <= min(row - length + 1, computed - HELD_BACK)
    assert red.text_of(count) == out.text
    assert blue.text_of(count).startswith(out.text)
    assert len(out.logprobs) == count
    for rows in (out.activations["resid_post", READ], out.signals["own"]):
        assert len(rows) <= length + count - 1
    assert (out.finish_reason, out.samples[0].label) == ("watch", "too high")
    assert [by.stopped_samples for by in out.receipt.watches] == [(0,)]
    assert blue.token_ids == list(plain.token_ids)
    assert (blue.out.finish_reason, blue.out.receipt.watches) == ("length", ())
