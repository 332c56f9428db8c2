"""The prefix cache: equal steering shares and nothing else does, captures read what lies below."""

from collections.abc import Iterator

import numpy as np
import pytest

import rheostat

from ..engine.reference import HfReference
from .naive import (
    OPS,
    Placed,
    add,
    compare,
    everywhere,
    put_stored,
    replace_by_rows,
    replace_by_run,
    row,
)

pytestmark = pytest.mark.integration

OPTIONS = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "logprobs": 0}
LENGTH = 300
BLOCKS = 256
"""Tokens of a prompt that can be cached: two whole blocks of 128."""


@pytest.fixture
def shared(engine: rheostat.Engine) -> Iterator[rheostat.Engine]:
    """A client that may set server-wide steering; afterwards there is none."""
    yield engine
    engine.steering.set_global(None)


def fresh(seed: int) -> list[int]:
    """A prompt that nobody else has."""
    return np.random.default_rng([seed, 77]).integers(3, 1900, LENGTH).tolist()


def cached(out: rheostat.Generation) -> int:
    """Prompt tokens that came from the cache."""
    return out.receipt.cached_prompt_token_count


def accounts(out: rheostat.Generation) -> tuple[int, int]:
    """Tokens that came from the cache, and those that were computed although they were there."""
    return out.receipt.cached_prompt_token_count, out.receipt.recomputed_token_count


def capture(where: rheostat.Selector | None = None) -> rheostat.Capture:
    return rheostat.Capture("resid_post", layers=[0, 3], where=where)


def assert_rows(out: rheostat.Generation, whole: rheostat.Generation, positions: range) -> None:
    """Captured are just these positions, for every sample, with the rows of another run."""
    for sample in out.samples:
        for layer in (0, 3):
            found = sample.activations.positions("resid_post", layer).tolist()
            assert found == list(positions)
            np.testing.assert_allclose(
                sample.activations["resid_post", layer],
                whole.activations["resid_post", layer][positions.start : positions.stop],
                rtol=1e-5,
                atol=1e-5,
            )


ROWS = {"run": replace_by_run(), "rows": replace_by_rows(range(20, 200), 1)}
"""Replacements by a row of each position."""
NAMES = [*OPS, *ROWS]


@pytest.mark.parametrize("name", NAMES)
def test_steered_and_plain_requests_never_read_each_others_blocks(
    engine: rheostat.Engine, reference: HfReference, name: str
) -> None:
    if name in ROWS:
        put_stored(engine, [1])
        where = rheostat.window(20, 200)
        steered = Placed(ROWS[name], [1], where, lambda p, token, length: 20 <= p < 200)
    else:
        steered = everywhere(OPS[name], [1])
    for seed, first, second in ((1, [steered], []), (2, [], [steered])):
        prompt = fresh(200 + 10 * NAMES.index(name) + seed)
        hits = []
        for placed in (first, second, first, second):
            out = engine.generate(prompt, steering=[one.ours for one in placed], **OPTIONS)
            compare(reference, out, placed)
            hits.append(cached(out))
        assert hits == [0, 0, BLOCKS, BLOCKS]
    if name in ROWS:
        engine.delete_run("stored")


def test_steering_of_generated_tokens_alone_leaves_the_prompt_shared(
    engine: rheostat.Engine, reference: HfReference
) -> None:
    prompt = fresh(100)
    late = Placed(OPS["add"], [1], "generated", lambda p, token, length: p >= length)
    outs = [
        engine.generate(prompt, steering=[one.ours for one in placed], **OPTIONS)
        for placed in ([], [late], [])
    ]
    assert [cached(out) for out in outs] == [0, BLOCKS, BLOCKS]
    compare(reference, outs[1], [late])


def gated(bound: float, **where: object) -> rheostat.Intervention:
    """An addition that acts if the probe reads more than a bound."""
    number = rheostat.probe(rheostat.inline(row(1)), points="resid_post", layers=1, **where)
    gate = rheostat.gate(number.above(bound, after_prompt=True), hold="rest")
    return rheostat.inline(5 * row(2)).at(points="resid_post", layers=3).when(gate)


