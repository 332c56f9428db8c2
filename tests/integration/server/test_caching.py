"""The prefix cache under steering: equal steering shares, and nothing else does."""

from collections.abc import Iterator

import numpy as np
import pytest

import rheostat

from ..engine.reference import HfReference
from .naive import OPS, Placed, add, compare, everywhere, row

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
    return out.receipt.cached_prompt_tokens


@pytest.mark.parametrize("name", OPS)
def test_steered_and_plain_requests_never_read_each_others_blocks(
    engine: rheostat.Engine, reference: HfReference, name: str
) -> None:
    steered = everywhere(OPS[name], [1])
    for seed, first, second in ((1, [steered], []), (2, [], [steered])):
        prompt = fresh(10 * list(OPS).index(name) + seed)
        hits = []
        for placed in (first, second, first, second):
            out = engine.generate(prompt, steering=[one.ours for one in placed], **OPTIONS)
            compare(reference, out, placed)
            hits.append(cached(out))
        assert hits == [0, 0, BLOCKS, BLOCKS]


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
