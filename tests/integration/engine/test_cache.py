"""The prefix cache under steering: what is shared, what is not, and that a hit changes nothing."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from rheostat_engine import (
    OPEN_END,
    Act,
    Activation,
    Band,
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
    Spans,
    Window,
)

from .models import VOCAB
from .offline import OfflineEngine, Outcome
from .plans import EVERYWHERE, add, prompts, put, steer, vector

pytestmark = pytest.mark.integration

BLOCK = 32
SHARED = 1500
"""Tokens that the prompts have in common."""
MATES = 24
"""Requests that run together."""


def ablate(seed: int, site: int, spans: Spans = EVERYWHERE) -> Act:
    return Act(Kind.PULL, (vector(seed)[0],), ((site, (0,)),), spans, bands=(Band(0.0, 0.0, 1.0),))


def late_gate(seed: int) -> Plan:
    """An addition under a gate that the prompt's last token decides, and leaves shut."""
    last = SHARED + 19
    reading = Reading(Normalise.UNIT, Activation.IDENTITY, 0.0, 0.0, 0)
    where = ((last, last + 1),)
    read = Act(Kind.READ, (vector(0)[0],), ((8, (0,)),), where, reading=reading)
    condition = GateCondition((0,), Pool.LAST, Combine.ANY, 1e6, math.inf, 1, last)
    gate = Gate((condition,), Combine.ALL, Form.STEP, 0.5, 0.0, Hold.REST, late=last + 1)
    return steer(replace(add(seed, 4), gate=gate), read)


@pytest.fixture(scope="module")
def engine(start: Callable[..., OfflineEngine]) -> Iterator[OfflineEngine]:
    engine = start(
        hf_overrides={"max_position_embeddings": 4096},
        max_model_len=2048,
        max_num_seqs=MATES,
        max_num_batched_tokens=2048,
        block_size=BLOCK,
    )
    engine.load(dict(vector(seed) for seed in range(40)))
    yield engine
    stats = engine.stats()
    used = [stats[key] for key in stats if key.endswith("_used")]
    assert used
    assert not any(used)


def cold(engine: OfflineEngine) -> None:
    assert engine.llm.reset_prefix_cache()


def close(one: Outcome, other: Outcome) -> bool:
    """Equal up to what a hit changes: which tokens are computed in one matrix product."""
    return one.token_ids == other.token_ids and all(
        np.abs(one.logits(step) - other.logits(step)).max() < 1e-3
        for step in range(len(one.token_ids))
    )


def hit_rate(engine: OfflineEngine, warm: Plan | None, plans: list[Plan | None]) -> float:
    """Part of the shared tokens that `plans` find in the cache after `warm` has run."""
    cold(engine)
    rng = np.random.default_rng(11)
    prefix = rng.integers(3, VOCAB, SHARED).tolist()
    tails = rng.integers(3, VOCAB, (MATES, 20)).tolist()
    engine.run([prefix], [warm], max_tokens=1, skip_cache=False)
    batch = [prefix + tail for tail in tails]
    outcomes = engine.run(batch[: len(plans)], plans, max_tokens=2, skip_cache=False, logprobs=0)
    return sum(outcome.cached for outcome in outcomes) / (len(plans) * SHARED)


def test_unsteered_requests_share_the_prompt(engine: OfflineEngine) -> None:
    assert hit_rate(engine, None, [None] * MATES) >= 0.98


def test_requests_that_are_steered_alike_share_the_prompt(engine: OfflineEngine) -> None:
    alike = steer(add(0, 4), ablate(1, 6))
    assert hit_rate(engine, alike, [alike] * MATES) >= 0.98


def test_decode_only_steering_shares_the_plain_prompt_whatever_it_does(
    engine: OfflineEngine,
) -> None:
    after = ((SHARED + 20, OPEN_END),)
    plans = [steer(add(i, 4, after), ablate(i + 1, 3, after)) for i in range(MATES)]
    assert hit_rate(engine, None, list(plans)) >= 0.98


