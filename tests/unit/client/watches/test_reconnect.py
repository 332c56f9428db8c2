"""Watches whose connection breaks: nothing is lost, nothing comes twice."""

from contextlib import closing

import pytest

from ....effort import FACTOR, at_length
from ...server.holding import HoldingBackend
from ..cutting_proxy import CuttingProxy
from .cuts import cut_watch

CUTS = 10 * FACTOR


@at_length
@pytest.mark.parametrize("on_lost", ["continue", "hold"])
def test_connections_that_are_cut_anywhere_lose_and_repeat_nothing(starter, kind, on_lost) -> None:
    running = starter(HoldingBackend())
    with closing(CuttingProxy(running.port)) as proxy:
        found = cut_watch(running, proxy, kind(proxy.target), CUTS, seed=5, on_lost=on_lost)
    assert found.cuts == CUTS
    assert found.readings == 7 * found.requests > 0
    assert (found.lost, found.repeated, found.wrong) == (0, 0, 0)
    assert not running.backend.held
