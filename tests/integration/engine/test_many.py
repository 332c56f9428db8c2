"""Hundreds of distinct configurations in one batch: each request is steered as if it were alone."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from rheostat_engine import OPEN_END, Act, Band, Kind, Plan
from rheostat_engine.plan.needs import SHARED
from rheostat_engine.plan.points import site_count

from ...effort import at_length, some
from .models import LAYERS
from .offline import OfflineEngine
from .plans import EVERYWHERE, prompts, vector

pytestmark = pytest.mark.integration

COUNT = 256
SITES = site_count(LAYERS)


@pytest.fixture(scope="module")
def engine(start: Callable[..., OfflineEngine]) -> Iterator[OfflineEngine]:
    engine = start(max_num_seqs=COUNT, max_num_batched_tokens=8192)
    engine.load(dict(vector(seed) for seed in range(COUNT)))
    yield engine
    stats = engine.stats()
    used = [stats[key] for key in stats if key.endswith("_used")]
    assert used
    assert not any(used)


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


@at_length
def test_256_distinct_configurations_in_one_batch_equal_their_solo_runs(
    engine: OfflineEngine,
) -> None:
    batch = prompts(COUNT, 4, 12, seed=31)
    plans = [configuration(i, len(prompt)) for i, prompt in enumerate(batch)]
    together = engine.run(batch, plans, max_tokens=4)
    plain = engine.run(batch, max_tokens=4)
    assert sum(a.token_ids != b.token_ids for a, b in zip(together, plain, strict=True)) > 200
    numbers = some(range(COUNT), *range(0, COUNT, 4))
    for prompt, plan, one in [(batch[i], plans[i], together[i]) for i in numbers]:
        (alone,) = engine.run([prompt], [plan], max_tokens=4)
        assert one.token_ids == alone.token_ids
        for step in range(4):
            np.testing.assert_allclose(one.logits(step), alone.logits(step), rtol=0, atol=1e-4)
        assert one.released is not None
        assert alone.released is not None
        assert [dose[:3] for dose in one.released.doses] == [
            dose[:3] for dose in alone.released.doses
        ]


def contents(plan: Plan) -> tuple[list[int], list[int], list[int]]:
    """Key, resource and weight of everything that the workers hold for the acts of a plan."""
    keys, resources, weights = plan.packed_acts.needs
    return keys.tolist(), resources.tolist(), weights.tolist()


def held(engine: OfflineEngine, batch: list[list[int]], plans: list[Plan]) -> dict[str, int]:
    """The most of each table that a batch held at once."""
    most = dict.fromkeys((key for key in engine.stats() if key.endswith("_used")), 0)
    step = engine.llm.llm_engine.step

    def watched() -> object:
        made = step()
        stats = engine.stats()
        most.update({key: max(count, stats[key]) for key, count in most.items()})
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.llm.llm_engine, "step", watched)
        engine.run(batch, plans, max_tokens=3)
    return {key.removesuffix("_used"): count for key, count in most.items()}


def test_requests_that_are_steered_alike_share_what_they_need(engine: OfflineEngine) -> None:
    batch = prompts(COUNT // 2, 8, 9, seed=31)
    plans = [configuration(i, 8) for i in range(COUNT // 2)]
    once = held(engine, batch, plans)
    needed = dict.fromkeys(once, 0)
    shared = {
        key: (resource, n) for one in plans for key, resource, n in zip(*contents(one), strict=True)
    }
    for resource, count in shared.values():
        if SHARED[resource] in needed:
            needed[SHARED[resource]] += count
    assert once == needed
    assert once["bank_rows"] == COUNT // 2
    assert held(engine, batch * 2, plans * 2) == once
    others = [configuration(i, 8) for i in range(COUNT // 2, COUNT)]
    assert held(engine, batch * 2, plans + others)["bank_rows"] == COUNT
