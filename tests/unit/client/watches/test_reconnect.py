"""Watches whose connection breaks: nothing is lost, nothing comes twice."""

from collections.abc import Iterator

import pytest

from ....effort import FACTOR, at_length
from ..cutting_proxy import CuttingProxy
from .cuts import cut_watch

CUTS = 10 * FACTOR


@pytest.fixture
def proxy(running) -> Iterator[CuttingProxy]:
    one = CuttingProxy(running.port)
    yield one
    one.close()


@at_length
def test_connections_that_are_cut_anywhere_lose_and_repeat_nothing(running, proxy, kind) -> None:
    found = cut_watch(running, proxy, kind(proxy.target), CUTS, seed=5)
    assert found.cuts == CUTS
    assert found.readings == 7 * found.requests > 0
    assert (found.lost, found.repeated, found.wrong) == (0, 0, 0)
