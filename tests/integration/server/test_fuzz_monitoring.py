"""Hostile gates, rules, gains and watches on a real server: typed errors only, nothing is left."""

import pytest

import rheostat

from ...effort import FACTOR, at_length
from .conftest import Server
from .hostile import SET_GLOBAL
from .hostile_monitoring import SHARES, attempts
from .monitoring_fuzz import play

pytestmark = pytest.mark.integration

ATTEMPTS = 120 * FACTOR


@at_length
def test_hostile_monitoring_ends_with_typed_errors_and_leaves_nothing(
    server: Server, engine: rheostat.Engine
) -> None:
    outcome = play(server.target, server.log, attempts(0, ATTEMPTS))
    assert not outcome.problems, "\n".join(outcome.problems[:20])
    assert sum(outcome.ends.values()) == ATTEMPTS
    assert outcome.neighbour_streams
    for method in SHARES:
        assert outcome.ends[f"{method} OK"] > 0.05 * ATTEMPTS * SHARES[method] / 100, outcome.ends
        refused = any(name.startswith(f"{method} REASON_") for name in outcome.ends)
        assert refused or method == SET_GLOBAL, outcome.ends  # which is called a few times alone
