"""A capture reads the prefix cache up to its first position, and finds there what a cold run gives.

What was cached and is computed all the same is said to have been computed again.
"""

from collections.abc import Callable

import numpy as np
import pytest

from rheostat_engine import OPEN_END, Act, Plan, Released, Spans

from .groups import PLAIN
from .offline import OfflineEngine, Outcome
from .plans import EVERYWHERE, add, capture, prompts, steer, vector

pytestmark = pytest.mark.integration

Start = Callable[..., OfflineEngine]

LENGTH = 200
SITES = (0, 4, 8)
TOLERANCE = 1e-5
"""What a hit may change: which tokens are computed in one matrix product. Rows reach 13."""


def cold(engine: OfflineEngine) -> None:
    assert engine.llm.reset_prefix_cache()


def one(engine: OfflineEngine, prompt: list[int], plan: Plan, *, max_tokens: int = 2) -> Outcome:
    (outcome,) = engine.run([prompt], [plan], max_tokens=max_tokens, skip_cache=False)
    return outcome


def released(outcome: Outcome) -> Released:
    assert outcome.released is not None
    return outcome.released


def captured(spans: Spans, *acts: Act) -> Plan:
    return Plan("", acts, capture(*SITES, spans=spans).captures)


def assert_rows(outcome: Outcome, expected: Outcome, positions: list[int]) -> None:
    """The rows of some positions are there, each once, and are those of another run."""
    assert outcome.duplicates == 0
    assert sorted(outcome.rows) == ([*SITES] if positions else [])
    assert outcome.token_ids == expected.token_ids
    for site, rows in outcome.rows.items():
        assert sorted(rows) == positions
        for position, row in rows.items():
            wanted = expected.rows[site][position]
            np.testing.assert_allclose(row, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def positions_of(spans: Spans) -> list[int]:
    """What spans hold of a prompt and the one generated token that is computed."""
    return [p for a, b in spans for p in range(a, min(b, LENGTH + 1))]


WINDOWS: list[Spans] = [
    ((0, 1),),
    ((31, 33),),
    ((64, 65), (190, 191)),
    ((100, OPEN_END),),
    ((127, 128),),
    ((128, 140),),
    ((LENGTH - 1, LENGTH),),
    ((LENGTH, OPEN_END),),
]


@pytest.mark.parametrize(("block", "chunk"), [(32, 256), (32, 48), (64, 256)])
def test_only_what_a_capture_needs_is_computed_again(start: Start, block: int, chunk: int) -> None:
    engine = start(block_size=block, max_num_batched_tokens=chunk)
    engine.load(dict(vector(seed) for seed in range(2)))
    (prompt,) = prompts(1, LENGTH, LENGTH + 1, seed=31)
    longest = (LENGTH - 1) // block * block
    for acts in ((), (add(0, 4, ((70, 150),), 2.0),)):
        cold(engine)
        expected = one(engine, prompt, captured(EVERYWHERE, *acts))
        assert (expected.cached, released(expected).recomputed) == (0, 0)
        for spans in WINDOWS:
            outcome = one(engine, prompt, captured(spans, *acts))
            assert outcome.cached == min(spans[0][0] // block * block, longest)
            assert outcome.cached + released(outcome).recomputed == longest
            assert released(outcome).computed == (outcome.cached, LENGTH + 1)
            assert_rows(outcome, expected, positions_of(spans))
        again = one(engine, prompt, captured(EVERYWHERE, *acts))
        assert (again.cached, released(again).recomputed) == (0, longest)
        for site in SITES:
            np.testing.assert_array_equal(again.stream(site), expected.stream(site))


@PLAIN
def test_a_capture_finds_what_it_is_steered_alike_with(start: Start) -> None:
    """Of a prompt that is cached without steering, what lies before the first steered token."""
    engine = start()
    engine.load(dict(vector(seed) for seed in range(2)))
    (prompt,) = prompts(1, LENGTH, LENGTH + 1, seed=32)
    act = add(1, 4, ((70, 150),), 2.0)
    expected = one(engine, prompt, captured(EVERYWHERE, act))
    cold(engine)
    one(engine, prompt, steer())
    for first, cached, recomputed in ((40, 32, 32), (180, 64, 0)):
        spans = ((first, LENGTH),)
        cold(engine)
        one(engine, prompt, steer())
        outcome = one(engine, prompt, captured(spans, act))
        assert (outcome.cached, released(outcome).recomputed) == (cached, recomputed)
        assert_rows(outcome, expected, positions_of(spans))


@pytest.mark.parametrize("name", ["gemma3", "mistral"])
def test_a_model_with_sliding_windows_captures_what_a_cold_run_does(
    start: Start, name: str
) -> None:
    engine = start(name)
    (prompt,) = prompts(1, LENGTH, LENGTH + 1, seed=33)
    expected = one(engine, prompt, captured(EVERYWHERE))
    for spans in WINDOWS:
        whole = one(engine, prompt, steer()).cached
        outcome = one(engine, prompt, captured(spans))
        assert whole > 0
        assert outcome.cached <= spans[0][0]
        assert outcome.cached + released(outcome).recomputed == whole
        assert_rows(outcome, expected, positions_of(spans))


@PLAIN
def test_log_probabilities_of_the_prompt_are_no_reason_to_compute_for_a_capture(
    start: Start,
) -> None:
    engine = start()
    (prompt,) = prompts(1, LENGTH, LENGTH + 1, seed=34)
    expected = one(engine, prompt, captured(EVERYWHERE))
    spans = ((100, 101),)
    (outcome,) = engine.run(
        [prompt], [captured(spans)], max_tokens=2, skip_cache=False, prompt_logprobs=0
    )
    assert (outcome.cached, released(outcome).recomputed) == (0, 0)
    assert_rows(outcome, expected, positions_of(spans))


def test_many_captures_of_one_prompt_read_it_side_by_side(start: Start) -> None:
    engine = start(max_num_batched_tokens=128)
    (prompt,) = prompts(1, LENGTH, LENGTH + 1, seed=35)
    expected = one(engine, prompt, captured(EVERYWHERE))
    outcomes = engine.run(
        [prompt] * 8, list(map(captured, WINDOWS)), max_tokens=2, skip_cache=False
    )
    for spans, outcome in zip(WINDOWS, outcomes, strict=True):
        assert outcome.cached == min(spans[0][0] // 32 * 32, 192)
        assert outcome.cached + released(outcome).recomputed == 192
        assert_rows(outcome, expected, positions_of(spans))


def test_a_capture_that_is_preempted_delivers_each_row_once(start: Start) -> None:
    engine = start()
    batch = prompts(6, 40, 60, seed=36)
    plans = [captured(spans) for spans in [EVERYWHERE, ((35, OPEN_END),), ((20, 30), (50, 99))] * 2]
    alone = engine.run(batch, [captured(EVERYWHERE)] * 6, max_tokens=70)
    engine = start(max_num_seqs=6, num_gpu_blocks_override=11)
    for prompt in batch[:3]:
        one(engine, prompt, steer())
    outcomes = engine.run(batch, plans, max_tokens=70, skip_cache=False)
    assert sum(released(outcome).preemptions for outcome in outcomes) > 0
    for prompt, plan, outcome, expected in zip(batch, plans, outcomes, alone, strict=True):
        end = len(prompt) + 69
        spans = plan.captures[0].spans
        assert_rows(outcome, expected, [p for a, b in spans for p in range(a, min(b, end))])
