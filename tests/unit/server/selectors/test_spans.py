"""Spans are sets of positions, however many they are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import Spans
from rheostat_server.selectors.spans import clipped, joined, length, runs, subtracted, united

END = 400
pairs = st.tuples(st.integers(0, END), st.integers(0, END))


@st.composite
def many(draw) -> list[tuple[int, int]]:
    """More spans than plain Python takes, in any order."""
    starts = draw(st.lists(st.integers(0, END), min_size=40, max_size=90))
    return [(start, start + draw(st.integers(-1, 4))) for start in starts]


def members(spans) -> set[int]:
    return {p for start, end in spans for p in range(start, end)}


def spelled(positions: set[int]) -> Spans:
    """The spans of positions, one position after the other."""
    spans: list[tuple[int, int]] = []
    for position in sorted(positions):
        if spans and spans[-1][1] == position:
            spans[-1] = (spans[-1][0], position + 1)
        else:
            spans.append((position, position + 1))
    return tuple(spans)


@given(many(), many(), st.lists(pairs, max_size=3), pairs)
def test_many_spans_are_the_same_sets_as_few(left, right, few, part) -> None:
    a, b = united(left), united(right)
    assert a == spelled(members(left))
    assert joined(a, right) == spelled(members(left) | members(right))
    assert joined(a, few) == spelled(members(left) | members(few))
    assert subtracted(a, b) == spelled(members(left) - members(right))
    assert subtracted(a, united(few)) == spelled(members(left) - members(few))
    assert clipped(a, *part) == spelled(members(left) & set(range(*part)))
    assert runs(np.array(sorted(members(left)), dtype=np.int32)) == a
    assert length(a) == len(members(left))


def test_spans_hold_plain_integers() -> None:
    some = tuple((p, p + 1) for p in range(0, 200, 2))
    for spans in (united(some), subtracted(some, ((1, 7),)), runs(np.arange(0, 200, 2))):
        assert {type(edge) for span in spans for edge in span} == {int}


@pytest.mark.parametrize("made", [united([]), runs(np.array([], dtype=np.int64))])
def test_no_positions_are_no_spans(made) -> None:
    assert made == ()
