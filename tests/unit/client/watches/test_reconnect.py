"""Watches whose connection breaks: nothing is lost, nothing comes twice."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import rheostat

from ....effort import FACTOR, at_length
from ...server.fakes import WIDTH, reading
from ..cutting_proxy import CuttingProxy

WIDE = rheostat.probe(
    rheostat.inline(np.ones((1, WIDTH), np.float32)), points="resid_post", layers=[0, 1]
)
TOKENS = 5
BACKLOG = 200
"""Most requests whose end, and most updates whose answer was not read."""
CUTS = 10 if FACTOR == 1 else 100 * FACTOR


@pytest.fixture
def proxy(running) -> Iterator[CuttingProxy]:
    one = CuttingProxy(running.port)
    yield one
    one.close()


@at_length
def test_connections_that_are_cut_anywhere_lose_and_repeat_nothing(running, proxy, kind) -> None:
    """The sockets are reset while messages travel in both directions."""

    def ask() -> None:
        while not enough.is_set():
            if len(asked) - len(table.ended) > BACKLOG:  # more would fill the buffer
                enough.wait(0.01)
                continue
            asked.append(f"r{len(asked)}")
            running.generate(asked[-1], tokens=TOKENS)

    rng = random.Random(5)
    asked: list[str] = []
    enough = threading.Event()
    events: list[rheostat.WatchEvent] = []
    answers: list[rheostat.UpdateApplied | rheostat.UpdateRefused] = []
    table = rheostat.WatchTable()
    sent: list[int] = []

    def take(watch) -> None:
        event = next(watch)
        if isinstance(event, rheostat.UpdateApplied | rheostat.UpdateRefused):
            answers.append(event)
        else:
            events.append(event)
            table.add(event)

    with (
        ThreadPoolExecutor(1) as threads,
        kind(proxy.target).watch(probes=WIDE, every=True, credit=1 << 10) as watch,
    ):
        asking = threads.submit(ask)
        cuts = 0
        try:
            while cuts < CUTS:
                take(watch)
                if rng.random() < 0.05 and len(sent) - len(answers) < BACKLOG:
                    sent.append(watch.stop("nobody"))
                if rng.random() < 0.3:
                    cuts += proxy.cut() > 0
        finally:
            enough.set()
        asking.result(30)
        while len(table.ended) < len(asked) or len(answers) < len(sent):
            take(watch)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert set(table.ended) == set(asked)
    expected = [[reading(0, p), reading(1, p)] for p in range(3 + TOKENS - 1)]
    for name in asked:
        readings = table[name, 0]
        assert readings.positions.tolist() == list(range(len(expected)))
        assert readings[WIDE].tolist() == expected
        assert table.ended[name].dropped_position_count == 0
    assert sorted(one.update_id for one in answers) == sent
