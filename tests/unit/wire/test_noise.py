"""Noise is drawn by the recipe that replace.proto gives, one row at a time."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_wire.noise import normal_row

WORD = (1 << 64) - 1


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, ...]:
    """Four words of Philox 4x64-10, as Salmon et al. (2011) write it."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        low, high = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = high >> 64 ^ c1 ^ k0, high & WORD, low >> 64 ^ c3 ^ k1, low & WORD
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD, (k1 + 0xBB67AE8584CAA73B) & WORD
    return c0, c1, c2, c3


def by_the_recipe(seed: int, site: int, position: int, width: int) -> list[float]:
    blocks = range(1, width // 4 + 2)
    words = [w for block in blocks for w in philox((seed, site), (block, position, 0, 0))]
    uniform = [(word >> 11) / 2**53 for word in words]
    row = []
    for i in range(0, len(uniform), 2):
        r, a = math.sqrt(-2 * math.log(1 - uniform[i])), 2 * math.pi * uniform[i + 1]
        row += [r * math.cos(a), r * math.sin(a)]
    return row[:width]


@given(st.integers(0, WORD), st.integers(0, 400), st.integers(0, 2**31 - 2), st.integers(1, 33))
def test_a_row_follows_the_recipe(seed: int, site: int, position: int, width: int) -> None:
    expected = by_the_recipe(seed, site, position, width)
    row = normal_row(seed, site, position, width)
    assert row.shape == (width,)
    np.testing.assert_allclose(row, expected, rtol=1e-12, atol=1e-12)


def test_a_row_has_its_numbers_for_ever() -> None:
    row = normal_row(7, 12, 3, 5)
    assert row.astype(np.float32).tolist() == [
        -2.3881773948669434,
        0.037163812667131424,
        -1.1459189653396606,
        0.5646757483482361,
        -0.8791510462760925,
    ]
    assert normal_row(7, 12, 3, 4).tolist() == row[:4].tolist()


def test_rows_are_normal_and_independent() -> None:
    width = 20_000
    keys = product((0, 1, 2**64 - 1), (0, 4), (0, 1, 255))
    rows = np.stack([normal_row(*key, width) for key in keys])
    assert np.isfinite(rows).all()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        error = 5 * math.sqrt(variance / rows.size)
        assert float((rows**power).mean()) == pytest.approx(moment, abs=error)
    correlation = rows @ rows.T / width
    np.testing.assert_allclose(correlation, np.eye(len(rows)), atol=6 / math.sqrt(width))
    ahead = (rows[:, 1:] * rows[:, :-1]).mean(axis=1)
    np.testing.assert_allclose(ahead, 0, atol=6 / math.sqrt(width))
