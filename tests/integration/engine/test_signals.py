"""Signals equal the captured rows that they were read from, for every chunk size and preemption."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from rheostat_engine import (
    Act,
    Activation,
    Combine,
    Form,
    Gate,
    GateCondition,
    Hold,
    Kind,
    Normalise,
    Plan,
    Pool,
    Reading,
    Signals,
)

from .offline import OfflineEngine, Outcome
from .plans import EVERYWHERE, capture, prompts, vector

pytestmark = pytest.mark.integration

Start = Callable[..., OfflineEngine]

SITE = 4
DIGEST, VALUES = vector(7)
READ = Act(
    Kind.READ,
    (DIGEST,),
    ((SITE, (0,)),),
    EVERYWHERE,
    reading=Reading(Normalise.NONE, Activation.IDENTITY, 0.0, 0.0, 0),
)


def mean_above(bound: float) -> Gate:
    """Open at each token at which the mean of all readings so far is above a bound."""
    condition = GateCondition((0,), Pool.MEAN, Combine.ANY, bound, math.inf)
    return Gate((condition,), Combine.ALL, Form.STEP, 0.5, 0.0, Hold.TOKEN)


def check(outcome: Outcome, end: int, bound: float) -> int:
    """Compares the signals with captured rows; returns at how many tokens the gate is open."""
    assert outcome.duplicates == 0
    assert sorted(outcome.signals) == list(range(end))
    rows = outcome.stream(SITE)[:end].astype(np.float64)
    z = rows @ VALUES[0].astype(np.float64)
    numbers = np.array([outcome.signals[p][0][0] for p in range(end)])
    np.testing.assert_allclose(numbers, z, rtol=1e-4, atol=1e-4)
    opened = np.array([outcome.signals[p][1][0] for p in range(end)])
    means = np.cumsum(z) / np.arange(1, end + 1)
    sure = np.abs(means - bound) > 1e-4
    assert (opened[sure] == (means > bound)[sure]).all()
    return int(opened.sum())


@pytest.mark.parametrize(
    ("options", "max_tokens"),
    [
        *(({"max_num_seqs": 4, "max_num_batched_tokens": chunk}, 5) for chunk in (4, 7, 64)),
        ({"max_num_seqs": 6, "num_gpu_blocks_override": 9}, 70),
    ],
    ids=["4", "7", "64", "preempted"],
)
def test_signals_are_those_of_the_captured_rows(
    start: Start, options: dict[str, object], max_tokens: int
) -> None:
    engine = start(**options)
    engine.load({DIGEST: VALUES})
    batch = prompts(6, 30, 40, seed=4)
    signals = Signals(1, (mean_above(0.0),), True)
    plan = Plan("", (READ,), capture(SITE).captures, signals=signals)
    outcomes = engine.run(batch, [plan] * 5 + [None], max_tokens=max_tokens)
    if max_tokens > 5:
        assert sum(one.released.preemptions for one in outcomes if one.released is not None) > 0
    ends = [len(prompt) + max_tokens - 1 for prompt in batch]
    opened = [check(one, end, 0.0) for one, end in zip(outcomes[:5], ends, strict=False)]
    assert 0 < sum(opened) < sum(ends[:5])
    assert not outcomes[5].signals
