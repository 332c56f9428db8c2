"""Token ids and texts are found in a prompt as a look at each token finds them."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_server.errors import InvalidValue
from rheostat_server.prompts.prompts import PromptTokens
from rheostat_server.selectors.prompt_index import PromptIndex
from rheostat_server.selectors.selection import SelectionContext, resolve_selector

from ..messages import selector, span


def index(text: str, offsets, ids=None) -> PromptIndex:
    tokens = tuple(ids or range(len(offsets)))
    return PromptIndex(PromptTokens(tokens, "text", text, tuple(offsets)), vocabulary=64)


@st.composite
def tokenised(draw) -> list[tuple[int, int]]:
    """Where tokens stand: some share characters, some have none, special ones stand at 0."""
    cuts = sorted(draw(st.lists(st.integers(0, 20), min_size=2, max_size=12)))
    places = [cut for cut in pairwise(cuts) for _ in range(draw(st.integers(1, 2)))]
    before, after = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    return [(0, 0)] * before + places + [(0, 0)] * after


@given(tokenised(), st.integers(0, 19), st.integers(1, 6))
def test_a_stretch_of_text_is_held_by_the_tokens_that_share_a_character(places, start, size):
    end = start + size
    held = [p for p, (a, b) in enumerate(places) if a < end and b > start and a < b]
    expected = (held[0], held[-1] + 1) if held else None
    assert index("x" * 20, places).tokens_of_text(start, end) == expected


@given(st.text("ab", max_size=12), st.text("ab", min_size=1, max_size=3))
def test_occurrences_are_those_that_a_search_from_left_to_right_finds(text, wanted) -> None:
    starts, at = [], text.find(wanted)
    while at >= 0:
        starts.append(at)
        at = text.find(wanted, at + len(wanted))
    assert index(text, [(0, 1)]).occurrences(wanted).tolist() == starts


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.sets(st.integers(0, 12)))
def test_token_ids_are_found_wherever_they_stand(ids, wanted) -> None:
    spans = index("", [(0, 0)], ids).tokens(wanted)
    assert [p for a, b in spans for p in range(a, b)] == [
        p for p, one in enumerate(ids) if one in wanted
    ]


def test_what_a_pattern_would_read_is_text() -> None:
    assert index("a.b*", [(0, 4)]).occurrences(".b*").tolist() == [1]
    assert index("axb", [(0, 3)]).occurrences("a.b").tolist() == []


def test_a_text_is_searched_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[str] = []
    find = PromptIndex._find
    monkeypatch.setattr(
        PromptIndex, "_find", lambda self, text: (searches.append(text), find(self, text))[1]
    )
    text = "ab" * 50
    prompt = PromptTokens(
        tuple(range(100)), "text", text, tuple((p, p + 1) for p in range(len(text)))
    )
    context = SelectionContext(prompt, 4, vocabulary=128)
    where = selector(*(span("b", occurrence) for occurrence in range(50)))
    for _ in range(2):
        found = resolve_selector(where, context, "where")
    assert found.spans == tuple((p, p + 1) for p in range(1, 100, 2))
    assert searches == ["b"]


def test_searching_for_many_texts_in_a_long_prompt_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("rheostat_server.selectors.prompt_index.SPAN_SEARCH", 3 * (26 + 128))
    text = "abcdefghijklmnopqrstuvwxyz"
    prompt = PromptTokens(tuple(range(26)), "text", text, tuple((p, p + 1) for p in range(26)))

    def resolved(texts: str) -> None:
        where = selector(*map(span, texts))
        resolve_selector(where, SelectionContext(prompt, 4, vocabulary=128), "where")

    resolved("abc")
    with pytest.raises(InvalidValue, match="searches more than") as caught:
        resolved("abcd")
    assert caught.value.field == "where.include[3].text"
