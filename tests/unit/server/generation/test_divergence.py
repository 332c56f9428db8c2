"""Divergence of truncated distributions, against the divergence of the full ones."""

import math

import numpy as np
import pytest

from rheostat_server.generation.divergence import RESOLUTION, Listed, compare, measure
from rheostat_wire.v1 import generation_pb2

VOCABULARY = 40


def distributions(
    seed: int, spread: float = 3.0, change: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities of two related distributions, [VOCABULARY] each."""
    rng = np.random.default_rng(seed)
    first = rng.normal(size=VOCABULARY) * spread
    second = first + change * rng.normal(size=VOCABULARY)
    return tuple(logits - np.logaddexp.reduce(logits) for logits in (first, second))


def full_kl(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.sum(np.exp(first) * (first - second)))


def most_likely(logprobs: np.ndarray, count: int, *also: int) -> Listed:
    """The list of a side, with tokens that stand in it whatever their probability."""
    order = np.argsort(-logprobs)
    kept = {*order[:count].tolist(), *also}
    ceiling = float(logprobs[order[count - 1]]) if count else 0.0
    return Listed({token: float(logprobs[token]) for token in kept}, ceiling)


def listed(ceiling: float = 1.0, **probabilities: float) -> Listed:
    """A list; tokens are given as t1=..., t2=..."""
    logs = {int(token[1:]): math.log(value) for token, value in probabilities.items()}
    return Listed(logs, math.log(ceiling))


@pytest.mark.parametrize("count", [0, 1, 3, 10, 30])
@pytest.mark.parametrize("change", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("seed", range(20))
def test_the_bound_never_exceeds_the_divergence(seed, change, count) -> None:
    first, second = distributions(seed, change=change)
    token = seed % VOCABULARY
    sides = most_likely(first, count, token), most_likely(second, count, token)
    found = compare(*sides)
    assert 0 <= found.kl <= full_kl(first, second) + 1e-12
    shared = sides[0].logprobs.keys() & sides[1].logprobs.keys()
    assert found.compared == pytest.approx(sum(math.exp(first[t]) for t in shared), abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_is_the_divergence_where_the_lists_hold_the_whole_vocabulary(seed) -> None:
    first, second = distributions(seed)
    found = compare(most_likely(first, VOCABULARY), most_likely(second, VOCABULARY))
    assert found.kl == pytest.approx(full_kl(first, second), abs=1e-12)
    assert found.compared == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_the_bound_is_the_least_divergence_that_the_lists_allow(seed) -> None:
    first, second = distributions(seed, spread=1.0, change=2.0)
    p, q = most_likely(first, 8), most_likely(second, 8)
    both = p.logprobs.keys() & q.logprobs.keys()
    p_alone, q_alone = (
        sum(math.exp(side.logprobs[t]) for t in side.logprobs.keys() - both) for side in (p, q)
    )
    p_left, q_left = (1 - sum(math.exp(side.logprobs[t]) for t in both) for side in (p, q))
    apart = 8 - len(both)
    x = np.linspace(1e-9, min(apart * math.exp(q.ceiling), q_left - q_alone - 1e-9), 800)
    y = np.linspace(1e-9, min(apart * math.exp(p.ceiling), p_left - p_alone - 1e-9), 800)
    x, y = x[:, None], y[None, :]
    p_rest, q_rest = p_left - p_alone - y, q_left - q_alone - x
    unknown = (
        p_alone * np.log(p_alone / x) + y * np.log(y / q_alone) + p_rest * np.log(p_rest / q_rest)
    )
    known = sum(math.exp(p.logprobs[t]) * (p.logprobs[t] - q.logprobs[t]) for t in both)
    assert compare(p, q).kl == pytest.approx(max(0.0, known + float(unknown.min())), abs=1e-3)


def test_lists_that_share_nothing_bound_by_what_is_left_for_the_others_tokens() -> None:
    loose = compare(listed(t1=0.5, t2=0.4), listed(t3=0.6, t4=0.3))
    assert loose == (pytest.approx(0.8 * math.log(9)), 0.0)
    tight = compare(listed(t1=0.5, t2=0.4, ceiling=0.001), listed(t3=0.6, t4=0.3, ceiling=0.001))
    assert tight.kl == pytest.approx(0.9 * math.log(450) - 0.002 * math.log(450))


def test_float32_rounding_of_a_whole_vocabulary_changes_little() -> None:
    first, second = distributions(3, spread=0.1)
    rounded = [
        Listed({token: float(np.float32(value)) for token, value in enumerate(side)})
        for side in (first, second)
    ]
    assert compare(*rounded).kl == pytest.approx(full_kl(first, second), abs=10 * RESOLUTION)


def test_equal_distributions_do_not_diverge() -> None:
    first, _ = distributions(0)
    assert compare(most_likely(first, 5), most_likely(first, 5)).kl == 0.0


def test_mass_that_only_one_side_has_left_counts() -> None:
    found = compare(listed(t1=0.5), listed(t1=0.9))
    assert found.kl == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1))
    assert found.compared == pytest.approx(0.5)


def test_a_side_that_has_no_mass_left_gives_a_finite_bound() -> None:
    found = compare(listed(t1=0.5), listed(t1=1.0))
    assert found.kl == pytest.approx(0.5 * math.log(0.5) + 0.5 * math.log(0.5 / RESOLUTION))


def test_more_than_all_mass_counts_as_all() -> None:
    found = compare(Listed({1: 1e-7}), listed(t1=0.5))
    assert found.kl == pytest.approx(math.log(2), abs=1e-6)
    assert found.compared == 1.0


def test_a_token_that_one_side_rules_out_belongs_to_the_rest() -> None:
    second = Listed({1: math.log(0.25), 2: -math.inf, 3: math.log(0.75)})
    found = compare(listed(t1=0.5, t2=0.5), second)
    assert found.kl == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75))
    assert compare(Listed({1: -math.inf}), listed(t1=1.0)) == (0.0, 0.0)


def test_numbers_that_are_none_stay_visible() -> None:
    assert math.isnan(compare(Listed({1: math.nan}), Listed({1: -1.0})).kl)


def reading(token: int, logprob: float, **others: float) -> generation_pb2.TokenLogprobs:
    entry = generation_pb2.TokenLogprob
    return generation_pb2.TokenLogprobs(
        token=entry(token_id=token, logprob=logprob),
        alternatives=[entry(token_id=int(t[1:]), logprob=value) for t, value in others.items()],
    )


def test_a_sample_is_measured_token_by_token() -> None:
    half, tenth, nine_tenths = (math.log(p) for p in (0.5, 0.1, 0.9))
    steered = [reading(1, half, t2=half), reading(2, nine_tenths, t2=nine_tenths)]
    baseline = [reading(1, tenth, t2=nine_tenths), reading(2, nine_tenths, t2=nine_tenths)]
    found = measure(3, steered, baseline)
    kl = 0.5 * math.log(5) + 0.5 * math.log(5 / 9)
    assert found.sample == 3
    assert list(found.kl) == [pytest.approx(kl, rel=1e-5), 0.0]
    assert list(found.compared) == [1.0, pytest.approx(0.9)]
    assert list(found.baseline_logprobs) == [pytest.approx(tenth), pytest.approx(nine_tenths)]
    assert found.mean_kl == pytest.approx(kl / 2, rel=1e-5)


def test_tokens_that_the_baseline_could_not_read_are_left_out() -> None:
    steered = [reading(1, -1.0), reading(2, -1.0)]
    assert list(measure(0, steered, [reading(1, -1.0)]).kl) == [0.0]
    assert measure(0, steered[:1], []) == generation_pb2.Divergence()
