"""Selectors are exact for every schedule: chunked prefill, preemption, a warm prefix cache."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from rheostat_engine import OPEN_END, Act, Band, Kind, Plan, Spans, TokenCondition

from .groups import COMPILED, IN_TIGHT, PLAIN, TIGHT
from .models import VOCAB, build
from .offline import OfflineEngine, Outcome
from .plans import EVERYWHERE, add, as_hooks, capture, prompts, put, steer, vector
from .reference import HfReference

pytestmark = pytest.mark.integration

VECTORS = 3
Start = Callable[..., OfflineEngine]


@pytest.fixture(scope="module")
def reference(models_root: Path) -> HfReference:
    return HfReference("llama", build("llama", models_root))


def load(engine: OfflineEngine) -> OfflineEngine:
    engine.load(dict(vector(seed) for seed in range(VECTORS)))
    return engine


def assert_as_reference(
    reference: HfReference, prompt: list[int], plan: Plan, outcome: Outcome
) -> None:
    """Every generated token's distribution, and every captured row, as the hooks give it."""
    tokens = prompt + outcome.token_ids[:-1]
    expected = reference.run(tokens, as_hooks(plan, VECTORS, tokens))
    for step in range(len(outcome.token_ids)):
        row = expected.logprobs[len(prompt) - 1 + step]
        assert np.abs(outcome.logits(step) - row).max() < 1e-3, step
    for site, rows in outcome.rows.items():
        for position, row in rows.items():
            np.testing.assert_allclose(row, expected.streams[site][position], rtol=1e-3, atol=1e-3)


def phased(prompt: list[int]) -> list[Plan]:
    """Plans for the prompt, for what is generated, for windows across the end, by token id."""
    end = len(prompt)
    everything = capture(0, 3, 4, 8).captures
    return [
        Plan("", (add(0, 4, ((0, end),), 2.0),), everything),
        Plan("", (add(1, 3, ((end, OPEN_END),), 2.0),), everything),
        Plan("", (add(0, 2, ((end - 2, end + 2),)), add(2, 6, ((0, 1), (3, 7)))), everything),
        Plan("", (pulled(1, 4, ((3, end + 1),)), by_token(0, 6, ((5, OPEN_END),))), everything),
        Plan("", (*replaced(4, range(end - 3, end + 3)), add(1, 4)), everything),
        Plan("", (put(0, 3, ((0, 9), (end + 1, end + 60))), *replaced(8, (2, end))), everything),
    ]


def replaced(site: int, positions: Sequence[int]) -> list[Act]:
    """Another vector in the place of the row of each position."""
    return [
        put(number % VECTORS, site, ((position, position + 1),))
        for number, position in enumerate(positions)
    ]


def pulled(seed: int, site: int, spans: Spans) -> Act:
    """A coordinate pinned, at every token of some spans."""
    return Act(Kind.PULL, (vector(seed)[0],), ((site, (0,)),), spans, bands=(Band(2.0, 2.0, 1.0),))


def by_token(seed: int, site: int, spans: Spans) -> Act:
    """The stream's norm added along a vector, at the tokens with an even id."""
    even = TokenCondition(spans, tuple(range(0, VOCAB, 2)), True)
    return Act(Kind.NORM_ADD, (vector(seed)[0],), ((site, (0,)),), (), 0.5, conditions=(even,))


@pytest.mark.parametrize(
    "options",
    [
        *({"max_num_seqs": 4, "max_num_batched_tokens": chunk} for chunk in (4, 7, 16, 64)),
        pytest.param(TIGHT, marks=IN_TIGHT),
    ],
    ids=["4", "7", "16", "64", "7, compiled"],
)
def test_phases_split_exactly_at_the_prompts_end_for_every_chunk_size(
    start: Start, reference: HfReference, options: dict[str, object]
) -> None:
    engine = load(start(**options))
    batch = prompts(6, 17, 40, seed=3)
    plans = [phased(p)[i] for i, p in enumerate(batch)]
    outcomes = engine.run(batch, plans, max_tokens=5)
    for prompt, plan, outcome in zip(batch, plans, outcomes, strict=True):
        assert_as_reference(reference, prompt, plan, outcome)
        assert outcome.duplicates == 0


