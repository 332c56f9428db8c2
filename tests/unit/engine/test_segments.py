"""The table of piecewise-constant functions answers like one dictionary per request."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine.core.segments import PositionTable

Value = tuple[int, int, int]
Pieces = list[tuple[int, Value]]

NUMBERS = st.integers(1, 5)
VALUES = st.tuples(st.integers(0, 9), st.integers(-9, 0), st.integers(0, 2**31 - 1))
FUNCTIONS = st.dictionaries(st.integers(1, 12), VALUES, max_size=4).flatmap(
    lambda rest: VALUES.map(lambda first: sorted({0: first, **rest}.items()))
)
CHANGES = st.lists(st.tuples(NUMBERS, st.one_of(st.none(), FUNCTIONS)), max_size=10)
TOKENS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 14)), max_size=20)


@pytest.mark.parametrize("columns", [1, 3])
@given(st.lists(st.tuples(CHANGES, TOKENS), max_size=4))
def test_lookups_equal_those_of_dictionaries_whatever_came_and_went(
    columns: int, rounds: list[tuple[list[tuple[int, Pieces | None]], list[tuple[int, int]]]]
) -> None:
    table = PositionTable(columns)
    naive: dict[int, Pieces] = {}
    for changes, tokens in rounds:
        for number, pieces in changes:
            if pieces is None:
                table.drop(number)
                naive.pop(number, None)
            else:
                starts, values = zip(*pieces, strict=True)
                table.put(number, starts, [value[:columns] for value in values])
                naive[number] = pieces
        assert len(table) == len(naive)
        numbers = np.array([n for n, _ in tokens], np.int64)
        positions = np.array([p for _, p in tokens], np.int64)
        expected = [
            [value for start, value in naive.get(n, [(0, (0, 0, 0))]) if start <= p][-1][:columns]
            for n, p in tokens
        ]
        found = table.lookup(numbers, positions)
        assert found.shape == (len(tokens), columns)
        assert [tuple(row) for row in found.tolist()] == expected


def test_a_position_far_away_stays_with_its_request() -> None:
    table = PositionTable()
    table.put(1, [0], [3])
    table.put(2, [0], [5])
    far = np.full(2, 2**31 - 2, np.int64)
    assert table.lookup(np.array([1, 2]), far).tolist() == [[3], [5]]
