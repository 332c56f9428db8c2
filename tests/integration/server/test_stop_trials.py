"""Rules that stop, at random bounds: no withheld token, row or signal reaches a client."""

import pytest

import rheostat

from ...effort import FACTOR, at_length
from .stop_trials import play

pytestmark = pytest.mark.integration

TRIALS = 100 * FACTOR


@at_length
def test_nothing_that_a_stop_withholds_reaches_a_client(engine: rheostat.Engine) -> None:
    found = play(engine, 0, range(TRIALS))
    assert not found.problems, "\n".join(found.problems[:20])
    assert found.counts["fires in: an answer"] > TRIALS // 2
    assert found.counts["fires in: a prompt"]
    assert found.withheld > TRIALS
