"""What must hold of steering and capture, eager and compiled, against stock vLLM, same batch."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest

from rheostat_engine import Act, Band, Kind, Plan
from rheostat_engine.plan.points import site_count

from .groups import BOTH
from .models import LAYERS, WIDTH
from .offline import OfflineEngine, Outcome
from .plans import EVERYWHERE, add, capture, prompts, put, steer, vector

pytestmark = pytest.mark.integration

SITES = range(site_count(LAYERS))
BATCH = prompts(8, 5, 40)
TOKENS = 6
ZERO = b"\0" * 32


class Pair(NamedTuple):
    """What stock vLLM made of the batch, and our engine."""

    stock: list[Outcome]
    engine: OfflineEngine

    def run(self, plans: list[Plan | None]) -> list[Outcome]:
        """The same batch with plans."""
        return self.engine.run(BATCH, plans, max_tokens=TOKENS)


@pytest.fixture(scope="module", params=BOTH)
def pair(request: pytest.FixtureRequest, start: Callable[..., OfflineEngine]) -> Iterator[Pair]:
    eager = request.param == "eager"
    stock = start(sited=False, enforce_eager=eager).run(BATCH, max_tokens=TOKENS)
    engine = start(enforce_eager=eager)
    engine.load({vector(seed)[0]: vector(seed)[1] for seed in range(4)})
    engine.load({ZERO: np.zeros((1, WIDTH), np.float32)})
    yield Pair(stock, engine)
    stats = engine.stats()
    used = [stats[key] for key in stats if key.endswith("_used")]
    assert used
    assert (sum(used), stats["requests"]) == (0, 0)


def same(one: Outcome, other: Outcome) -> bool:
    """Equal in every bit."""
    return one.token_ids == other.token_ids and one.logprobs == other.logprobs


def pull(low: float, high: float, strength: float) -> Plan:
    """A band at every site."""
    band = Band(low, high, strength)
    rows = tuple((site, (0,)) for site in SITES)
    return steer(Act(Kind.PULL, (vector(0)[0],), rows, EVERYWHERE, bands=(band,)))


WIDE = pull(-1e6, 1e6, 1.0)
"""Wider than any stream here is along any direction."""


def test_without_interventions_everything_equals_stock_vllm_bit_for_bit(pair: Pair) -> None:
    assert all(map(same, pair.stock, pair.run([None] * 8)))


@pytest.mark.parametrize(
    "nothing",
    [
        steer(*(add(0, site, scale=0.0) for site in SITES)),
        steer(*(Act(Kind.ADD, (ZERO,), ((site, (0,)),), EVERYWHERE, 3.0) for site in SITES)),
        steer(add(0, 4, spans=())),
        capture(*SITES),
        WIDE,
        pull(0.0, 0.0, 0.0),
        steer(
            Act(Kind.NORM_ADD, (vector(0)[0],), tuple((s, (0,)) for s in SITES), EVERYWHERE, 0.0)
        ),
        steer(*(put(0, site, EVERYWHERE, 0.0) for site in SITES)),
    ],
    ids=[
        "scale zero",
        "zero vector",
        "no position",
        "capture",
        "wide band",
        "strength zero",
        "norm_add by zero",
        "replaced to no part",
    ],
)
def test_an_intervention_that_does_nothing_changes_no_bit(pair: Pair, nothing: Plan) -> None:
    assert all(map(same, pair.stock, pair.run([nothing] * 8)))


def test_a_band_wider_than_the_data_is_done_at_every_row_and_moves_none(pair: Pair) -> None:
    for prompt, outcome in zip(BATCH, pair.run([WIDE] * 8), strict=True):
        end = len(prompt) + TOKENS - 1
        assert outcome.released is not None
        doses = [(dose.site, dose.rows, dose.change) for dose in outcome.released.doses]
        assert doses == [(site, end, 0.0) for site in SITES]
    narrow = pair.run([pull(0.0, 0.0, 1.0)] * 8)
    assert not any(map(same, pair.stock, narrow))


@pytest.mark.parametrize("site", SITES)
def test_batch_mates_of_steered_requests_equal_stock_vllm_bit_for_bit(
    pair: Pair, site: int
) -> None:
    steered = (steer(add(0, site, scale=2.0)), steer(put(1, site, EVERYWHERE, 0.5)))
    outcomes = pair.run([steered[i // 2 % 2] if i % 2 else None for i in range(8)])
    assert all(same(pair.stock[i], outcomes[i]) for i in range(0, 8, 2))
    assert not any(same(pair.stock[i], outcomes[i]) for i in range(1, 8, 2))


@pytest.mark.parametrize(
    "acts",
    [(add(0, 4, scale=2.0), add(1, 3)), (put(0, 4, ((1, 4),)), put(1, 3, ((2, 3), (5, 6)), 0.5))],
    ids=["added", "replaced"],
)
def test_what_a_request_gets_does_not_depend_on_its_mates(
    pair: Pair, acts: tuple[Act, ...]
) -> None:
    plan = Plan("", acts, capture(*SITES).captures)
    others: list[Plan | None] = [
        steer(
            add(i % 3, i % len(SITES), scale=float(i)),
            put(i % 3, (i + 2) % len(SITES), ((i, i + 2),)),
        )
        for i in range(8)
    ]
    others[2] = plan
    together = pair.run(others)[2]
    (alone,) = pair.engine.run([BATCH[2]], [plan], max_tokens=TOKENS)
    assert together.token_ids == alone.token_ids
    for site in SITES:
        np.testing.assert_allclose(together.stream(site), alone.stream(site), rtol=1e-4, atol=1e-4)
    plain = pair.run([capture(*SITES)] * 8)[2]
    assert np.abs(together.stream(4) - plain.stream(4)).max() > 0.1


def test_the_order_of_additions_does_not_matter(pair: Pair) -> None:
    additions = (add(0, 4), add(1, 4, scale=0.3), add(2, 4, scale=-2.0), add(0, 2))
    forward = pair.run([steer(*additions)] * 8)
    backward = pair.run([steer(*additions[::-1])] * 8)
    assert all(map(same, forward, backward))


def test_additions_for_the_prompt_and_for_all_tokens_sum(pair: Pair) -> None:
    for_prompt = [steer(add(0, 4), add(0, 4, spans=((0, len(p)),))) for p in BATCH]
    as_one = [
        steer(
            add(0, 4, spans=((0, len(p)),), scale=2.0),
            add(0, 4, spans=((len(p), 2**31 - 1),)),
        )
        for p in BATCH
    ]
    assert all(map(same, pair.run(list(for_prompt)), pair.run(list(as_one))))


def test_capturing_beside_steering_sees_the_stream_after_it(pair: Pair) -> None:
    plain = pair.run([capture(4)] * 8)
    both = pair.run([Plan("", (add(0, 4, scale=2.0),), capture(4).captures)] * 8)
    for prompt, one, other in zip(BATCH, plain, both, strict=True):
        length = len(prompt)
        expected = one.stream(4)[:length] + 2.0 * vector(0)[1]
        np.testing.assert_allclose(other.stream(4)[:length], expected, rtol=1e-5, atol=1e-5)


def test_every_position_is_captured_once_and_none_of_the_last_token(pair: Pair) -> None:
    outcomes = pair.run([capture(0, 3, 8)] * 8)
    for prompt, outcome in zip(BATCH, outcomes, strict=True):
        positions = list(range(len(prompt) + TOKENS - 1))
        assert {site: sorted(rows) for site, rows in outcome.rows.items()} == dict.fromkeys(
            (0, 3, 8), positions
        )
        assert outcome.duplicates == 0
        assert outcome.released is not None
        assert outcome.released.captured == {site: len(positions) for site in (0, 3, 8)}
        assert outcome.released.lost_rows == 0


def test_captures_that_differ_within_a_request_are_joined_by_position(pair: Pair) -> None:
    plan = Plan(
        "",
        (),
        capture(2, spans=((0, 3),)).captures
        + capture(2, 5, spans=((2, 4), (6, 2**31 - 1))).captures,
    )
    outcomes = pair.run([plan] * 8)
    whole = pair.run([capture(2, 5)] * 8)
    for prompt, outcome, every in zip(BATCH, outcomes, whole, strict=True):
        end = len(prompt) + TOKENS - 1
        assert sorted(outcome.rows[2]) == sorted({0, 1, 2, 3} | set(range(6, end)))
        assert sorted(outcome.rows[5]) == sorted({2, 3} | set(range(6, end)))
        for site, rows in outcome.rows.items():
            for position, row in rows.items():
                np.testing.assert_array_equal(row, every.rows[site][position])


def test_a_missing_vector_fails_that_request_alone(pair: Pair) -> None:
    unknown = steer(Act(Kind.ADD, (b"\1" * 32,), ((4, (0,)),), EVERYWHERE))
    outcomes = pair.run([unknown if i == 3 else None for i in range(8)])
    assert outcomes[3].installed is not None
    assert outcomes[3].installed.error == f"vector {'01' * 32} is not in the worker"
    assert all(same(pair.stock[i], outcomes[i]) for i in range(8) if i != 3)


def test_the_receipt_counts_the_tokens_that_were_touched(pair: Pair) -> None:
    plan = steer(add(0, 4, spans=((1, 3),)), add(1, 2), add(1, 2, spans=((10_000, 10_001),)))
    for prompt, outcome in zip(BATCH, pair.run([plan] * 8), strict=True):
        end = len(prompt) + TOKENS - 1
        assert outcome.released is not None
        rows = [(dose.act, dose.site, dose.rows) for dose in outcome.released.doses]
        assert rows == [(0, 4, 2), (1, 2, end)]
        assert outcome.released.measured
        assert outcome.released.computed == (0, end)