def test_steering_from_the_middle_shares_what_lies_before(engine: OfflineEngine) -> None:
    plans = [steer(add(i, 4, ((750, OPEN_END),))) for i in range(MATES)]
    rate = hit_rate(engine, None, list(plans))
    assert rate == (750 // BLOCK) * BLOCK / SHARED


def test_requests_whose_late_gate_stays_shut_share_the_plain_prompt(engine: OfflineEngine) -> None:
    assert hit_rate(engine, None, [late_gate(i) for i in range(MATES)]) >= 0.98


@pytest.mark.parametrize(
    "other",
    [
        steer(add(1, 4)),
        steer(add(0, 3)),
        steer(add(0, 4, scale=1.0000001)),
        steer(add(0, 4), add(1, 8)),
        steer(ablate(0, 4)),
        steer(add(0, 4, ((0, 5), (6, OPEN_END)))),
        steer(put(0, 4, EVERYWHERE)),
        None,
    ],
    ids=["vector", "site", "scale", "one more", "op", "one position less", "replaced", "none"],
)
def test_different_steering_shares_nothing(engine: OfflineEngine, other: Plan | None) -> None:
    assert hit_rate(engine, steer(add(0, 4)), [other]) == 0


def test_the_order_of_additions_does_not_keep_requests_apart(engine: OfflineEngine) -> None:
    one, other = steer(add(0, 4), add(1, 4)), steer(add(1, 4), add(0, 4))
    assert hit_rate(engine, one, [other] * MATES) >= 0.98


PLANS: dict[str, Plan | None] = {
    "plain": None,
    "steered": steer(add(0, 4, scale=2.0), ablate(1, 6)),
    "decode": steer(add(0, 4, ((100, OPEN_END),), 2.0)),
    "middle": steer(add(2, 3, ((40, 70),), 3.0)),
    "replaced": steer(put(2, 3, ((40, 41),)), put(5, 3, ((41, 45), (102, 104)))),
}


SHARING = {
    **{frozenset({name}): 96 for name in PLANS},
    frozenset({"plain", "decode"}): 96,
    frozenset({"plain", "middle"}): 32,
    frozenset({"decode", "middle"}): 32,
    frozenset({"plain", "replaced"}): 32,
    frozenset({"decode", "replaced"}): 32,
    frozenset({"middle", "replaced"}): 32,
    frozenset({"plain", "steered"}): 0,
    frozenset({"decode", "steered"}): 0,
    frozenset({"middle", "steered"}): 0,
    frozenset({"replaced", "steered"}): 0,
}
"""Tokens of a prompt of 100 that two plans have in common."""


@pytest.mark.parametrize("first", PLANS)
@pytest.mark.parametrize("second", PLANS)
def test_what_a_request_finds_in_the_cache_is_what_it_would_have_computed(
    engine: OfflineEngine, first: str, second: str
) -> None:
    (prompt,) = prompts(1, 100, 101, seed=21)
    cold(engine)
    (alone,) = engine.run([prompt], [PLANS[second]], max_tokens=8)
    cold(engine)
    engine.run([prompt], [PLANS[first]], max_tokens=8, skip_cache=False)
    (after,) = engine.run([prompt], [PLANS[second]], max_tokens=8, skip_cache=False)
    assert close(alone, after)
    assert after.cached == SHARING[frozenset({first, second})]


@pytest.mark.parametrize("second", PLANS)
def test_what_was_generated_under_steering_is_not_read_as_a_plain_prompt(
    engine: OfflineEngine, second: str
) -> None:
    """The next turn of a conversation: its prompt is the whole of the one before."""
    (prompt,) = prompts(1, 100, 101, seed=22)
    cold(engine)
    (turn,) = engine.run([prompt], [PLANS["decode"]], max_tokens=60, skip_cache=False)
    whole = prompt + turn.token_ids
    (warm,) = engine.run([whole], [PLANS[second]], max_tokens=8, skip_cache=False)
    (alone,) = engine.run([whole], [PLANS[second]], max_tokens=8)
    assert close(alone, warm)
    shared = {"plain": 96, "steered": 0, "decode": 128, "middle": 32, "replaced": 32}
    assert warm.cached == shared[second]


def test_private_blocks_are_read_by_nobody(engine: OfflineEngine) -> None:
    (prompt,) = prompts(1, 100, 101, seed=23)
    cold(engine)
    private = Plan("", private_from=64)
    engine.run([prompt], [private], skip_cache=False)
    (other,) = engine.run([prompt], [None], skip_cache=False)
    assert other.cached == 64


@pytest.mark.parametrize("everywhere", [(), (add(9, 3),)], ids=["plain", "steered"])
def test_cells_copy_the_part_of_a_block_before_their_row(
    engine: OfflineEngine, everywhere: tuple[Act, ...]
) -> None:
    prompt = np.random.default_rng(12).integers(3, VOCAB, 3 * BLOCK + 5).tolist()
    places = [*range(BLOCK - 2, BLOCK + 12, 3), 2 * BLOCK + 1, 3 * BLOCK - 1, 3 * BLOCK + 2]
    columns = tuple(put(n, 6, ((at, at + 1),)) for n, at in enumerate(places))
    first = len(everywhere)
    shared = Plan("", (*everywhere, *columns), measured=False, window=Window(0, 1, first)).pack()
    alone = [steer(*everywhere, column) for column in columns]
    wanted = engine.run([prompt] * len(alone), list(alone), max_tokens=2)
    cold(engine)
    engine.run([prompt], [steer(*everywhere) if everywhere else None], skip_cache=False)
    cells = [shared.for_request("", 0, Window(at, at + 1, first)) for at in places]
    found = engine.run([prompt] * len(cells), list(cells), max_tokens=2, skip_cache=False)
    assert [one.cached for one in found] == [min(at, 3 * BLOCK) for at in places]
    assert all(close(*both) for both in zip(found, wanted, strict=True))
    # A copy with a replaced row behind it is found by equal cells alone.
    again = engine.run([prompt] * 2, [cells[2], None], max_tokens=2, skip_cache=False)
    assert [one.cached for one in again] == [3 * BLOCK, 0 if everywhere else 3 * BLOCK]
    assert close(again[0], wanted[2])
