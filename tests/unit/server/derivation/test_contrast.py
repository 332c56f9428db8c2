"""Directions between two sets of rows, against references that are written another way."""

import statistics
from collections.abc import Callable

import numpy as np
import pytest

from rheostat_server.derivation.contrast import Method, contrast

MEANS, COMPONENT = Method.DIFFERENCE_OF_MEANS, Method.PRINCIPAL_COMPONENT


def rows(count: int, width: int, seed: int, shift: float = 0.0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    spread = np.linspace(0.2, 3.0, width)
    return (generator.standard_normal((count, width)) * spread + shift).astype(np.float32)


def explained(unit: np.ndarray, differences: list[np.ndarray]) -> float:
    """The fraction of the differences along a unit direction, pair by pair."""
    along = sum(float(d @ unit) ** 2 for d in differences)
    return along / sum(float(d @ d) for d in differences)


def by_means(p: np.ndarray, n: np.ndarray) -> np.ndarray:
    return p.mean(axis=0, dtype=np.float64) - n.mean(axis=0, dtype=np.float64)


def by_svd(p: np.ndarray, n: np.ndarray) -> np.ndarray:
    differences = p.astype(np.float64) - n.astype(np.float64)
    first = np.linalg.svd(differences)[2][0]
    return first * np.sign(differences.mean(axis=0) @ first)


def held_out(p: np.ndarray, n: np.ndarray, make: Callable) -> float:
    """Cohen's d of the sets' scores, prompt by prompt."""
    parts = min(10, len(p), len(n))

    def score(row: np.ndarray, index: int) -> float:
        others_p, others_n = (
            np.stack([x for i, x in enumerate(rows) if i % parts != index % parts])
            for rows in (p, n)
        )
        direction = make(others_p, others_n)
        middle = by_means(others_p, -others_n) / 2
        return float((row - middle) @ direction / np.sqrt((direction**2).sum()))

    on_p, on_n = ([score(row, i) for i, row in enumerate(rows)] for rows in (p, n))
    summed = sum((len(on) - 1) * statistics.variance(on) for on in (on_p, on_n))
    pooled = (summed / (len(p) + len(n) - 2)) ** 0.5
    return (statistics.fmean(on_p) - statistics.fmean(on_n)) / pooled


@pytest.mark.parametrize(("p", "n"), [(5, 5), (7, 2), (40, 30), (12, 11)])
def test_the_difference_of_means_is_that_and_its_figures_are_those_of_every_pair(p, n):
    positive, negative = rows(p, 16, 1, 0.5), rows(n, 16, 2)
    found = contrast(positive, negative, MEANS)
    expected = np.array(
        [
            statistics.fmean(map(float, positive[:, k])) - statistics.fmean(map(float, column))
            for k, column in enumerate(negative.T)
        ]
    )
    assert np.array_equal(found.row, expected.astype(np.float32))
    norm = float(np.sqrt((expected**2).sum()))
    assert found.norm == pytest.approx(norm, rel=1e-6)
    pairs = [a.astype(np.float64) - b for a in positive for b in negative]
    assert found.explained == pytest.approx(explained(expected / norm, pairs), rel=1e-9)
    assert found.separation == pytest.approx(held_out(positive, negative, by_means), rel=1e-9)


@pytest.mark.parametrize(("count", "width"), [(4, 16), (16, 16), (40, 8), (2, 64)])
def test_the_principal_component_is_the_first_right_singular_vector(count, width):
    positive, negative = rows(count, width, 3, 0.4), rows(count, width, 4)
    found = contrast(positive, negative, COMPONENT)
    unit = by_svd(positive, negative)
    assert found.row == pytest.approx(unit, abs=1e-6)
    assert found.norm == pytest.approx(1, abs=1e-6)
    pairs = list(positive.astype(np.float64) - negative)
    assert found.explained == pytest.approx(explained(unit, pairs), rel=1e-9)
    assert found.separation == pytest.approx(held_out(positive, negative, by_svd), rel=1e-6)


def test_a_component_on_which_the_mean_does_not_lie_has_a_positive_largest_element():
    positive = np.array([[0, 3, 0], [0, -3, 0], [1, 0, 0]], np.float32)
    found = contrast(positive, np.zeros((3, 3), np.float32), COMPONENT)
    assert found.row.tolist() == [0, 1, 0]
    assert (found.norm, found.explained) == (1, 18 / 19)


@pytest.mark.parametrize("method", [MEANS, COMPONENT])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_equal_sets_have_no_direction(method, count):
    same = np.repeat(rows(1, 5, 5), count, axis=0)
    found = contrast(same, same.copy(), method)
    assert found.row.tolist() == [0] * 5
    assert found[1:] == (0, 0, None)


@pytest.mark.parametrize("method", [MEANS, COMPONENT])
def test_one_prompt_in_each_set_has_a_direction_and_no_separation(method):
    found = contrast(np.array([[3, 4]], np.float32), np.zeros((1, 2), np.float32), method)
    direction = np.array([3, 4]) / (1 if method is MEANS else 5)
    assert found.row == pytest.approx(direction)
    assert (found.explained, found.separation) == (1, None)


@pytest.mark.parametrize("method", [MEANS, COMPONENT])
def test_sets_of_equal_rows_have_no_separation_even_where_rows_are_not_round_numbers(method):
    positive, negative = (np.repeat(rows(1, 64, seed), 7, axis=0) for seed in (6, 7))
    found = contrast(positive, negative, method)
    assert found.row / found.norm == pytest.approx(by_svd(positive, negative), abs=1e-6)
    assert (found.explained, found.separation) == (pytest.approx(1), None)


def test_separation_counts_standard_deviations_between_the_sets():
    def separation(distance: float, spread: float) -> float | None:
        offsets = np.array([[-1.0], [0.0], [1.0]] * 20) * spread
        flat = np.hstack([offsets, np.zeros((60, 1))]).astype(np.float32)
        shifted = flat + np.array([distance, 0], np.float32)
        return contrast(shifted, flat, MEANS).separation

    deviation = (2 / 3 * 60 / 59) ** 0.5
    assert [separation(2, 1), separation(4, 1), separation(4, 2)] == pytest.approx(
        [2 / deviation, 4 / deviation, 2 / deviation], rel=0.05
    )


@pytest.mark.parametrize("method", [MEANS, COMPONENT])
def test_noise_is_not_separated_however_wide_it_is(method):
    generator = np.random.default_rng(8)
    positive, negative = generator.standard_normal((2, 20, 2048)).astype(np.float32)
    separation = contrast(positive, negative, method).separation
    assert separation is not None
    assert abs(separation) < 1  # along the direction itself it would be about 14