@pytest.mark.parametrize(
    "options",
    [{"max_num_seqs": 6, "num_gpu_blocks_override": 9}, pytest.param(TIGHT, marks=IN_TIGHT)],
    ids=["eager", "compiled"],
)
def test_a_preempted_request_is_steered_as_if_it_had_run_through(
    start: Start, reference: HfReference, options: dict[str, object]
) -> None:
    engine = load(start(**options))
    batch = prompts(6, 30, 40, seed=4)
    plans = [phased(p)[i] for i, p in enumerate(batch)]
    outcomes = engine.run(batch, plans, max_tokens=70)
    preemptions = [o.released.preemptions for o in outcomes if o.released is not None]
    assert sum(preemptions) > 0
    for prompt, plan, outcome in zip(batch, plans, outcomes, strict=True):
        assert_as_reference(reference, prompt, plan, outcome)
        positions = list(range(len(prompt) + 69))
        assert {site: sorted(rows) for site, rows in outcome.rows.items()} == dict.fromkeys(
            (0, 3, 4, 8), positions
        )
        assert outcome.duplicates == 0


@pytest.mark.parametrize(
    "eager", [pytest.param(False, marks=COMPILED), pytest.param(True, marks=PLAIN)]
)
def test_a_warm_prefix_cache_never_mixes_what_is_steered_differently(
    start: Start, reference: HfReference, eager: bool
) -> None:
    engine = load(start(enforce_eager=eager))
    (prompt,) = prompts(1, 100, 101, seed=5)
    plain = steer()
    everywhere = steer(add(0, 4, EVERYWHERE, 2.0))
    same_but_ordered = steer(add(1, 2), add(0, 4, EVERYWHERE, 2.0))
    reordered = steer(add(0, 4, EVERYWHERE, 2.0), add(1, 2))
    generated = steer(add(0, 4, ((len(prompt), OPEN_END),), 2.0))
    late = steer(add(0, 4, ((90, 95),), 2.0))
    turns = [plain, everywhere, plain, everywhere, generated, plain, late, generated, plain]
    turns += [same_but_ordered, reordered]
    cached = []
    for plan in turns:
        (outcome,) = engine.run([prompt], [plan], max_tokens=8, skip_cache=False)
        assert_as_reference(reference, prompt, plan, outcome)
        cached.append(outcome.cached)
    assert cached == [0, 0, 96, 96, 96, 96, 64, 96, 96, 0, 96]


@PLAIN
def test_steered_generated_tokens_are_not_reused_as_an_unsteered_prompt(
    start: Start, reference: HfReference
) -> None:
    engine = load(start())
    (prompt,) = prompts(1, 40, 41, seed=6)
    generated = steer(add(0, 4, ((len(prompt), OPEN_END),), 2.0))
    (first,) = engine.run([prompt], [generated], max_tokens=60, skip_cache=False)
    longer = prompt + first.token_ids
    for plan in (steer(), steer(add(0, 4, ((len(longer), OPEN_END),), 2.0))):
        (outcome,) = engine.run([longer], [plan], max_tokens=4, skip_cache=False)
        assert_as_reference(reference, longer, plan, outcome)


@PLAIN
def test_a_capture_of_cached_positions_recomputes_them(
    start: Start, reference: HfReference
) -> None:
    engine = load(start())
    (prompt,) = prompts(1, 100, 101, seed=7)
    engine.run([prompt], [steer()], max_tokens=2, skip_cache=False)
    plan = capture(0, 5, 8)
    (outcome,) = engine.run([prompt], [plan], max_tokens=2, skip_cache=False)
    assert sorted(outcome.rows[5]) == list(range(101))
    assert_as_reference(reference, prompt, plan, outcome)


def test_a_seeded_request_draws_the_same_however_its_prompt_is_chunked(start: Start) -> None:
    batch = prompts(3, 30, 40, seed=8)
    drawn = [
        [o.token_ids for o in start(**options).run(batch, max_tokens=8, temperature=1.0, seed=5)]
        for options in ({}, {"max_num_seqs": 4, "max_num_batched_tokens": 7})
    ]
    assert drawn[0] == drawn[1]
