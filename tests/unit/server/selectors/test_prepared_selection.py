"""A prepared selector selects what the selector itself does, in every prompt."""

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import OPEN_END
from rheostat_server.errors import InvalidArgument
from rheostat_server.prompts.prompts import PromptTokens
from rheostat_server.selectors import prepared_selection
from rheostat_server.selectors.prepared_selection import PreparedSelector, TooFragmented
from rheostat_server.selectors.selection import SelectionContext, resolve_selector
from rheostat_wire.v1 import selector_pb2

from ..messages import GENERATED, PROMPT, generated, selector, token_range, window

VOCABULARY = 6
PLENTY = 1 << 20

bounds = st.one_of(st.none(), st.integers(-7, 12))
counts = st.one_of(st.none(), st.integers(0, 9), st.just(2**32 - 1))
ranges = st.one_of(
    st.builds(window, bounds, bounds),
    st.builds(generated, counts, counts),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=3).map(
        lambda ids: token_range(*ids)
    ),
    st.sampled_from([PROMPT, GENERATED]),
)
selectors = st.builds(
    lambda include, exclude: selector(*include, exclude=exclude),
    st.lists(ranges, max_size=4),
    st.lists(ranges, max_size=3),
)


def context(tokens: list[int], max_tokens: int) -> SelectionContext:
    prompt = PromptTokens(tuple(tokens), "token_ids", None, None)
    return SelectionContext(prompt, max_tokens, VOCABULARY, lenient=True)


@given(
    selectors,
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=8),
    st.integers(1, 5),
    st.sampled_from([0, 32]),
)
def test_it_selects_what_the_selector_does(wanted, tokens, max_tokens, few) -> None:
    at = context(tokens, max_tokens)
    try:
        expected = resolve_selector(wanted, at, "where")
    except InvalidArgument:
        return
    with patch.object(prepared_selection, "_FEW", few):
        assert PreparedSelector(wanted).resolve(at, PLENTY) == expected


def test_a_selection_of_too_many_spans_is_none() -> None:
    at = context([1, 2] * 50, 4)
    by_id = PreparedSelector(selector(token_range(1)))
    assert len(by_id.resolve(at, 51).spans) == 50  # and one more for generated tokens
    with pytest.raises(TooFragmented):
        by_id.resolve(at, 50)
    windows = PreparedSelector(selector(*[window(2 * n, 2 * n + 1) for n in range(50)]))
    assert len(windows.resolve(at, 50).spans) == 50
    with pytest.raises(TooFragmented):
        windows.resolve(at, 49)


def test_the_spans_of_many_tokens_are_not_even_made_where_they_are_too_many(monkeypatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(
        "rheostat_server.selectors.prepared_selection.runs", lambda at: made.append(1) or ()
    )
    with pytest.raises(TooFragmented):
        PreparedSelector(selector(token_range(1))).resolve(context([1, 2] * 5000, 4), 100)
    assert made == []


def test_the_largest_generated_window_ends_where_positions_do() -> None:
    every = PreparedSelector(selector_pb2.Selector(include=[generated(0, 2**32 - 1)]))
    assert every.resolve(context([1, 2, 3], 4), PLENTY).spans[-1][1] <= OPEN_END