@pytest.mark.parametrize("policy", [False, True], ids=["", "policy"])
def test_the_next_turn_finds_the_answer_if_the_prompt_has_left_all_gates_shut(
    shared: rheostat.Engine, policy: bool
) -> None:
    """Also the answers of several samples."""
    options = {"max_tokens": 120, "temperature": 1.0, "seed": 1, "ignore_eos": True, "n": 2}
    last, more = rheostat.positions(-1), fresh(301)[:5]
    kinds = {
        "plain": (None, 384),
        "shut": (gated(1e6, where=last), 384),
        "shut, of the mean": (gated(1e6, where="prompt"), 384),
        "open": (gated(-1e6, where=last), 256),
    }
    for number, (name, (steering, expected)) in enumerate(kinds.items()):
        prompt = fresh(310 + 10 * policy + number)
        version = shared.steering.set_global(steering) if policy else 0
        out = shared.generate(prompt, steering=None if policy else steering, **options)
        if policy:
            shared.steering.set_global(None, expected_version=version)
        turns = [[*prompt, *sample.token_ids, *more] for sample in out.samples]
        hits = [cached(shared.generate(turn, max_tokens=1)) for turn in turns]
        assert hits == [expected] * 2, name


def test_blocks_before_the_first_steered_position_stay_shared(
    engine: rheostat.Engine, reference: HfReference
) -> None:
    prompt = fresh(101)
    late = Placed(
        OPS["norm_add"], [1], rheostat.window(200), lambda p, token, length: 200 <= p < length
    )
    engine.generate(prompt, **OPTIONS)
    out = engine.generate(prompt, steering=[late.ours], **OPTIONS)
    assert cached(out) == 128
    compare(reference, out, [late])
    (applied,) = out.receipt.interventions
    again = engine.generate(prompt, steering=[late.ours], **OPTIONS).receipt.interventions[0]
    assert applied.rows[0].cached_positions == ()
    assert again.rows[0].cached_positions == (range(200, 256),)
    assert again.rows[0].positions == (range(256, 300),)


def test_a_name_a_digest_and_the_numbers_share_blocks_until_the_name_moves(
    engine: rheostat.Engine, reference: HfReference
) -> None:
    prompt = fresh(102)
    stored = engine.vectors.put(row(0), name="cached")
    by_name = rheostat.named("cached")
    ways = [stored, by_name, rheostat.inline(row(0))]
    steering = [way.at(points="resid_post", layers=1) for way in ways]
    hits = [cached(engine.generate(prompt, steering=[way], **OPTIONS)) for way in steering]
    assert hits == [0, BLOCKS, BLOCKS]
    engine.vectors.put(row(1), name="cached")
    moved = engine.generate(prompt, steering=[steering[1]], **OPTIONS)
    assert cached(moved) == 0
    compare(reference, moved, [everywhere(add(row(1), 1.0), [1])])
    assert cached(engine.generate(prompt, steering=[steering[1]], **OPTIONS)) == BLOCKS
    engine.vectors.put(row(0), name="cached")
    assert cached(engine.generate(prompt, steering=[steering[1]], **OPTIONS)) == BLOCKS
    engine.vectors.delete("cached")


def test_the_order_of_adds_makes_no_other_blocks(engine: rheostat.Engine) -> None:
    prompt = fresh(103)
    one, two = (everywhere(add(row(i), 0.5), [1]).ours for i in (0, 1))
    hits = [
        cached(engine.generate(prompt, steering=s, **OPTIONS)) for s in ([one, two], [two, one])
    ]
    assert hits == [0, BLOCKS]


def test_prompts_cached_under_other_server_wide_steering_are_not_reused(
    shared: rheostat.Engine, reference: HfReference
) -> None:
    prompt = fresh(104)
    one, two = everywhere(OPS["add"], [1]), everywhere(OPS["ablate"], [1])
    hits = []
    for wide in ([], [one], [two], [], [one]):
        shared.steering.set_global([placed.ours for placed in wide])
        for _ in range(2):
            out = shared.generate(prompt, **OPTIONS)
            compare(reference, out, wide)
            hits.append(cached(out))
    assert hits == [0, BLOCKS, 0, BLOCKS, 0, BLOCKS, BLOCKS, BLOCKS, BLOCKS, BLOCKS]


