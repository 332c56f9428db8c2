"""Thresholds, directions and held-out scores, against loops over every cut."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import Normalise, Pool
from rheostat_server.derivation.condition_fits import Made, PooledRows, best_threshold, fits_of

SCORES = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=6)


def f1_of(bound: float, below: bool, on_p: list[float], on_n: list[float]) -> float:
    def holds(score: float) -> bool:
        return score < bound if below else score > bound

    tp, fp = sum(map(holds, on_p)), sum(map(holds, on_n))
    return 2 * tp / (tp + fp + len(on_p))


@given(SCORES, SCORES)
def test_the_threshold_has_the_largest_f1_and_then_the_widest_gap(on_p, on_n) -> None:
    found = best_threshold(np.array(on_p), np.array(on_n))
    ordered = sorted({*on_p, *on_n})
    if len(ordered) == 1:
        assert found is None
        return
    below = np.mean(on_p) < np.mean(on_n)
    cuts = {
        (low + high) / 2: (f1_of((low + high) / 2, below, on_p, on_n), high - low)
        for low, high in pairwise(ordered)
    }
    assert found is not None
    assert (found.below, found.bound in cuts) == (below, True)
    assert cuts[found.bound] == max(cuts.values())


def sets(count: int, width: int, apart: float, seed: int = 0) -> tuple[PooledRows, PooledRows]:
    rng = np.random.default_rng(seed)

    def one(sign: float) -> PooledRows:
        rows = rng.normal(size=(3, count, width))
        rows[:, :, 0] += sign * apart
        return PooledRows(*rows.astype(np.float32))

    return one(1), one(-1)


POOLS = (Pool.LAST, Pool.MEAN)
MADE = tuple(Made)
BOTH = (Normalise.UNIT, Normalise.COSINE)


def test_every_combination_is_tried_and_is_what_numpy_makes_of_it() -> None:
    p, n = sets(12, 6, 3.0)
    own = np.array([-2.0, 0, 0, 0, 0, 0], np.float32)
    fits = list(fits_of(p, n, POOLS, MADE, (own,), BOTH))
    assert [(fit.pool, fit.direction, fit.normalise) for fit in fits] == [
        (pool, direction, normalise)
        for pool in POOLS
        for direction in range(3)
        for normalise in BOTH
    ]
    for fit in fits:
        rows = [one.last if fit.pool is Pool.LAST else one.mean for one in (p, n)]
        rows = [one.astype(np.float64) for one in rows]
        if fit.direction == 0:
            wanted = rows[0].mean(0) - rows[1].mean(0)
        elif fit.direction == 1:
            middle = (rows[0].mean(0) + rows[1].mean(0)) / 2
            _, _, right = np.linalg.svd(np.concatenate(rows) - middle)
            wanted = right[0] * np.sign((rows[0].mean(0) - rows[1].mean(0)) @ right[0])
        else:
            wanted = own
        unit = wanted / np.linalg.norm(wanted)
        expected = own if fit.direction == 2 else unit
        np.testing.assert_allclose(fit.row, expected, atol=1e-6)
        if fit.normalise is Normalise.COSINE and fit.pool is Pool.LAST:
            rows = [one / np.linalg.norm(one, axis=1, keepdims=True) for one in rows]
        elif fit.normalise is Normalise.COSINE:
            rows = [one.unit_mean.astype(np.float64) for one in (p, n)]
        on_p, on_n = (one @ unit for one in rows)
        assert fit.threshold.below == (on_p.mean() < on_n.mean())
        assert fit.threshold.below == (fit.direction == 2)
        bound = fit.threshold.bound
        assert fit.f1 == pytest.approx(f1_of(bound, fit.threshold.below, list(on_p), list(on_n)))
        pooled = np.sqrt((on_p.var(ddof=1) + on_n.var(ddof=1)) / 2)
        distance = on_n.min() - on_p.max() if fit.threshold.below else on_p.min() - on_n.max()
        assert fit.margin == pytest.approx(distance / pooled, rel=1e-4)
        assert fit.held_out is not None
        assert sum(fit.held_out) == 24


def test_held_out_prompts_show_what_only_fits_its_own() -> None:
    """In a wide stream any two sets can be told apart by what is made of them."""
    p, n = sets(10, 400, 0.0)
    (fit,) = fits_of(p, n, (Pool.LAST,), MADE[:1], (), BOTH[:1])
    assert fit.held_out is not None
    assert fit.f1 == 1.0
    assert fit.held_out.accuracy < 0.8
    p, n = sets(10, 400, 30.0)
    (fit,) = fits_of(p, n, (Pool.LAST,), MADE[:1], (), BOTH[:1])
    assert fit.held_out is not None
    assert fit.held_out.f1 == 1.0


def test_each_held_out_prompt_is_judged_by_the_others() -> None:
    p, n = sets(3, 4, 1.0, seed=2)
    (fit,) = fits_of(p, n, (Pool.LAST,), MADE[:1], (), BOTH[:1])
    counts = np.zeros(4, int)
    for held in range(3):
        others = [np.delete(one.last.astype(np.float64), held, axis=0) for one in (p, n)]
        direction = others[0].mean(0) - others[1].mean(0)
        unit = direction / np.linalg.norm(direction)
        threshold = best_threshold(*(one @ unit for one in others))
        assert threshold is not None
        for at, one in ((0, p), (1, n)):
            holds = bool(threshold.holds(one.last[[held]].astype(np.float64) @ unit)[0])
            counts[at if holds else 2 + at] += 1
    assert fit.held_out == tuple(counts)


def test_what_reads_alike_is_left_out() -> None:
    rows = PooledRows(np.ones((2, 4), np.float32))
    assert list(fits_of(rows, rows, (Pool.LAST,), MADE, (), BOTH)) == []
    single = PooledRows(np.array([[2.0, 0, 0, 0]], np.float32))
    (fit,) = fits_of(single, PooledRows(-single.last), (Pool.LAST,), MADE[:1], (), BOTH[:1])
    assert (fit.f1, fit.held_out, fit.margin) == (1.0, None, 1e9)
