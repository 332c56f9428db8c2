"""Thresholds, directions and held-out scores, against loops over every cut."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import Normalise
from rheostat_server.derivation.condition_fits import (
    Counts,
    Fit,
    Made,
    PooledRows,
    Score,
    Threshold,
    best_threshold,
    fits_of,
)

SCORES = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=6)


def f1_of(bound: float, below: bool, on_p: list[float], on_n: list[float]) -> float:
    def holds(score: float) -> bool:
        return score < bound if below else score > bound

    tp, fp = sum(map(holds, on_p)), sum(map(holds, on_n))
    return 2 * tp / (tp + fp + len(on_p))


@given(SCORES, SCORES)
def test_without_a_sign_the_threshold_is_the_best_of_both_sides(on_p, on_n) -> None:
    found = best_threshold(np.array(on_p), np.array(on_n), signed=False)
    ordered = sorted({*on_p, *on_n})
    if len(ordered) == 1:
        assert found is None
        return
    cuts = {
        ((low + high) / 2, below): (f1_of((low + high) / 2, below, on_p, on_n), high - low)
        for low, high in pairwise(ordered)
        for below in (False, True)
    }
    assert found is not None
    assert cuts[found.bound, found.below] == max(cuts.values())
    signed = best_threshold(np.array(on_p), np.array(on_n))
    assert signed is not None
    if cuts[signed.bound, signed.below] == max(cuts.values()):
        assert found.below == signed.below


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


SCORES_OF_ROWS = (Score.LAST, Score.MEAN)
MADE = tuple(Made)
BOTH = (Normalise.UNIT, Normalise.COSINE)


def test_every_combination_is_tried_and_is_what_numpy_makes_of_it() -> None:
    p, n = sets(12, 6, 3.0)
    own = np.array([-2.0, 0, 0, 0, 0, 0], np.float32)
    fits = list(fits_of(p, n, SCORES_OF_ROWS, MADE, (own,), BOTH))
    assert [(fit.score, fit.direction, fit.normalise) for fit in fits] == [
        (score, direction, normalise)
        for score in SCORES_OF_ROWS
        for direction in range(3)
        for normalise in BOTH
    ]
    for fit in fits:
        rows = [one.last if fit.score is Score.LAST else one.mean for one in (p, n)]
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
        if fit.normalise is Normalise.COSINE and fit.score is Score.LAST:
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
    (fit,) = fits_of(p, n, (Score.LAST,), MADE[:1], (), BOTH[:1])
    assert fit.held_out is not None
    assert fit.f1 == 1.0
    assert fit.held_out.accuracy < 0.8
    p, n = sets(10, 400, 30.0)
    (fit,) = fits_of(p, n, (Score.LAST,), MADE[:1], (), BOTH[:1])
    assert fit.held_out is not None
    assert fit.held_out.f1 == 1.0


def test_each_held_out_prompt_is_judged_by_the_others() -> None:
    p, n = sets(3, 4, 1.0, seed=2)
    (fit,) = fits_of(p, n, (Score.LAST,), MADE[:1], (), BOTH[:1])
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
    assert list(fits_of(rows, rows, (Score.LAST,), MADE, (), BOTH)) == []
    single = PooledRows(np.array([[2.0, 0, 0, 0]], np.float32))
    (fit,) = fits_of(single, PooledRows(-single.last), (Score.LAST,), MADE[:1], (), BOTH[:1])
    assert (fit.f1, fit.held_out, fit.margin) == (1.0, None, 1e9)


EVERY = (Normalise.UNIT, Normalise.COSINE, Normalise.PROJECTED_COSINE)


def number_of(x: np.ndarray, v: np.ndarray, normalise: Normalise) -> float:
    """What a probe reads of a row x along v, as `vector.proto` defines it."""
    if normalise is Normalise.UNIT:
        return float(x @ v / np.linalg.norm(v))
    if normalise is Normalise.PROJECTED_COSINE:
        v = np.tanh((x @ v) / (v @ v) * v)
    return float(x @ v / (np.linalg.norm(x) * np.linalg.norm(v)))


@pytest.mark.parametrize("normalise", EVERY)
@pytest.mark.parametrize("score", [Score.LAST, Score.OF_MEAN_ROW])
def test_a_number_of_one_row_is_the_probe_s(score: Score, normalise: Normalise) -> None:
    p, n = sets(9, 6, 0.7, seed=3)
    own = np.array([0.5, -2, 0, 1, 0, 3], np.float32)
    fits = list(fits_of(p, n, (score,), MADE, (own,), (normalise,)))
    assert [fit.direction for fit in fits] == [0, 1, 2]
    for fit in fits:
        rows = [one.last if score is Score.LAST else one.mean for one in (p, n)]
        on_p, on_n = (
            [number_of(x, fit.row.astype(float), normalise) for x in one.astype(float)]
            for one in rows
        )
        signed = normalise is not Normalise.PROJECTED_COSINE
        found = best_threshold(np.array(on_p), np.array(on_n), signed=signed)
        assert found is not None
        assert fit.threshold.below == found.below
        assert fit.threshold.bound == pytest.approx(found.bound, rel=1e-5)
        assert fit.f1 == pytest.approx(f1_of(found.bound, found.below, on_p, on_n))
        pooled = np.sqrt((np.var(on_p, ddof=1) + np.var(on_n, ddof=1)) / 2)
        distance = min(on_n) - max(on_p) if found.below else min(on_p) - max(on_n)
        assert fit.margin == pytest.approx(distance / pooled, rel=1e-4)


@pytest.mark.parametrize("seed", range(8))
def test_held_out_prompts_are_judged_by_projected_cosines_too(seed: int) -> None:
    p, n = sets(5, 4, 0.0, seed)  # either side may be the better one
    projected = Normalise.PROJECTED_COSINE
    (fit,) = fits_of(p, n, (Score.OF_MEAN_ROW,), MADE[:1], (), (projected,))
    counts = np.zeros(4, int)
    for held in range(5):
        others = [np.delete(one.mean.astype(float), held, axis=0) for one in (p, n)]
        direction = others[0].mean(0) - others[1].mean(0)
        scores = [[number_of(x, direction, projected) for x in one] for one in others]
        threshold = best_threshold(*map(np.array, scores), signed=False)
        assert threshold is not None
        for at, one in ((0, p), (1, n)):
            score = number_of(one.mean[held].astype(float), direction, projected)
            counts[at if threshold.holds(np.array([score]))[0] else 2 + at] += 1
    assert fit.held_out == tuple(counts)


def test_the_mean_of_projected_cosines_is_left_out() -> None:
    p, n = sets(4, 6, 1.0)
    fits = fits_of(p, n, tuple(Score), MADE[:1], (), EVERY)
    left_out = Score.MEAN, Normalise.PROJECTED_COSINE
    expected = {(score, normalise) for score in Score for normalise in EVERY} - {left_out}
    assert {(fit.score, fit.normalise) for fit in fits} == expected


def test_a_row_of_zeros_has_the_cosine_zero() -> None:
    p, n = (PooledRows(np.array(rows, np.float32)) for rows in ([[2, 0]], [[0, 0]]))
    for normalise in EVERY[1:]:
        (fit,) = fits_of(p, n, (Score.LAST,), MADE[:1], (), (normalise,))
        assert fit.threshold.bound == pytest.approx(0.5)


def test_a_condition_that_always_holds_ranks_below_one_that_fits() -> None:
    score, row = Score.LAST, np.zeros(1, np.float32)

    def fit(f1: float, margin: float, held_out: Counts | None) -> Fit:
        return Fit(score, 0, Normalise.UNIT, row, Threshold(0.0, False), f1, margin, held_out)

    always = fit(2 / 3, -1.0, Counts(3, 1, 0, 2))
    fitting = fit(1.0, 0.67, Counts(2, 1, 1, 2))
    assert always.held_out is not None
    assert fitting.held_out is not None
    assert always.held_out.f1 > fitting.held_out.f1
    assert fitting.rank > always.rank
    assert fit(0.9, 0.0, None).rank > fit(0.8, 1.0, None).rank
