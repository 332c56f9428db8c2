"""Hundreds of distinct configurations in one batch: each request is steered as if it were alone."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from rheostat_engine import OPEN_END, Act, Band, Kind, Plan

from .offline import OfflineEngine
from .plans import EVERYWHERE, prompts, vector

pytestmark = pytest.mark.integration

COUNT = 256
SITES = 9


@pytest.fixture(scope="module")
def engine(start: Callable[..., OfflineEngine]) -> Iterator[OfflineEngine]:
    engine = start(max_num_seqs=COUNT, max_num_batched_tokens=8192)
    engine.load(dict(vector(seed) for seed in range(COUNT)))
    yield engine
    stats = engine.stats()
    assert [stats[key] for key in stats if key.endswith("_used")] == [0] * 5


def configuration(number: int, length: int) -> Plan:
    """No two are alike: other vectors, sites, ops, doses and phases."""
    own, next_one = vector(number)[0], vector((number + 1) % COUNT)[0]
    site, other = number % SITES, (number // SITES) % SITES
    spans = [EVERYWHERE, ((0, length),), ((length, OPEN_END),)][number % 3]
    return Plan(
        "",
        (
            Act(Kind.ADD, (own,), ((site, (0,)),), spans, 0.5 + number / COUNT),
            Act(Kind.NORM_ADD, (next_one,), ((other, (0,)),), spans, 0.1 + number / COUNT / 2),
            Act(
                Kind.PULL,
                (own,),
                ((other, (0,)),),
                EVERYWHERE,
                bands=(Band(-0.1, 0.1 + number / COUNT, 0.9),),
            ),
        ),
    )


def test_256_distinct_configurations_in_one_batch_equal_their_solo_runs(
    engine: OfflineEngine,
) -> None:
    batch = prompts(COUNT, 4, 12, seed=31)
    plans = [configuration(i, len(prompt)) for i, prompt in enumerate(batch)]
    together = engine.run(batch, plans, max_tokens=4)
    plain = engine.run(batch, max_tokens=4)
    assert sum(a.token_ids != b.token_ids for a, b in zip(together, plain, strict=True)) > 200
    for prompt, plan, one in zip(batch, plans, together, strict=True):
        (alone,) = engine.run([prompt], [plan], max_tokens=4)
        assert one.token_ids == alone.token_ids
        for step in range(4):
            np.testing.assert_allclose(one.logits(step), alone.logits(step), rtol=0, atol=1e-3)
        assert one.released is not None
        assert alone.released is not None
        assert [dose[:3] for dose in one.released.doses] == [
            dose[:3] for dose in alone.released.doses
        ]


def test_the_same_batch_twice_costs_no_further_rows(engine: OfflineEngine) -> None:
    batch = prompts(COUNT, 4, 12, seed=31)
    plans = [configuration(i, len(prompt)) for i, prompt in enumerate(batch)]
    first = [outcome.token_ids for outcome in engine.run(batch, plans, max_tokens=2)]
    second = [outcome.token_ids for outcome in engine.run(batch, plans, max_tokens=2)]
    assert first == second
