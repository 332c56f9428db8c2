"""A short soak: hostile and ordinary calls at random leave nothing, and change nobody's answer."""

import pytest

import rheostat
from rheostat_bench.abuse import Target
from rheostat_bench.soak import Served, soak

from ...effort import FACTOR, at_length
from .conftest import Server

pytestmark = pytest.mark.integration

CALLS = 100 * FACTOR


@at_length
def test_a_mixture_of_hostile_calls_leaves_nothing_and_changes_no_answer(
    server: Server, engine: rheostat.Engine
) -> None:
    info = engine.model()
    facts = Target(
        info.layer_count, info.width, info.vocabulary_size, info.limits.model_tokens, "disk"
    )
    found = soak(Served(server.target, server.log, server.process.pid, facts), CALLS, seed=0)
    assert found.problems() == []
    assert found.outcome.calls == CALLS
    assert found.outcome.endings["OK"] > CALLS / 10
