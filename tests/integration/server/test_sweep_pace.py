"""Sweeps beside streams, while the engine holds their cells."""

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import rheostat

from .conftest import Server
from .test_sweeps import LONGER, Services, connected, grade, pb, sites, sweep

pytestmark = pytest.mark.integration


@pytest.fixture
def services(server: Server) -> Iterator[Services]:
    with connected(server) as found:
        yield found


def test_cells_that_the_engine_holds_beside_streams_are_those_of_a_sweep_alone(
    services: Services, engine: rheostat.Engine
) -> None:
    alone = sweep(services)
    stream = {"max_tokens": 480, "temperature": 0, "ignore_eos": True}
    plain = engine.generate(LONGER, **stream)
    with engine.stream(LONGER, **stream) as beside:
        next(beside)
        held = sweep(services)
        out = beside.result()
    assert out.token_ids == plain.token_ids
    assert held.cells.keys() == alone.cells.keys()
    np.testing.assert_allclose(held.grid(), alone.grid(), rtol=0, atol=1e-3)


def test_a_sweep_that_is_cancelled_while_its_cells_are_held_leaves_nothing(
    services: Services, engine: rheostat.Engine
) -> None:
    with engine.stream(LONGER, max_tokens=480, temperature=0, ignore_eos=True) as beside:
        next(beside)
        request = pb.SweepRequest(
            pairs=[services.pair()],
            sites=sites("resid_post"),
            grades=[grade("LOGIT_DIFFERENCE")],
        )
        call = services.sweeps.Sweep(request)
        until(lambda: engine.stats().waiting_request_count > 0)
        call.cancel()
        until(lambda: engine.stats().waiting_request_count == 0)
        assert engine.stats().running_request_count == 1, "the stream has ended too early"
        assert not services.run_ids()


def until(holds: Callable[[], bool]) -> None:
    """Returns once it holds."""
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)
