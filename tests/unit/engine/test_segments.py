"""The table of piecewise-constant functions answers like one dictionary per request."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine.core.segments import PositionTable

NUMBERS = st.integers(1, 5)
FUNCTIONS = st.dictionaries(st.integers(1, 12), st.integers(0, 9), max_size=4).flatmap(
    lambda rest: st.integers(0, 9).map(lambda first: sorted({0: first, **rest}.items()))
)
CHANGES = st.lists(st.tuples(NUMBERS, st.one_of(st.none(), FUNCTIONS)), max_size=10)
TOKENS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 14)), max_size=20)


@given(st.lists(st.tuples(CHANGES, TOKENS), max_size=4))
def test_lookups_equal_those_of_dictionaries_whatever_came_and_went(
    rounds: list[tuple[list[tuple[int, list[tuple[int, int]] | None]], list[tuple[int, int]]]],
) -> None:
    table, naive = PositionTable(), {}
    for changes, tokens in rounds:
        for number, pieces in changes:
            if pieces is None:
                table.drop(number)
                naive.pop(number, None)
            else:
                table.put(number, pieces)
                naive[number] = pieces
        assert len(table) == len(naive)
        numbers = np.array([n for n, _ in tokens], np.int64)
        positions = np.array([p for _, p in tokens], np.int64)
        expected = [
            [value for start, value in naive.get(n, [(0, 0)]) if start <= p][-1] for n, p in tokens
        ]
        assert table.lookup(numbers, positions).tolist() == expected


def test_a_position_far_away_stays_with_its_request() -> None:
    table = PositionTable()
    table.put(1, [(0, 3)])
    table.put(2, [(0, 5)])
    far = np.full(2, 2**31 - 2, np.int64)
    assert table.lookup(np.array([1, 2]), far).tolist() == [3, 5]