def test_server_wide_steering_shares_blocks_with_a_request_that_asks_for_the_same(
    shared: rheostat.Engine,
) -> None:
    prompt = fresh(105)
    one = everywhere(OPS["clamp-bands"], [1]).ours
    own = shared.generate(prompt, steering=[one], **OPTIONS)
    shared.steering.set_global([one])
    wide = shared.generate(prompt, **OPTIONS)
    assert (cached(own), cached(wide)) == (0, BLOCKS)
    assert wide.token_ids == own.token_ids


@pytest.mark.parametrize(
    ("where", "hit", "positions"),
    [
        (None, 0, range(303)),
        (rheostat.window(), 0, range(300)),
        (rheostat.window(127, 130), 0, range(127, 130)),
        (rheostat.window(128, 130), 128, range(128, 130)),
        (rheostat.window(255), 128, range(255, 300)),
        (rheostat.window(256), 256, range(256, 300)),
        (rheostat.positions(-1), 256, range(299, 300)),
        (rheostat.generated(), 256, range(300, 303)),
    ],
    ids=str,
)
def test_a_capture_reads_what_is_cached_below_it_and_says_what_it_computed_again(
    engine: rheostat.Engine, where: rheostat.Selector | None, hit: int, positions: range
) -> None:
    prompt = fresh(106)
    whole = engine.generate(prompt, capture=capture(), **OPTIONS)
    out = engine.generate(prompt, capture=capture(where), **OPTIONS)
    assert accounts(out) == (hit, BLOCKS - hit)
    assert out.token_ids == whole.token_ids
    assert_rows(out, whole, positions)


def test_every_sample_that_captures_says_what_it_computed_again(engine: rheostat.Engine) -> None:
    prompt = fresh(107)
    whole = engine.generate(prompt, capture=capture(), **OPTIONS)
    assert accounts(whole) == (0, 0)
    options = {**OPTIONS, "temperature": 1.0, "seed": 3}
    out = engine.generate(prompt, capture=capture(rheostat.window(200)), n=3, **options)
    assert accounts(out) == (3 * 128, 3 * 128)
    assert_rows(out, whole, range(200, 300))


def test_a_steered_capture_and_its_baseline_each_read_their_own_blocks(
    engine: rheostat.Engine, reference: HfReference
) -> None:
    prompt = fresh(108)
    late = Placed(OPS["add"], [1], rheostat.window(140), lambda p, token, n: 140 <= p < n)
    steered = engine.generate(prompt, steering=[late.ours], capture=capture(), **OPTIONS)
    plain = engine.generate(prompt, capture=capture(), **OPTIONS)
    assert (accounts(steered), accounts(plain)) == ((0, 0), (0, 128))
    out = engine.generate(
        prompt,
        steering=[late.ours],
        capture=capture(rheostat.window(150)),
        with_baseline=True,
        **OPTIONS,
    )
    compare(reference, out, [late])
    assert accounts(out) == (128, 128)
    assert out.baseline is not None
    assert_rows(out, steered, range(150, 300))
    np.testing.assert_allclose(
        out.baseline.activations["resid_post", 3],
        plain.activations["resid_post", 3][150:300],
        rtol=1e-5,
        atol=1e-5,
    )


def test_log_probabilities_of_the_prompt_keep_a_capture_from_reading_anything(
    engine: rheostat.Engine,
) -> None:
    prompt = fresh(109)
    whole = engine.generate(prompt, capture=capture(), **OPTIONS)
    out = engine.generate(
        prompt, capture=capture(rheostat.window(280)), prompt_logprobs=0, **OPTIONS
    )
    assert accounts(out) == (0, 0)
    assert_rows(out, whole, range(280, 300))


def test_what_the_server_counts_as_hits_is_what_captures_were_given(
    engine: rheostat.Engine,
) -> None:
    prompt = fresh(110)
    engine.generate(prompt, **OPTIONS)
    before = engine.stats()
    engine.generate(prompt, capture=capture(rheostat.window(130)), **OPTIONS)
    after = engine.stats()
    assert after.prefix_queried_token_count - before.prefix_queried_token_count == LENGTH
    assert after.prefix_hit_token_count - before.prefix_hit_token_count == 128
