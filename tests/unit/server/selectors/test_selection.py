from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import OPEN_END, Spans, TokenCondition
from rheostat_server.errors import (
    EmptySelector,
    InvalidPosition,
    InvalidValue,
    MissingField,
    NotSupported,
    SpanAmbiguous,
    SpanNotFound,
    UnknownEnum,
    UnknownToken,
)
from rheostat_server.prompts.prompts import PromptTokens
from rheostat_server.selectors.selection import Selection, SelectionContext, resolve_selector
from rheostat_server.selectors.spans import clipped, subtracted, united
from rheostat_wire.v1 import selector_pb2, types_pb2

from ..characters import CharTokenizer
from ..messages import GENERATED, PROMPT, generated, selector, span, token_range, window

TEXT = "the cat saw the dog"
PROMPT_LEN = 8
MAX_TOKENS = 4


def context(text: str | None = None, lenient: bool = False) -> SelectionContext:
    if text is None:
        prompt = PromptTokens(tuple(range(10, 10 + PROMPT_LEN)), "token_ids", None, None)
    else:
        encoded = CharTokenizer().encode(text, special=True, most=len(text) + 1)
        prompt = PromptTokens(encoded.token_ids, "text", text, encoded.offsets)
    return SelectionContext(prompt, MAX_TOKENS, vocabulary=128, lenient=lenient)


def selected(*include, exclude=(), text: str | None = None, lenient: bool = False) -> Selection:
    where = selector(*include, exclude=exclude)
    return resolve_selector(where, context(text, lenient), "where")


def resolve(*include, exclude=(), text: str | None = None) -> Spans:
    """What a selector selects that no generated token has a say in."""
    selection = selected(*include, exclude=exclude, text=text)
    assert selection.conditions == ()
    return selection.spans


@pytest.mark.parametrize(
    ("one", "spans"),
    [
        (PROMPT, ((0, 8),)),
        (GENERATED, ((8, OPEN_END),)),
        (window(), ((0, 8),)),
        (window(-1), ((7, 8),)),
        (window(None, -1), ((0, 7),)),
        (window(-8, -7), ((0, 1),)),
        (window(2, 5), ((2, 5),)),
        (window(10, 40), ((10, 40),)),
        (window(0, 2**31 - 1), ((0, OPEN_END),)),
        (generated(), ((8, OPEN_END),)),
        (generated(1, 3), ((9, 11),)),
        (generated(2, 2**32 - 1), ((10, OPEN_END),)),
    ],
)
def test_a_range_is_exactly_these_positions(one, spans) -> None:
    assert resolve(one) == spans


@pytest.mark.parametrize(
    ("one", "error", "field"),
    [
        (window(-9), InvalidPosition, "positions.start"),
        (window(0, -9), InvalidPosition, "positions.end"),
        (window(3, 3), InvalidPosition, "positions"),
        (window(5, 2), InvalidPosition, "positions"),
        (window(8), InvalidPosition, "positions"),
        (window(11, 12), InvalidPosition, "positions"),
        (generated(3, 3), InvalidPosition, "generated"),
        (generated(3), InvalidPosition, "generated"),
        (generated(2**32 - 1), InvalidPosition, "generated"),
        (selector_pb2.Range(), MissingField, ""),
        (selector_pb2.Range(phase=types_pb2.PHASE_UNSPECIFIED), UnknownEnum, "phase"),
        (selector_pb2.Range(phase=9), UnknownEnum, "phase"),
        (token_range(128), UnknownToken, "token_ids.ids[0]"),
        (token_range(), MissingField, "token_ids.ids"),
        (span("x"), NotSupported, "text"),
        (span(""), MissingField, "text.text"),
        (span("x" * 4097), InvalidValue, "text.text"),
    ],
)
def test_a_wrong_range_is_refused_by_its_path(one, error, field) -> None:
    with pytest.raises(error) as caught:
        resolve(PROMPT, one)
    assert caught.value.field == ".".join(filter(None, ("where.include[1]", field)))
    with pytest.raises(error):
        resolve(exclude=[one])


def test_the_last_position_with_a_row_can_be_selected_and_the_next_cannot() -> None:
    last = PROMPT_LEN + MAX_TOKENS - 2
    assert resolve(window(last, last + 1)) == ((last, last + 1),)
    assert resolve(generated(MAX_TOKENS - 2)) == ((last, OPEN_END),)
    for beyond in (window(last + 1, last + 2), generated(MAX_TOKENS - 1)):
        with pytest.raises(InvalidPosition):
            resolve(beyond)


def test_a_present_selector_without_ranges_is_refused() -> None:
    with pytest.raises(EmptySelector) as caught:
        resolve()
    assert caught.value.field == "where"


def test_excludes_alone_leave_everything_else() -> None:
    assert resolve(exclude=[window(2, 4)]) == ((0, 2), (4, OPEN_END))


def test_excludes_win_and_may_leave_nothing() -> None:
    assert resolve(window(2, 6), exclude=[window(3, 4)]) == ((2, 3), (4, 6))
    assert resolve(window(2, 6), exclude=[PROMPT]) == ()


GENERATED_SPANS = ((PROMPT_LEN, OPEN_END),)


def test_token_ids_that_are_confined_to_the_prompt_are_positions() -> None:
    assert resolve(token_range(10, 12, 99), exclude=[GENERATED]) == ((0, 1), (2, 3))
    assert resolve(PROMPT, exclude=[token_range(11)]) == ((0, 1), (2, 8))
    assert resolve(exclude=[token_range(11), GENERATED]) == ((0, 1), (2, 8))


def test_token_ids_select_generated_tokens_too() -> None:
    assert selected(token_range(12, 99), token_range(99, 10)) == Selection(
        ((0, 1), (2, 3)), (TokenCondition(GENERATED_SPANS, (10, 12, 99), True),)
    )
    assert selected(token_range(99), window(10, 12)) == Selection(
        ((10, 12),), (TokenCondition(((8, 10), (12, OPEN_END)), (99,), True),)
    )


def test_excluded_token_ids_make_generated_positions_conditional() -> None:
    assert selected(exclude=[token_range(11, 99)]) == Selection(
        ((0, 1), (2, 8)), (TokenCondition(GENERATED_SPANS, (11, 99), False),)
    )
    assert selected(PROMPT, window(9, 11), exclude=[token_range(11)]) == Selection(
        ((0, 1), (2, 8)), (TokenCondition(((9, 11),), (11,), False),)
    )


def test_excludes_win_over_token_ids() -> None:
    both = selected(token_range(11, 50), window(8, 9), exclude=[token_range(50, 51), window(9, 12)])
    assert both == Selection(
        ((1, 2),),
        (
            TokenCondition(((8, 9),), (50, 51), False),
            TokenCondition(((12, OPEN_END),), (11,), True),
        ),
    )
    assert selected(token_range(50), exclude=[token_range(50)]) == Selection(())


def test_a_selection_says_where_it_can_reach_and_what_is_known() -> None:
    one = Selection(
        ((0, 2),), (TokenCondition(((4, 6),), (9,), True), TokenCondition(((6, 8),), (9,), False))
    )
    assert (one.reach, one.known) == (((0, 2), (4, 8)), ((0, 2), (6, 8)))


def test_positions_beyond_the_known_tokens_are_held_only_if_no_token_matters() -> None:
    one = Selection(((5, 9),), (TokenCondition(((2, 5),), (7,), True),))
    assert one.selected(2, [7], 0, 7) == ((2, 3), (5, 7))
    assert one.selected(2, [8, 7, 7], 0, 100) == ((3, 9),)
    assert one.selected(2, [8, 7, 7], 4, 6) == ((4, 6),)


@pytest.mark.parametrize(
    "missing",
    [window(-9), window(0, -9), window(3, 3), window(5, 2), window(8), window(11, 12)],
)
def test_server_wide_windows_that_a_prompt_does_not_have_select_nothing(missing) -> None:
    assert selected(missing, lenient=True) == Selection(())
    assert selected(missing, window(0, 2), lenient=True) == Selection(((0, 2),))
    assert selected(PROMPT, exclude=[missing], lenient=True) == Selection(((0, 8),))


def test_server_wide_windows_of_generated_tokens_need_not_be_reached() -> None:
    late = generated(2**32 - 2, 2**32 - 1)
    assert selected(late, lenient=True) == Selection(())
    assert selected(generated(50), lenient=True) == Selection(((58, OPEN_END),))
    with pytest.raises(InvalidPosition):
        selected(generated(3, 3), lenient=True)


def test_server_wide_steering_has_no_text_to_look_in() -> None:
    with pytest.raises(InvalidValue) as caught:
        selected(PROMPT, span("cat"), text=TEXT, lenient=True)
    assert caught.value.field == "where.include[1].text"


def test_a_span_is_every_token_that_shares_a_character_with_it() -> None:
    assert resolve(span("cat"), text=TEXT) == ((5, 8),)
    assert resolve(span("the", 1), text=TEXT) == ((13, 16),)


def test_a_span_must_occur_once_or_say_which() -> None:
    with pytest.raises(SpanAmbiguous) as caught:
        resolve(span("the"), text=TEXT)
    assert caught.value.metadata == {"occurrences": "2"}
    for missing in (span("cow"), span("the", 2), span("cat", 1)):
        with pytest.raises(SpanNotFound):
            resolve(missing, text=TEXT)


def test_occurrences_do_not_overlap() -> None:
    assert resolve(span("aa", 1), text="aaaa") == ((3, 5),)
    with pytest.raises(SpanNotFound):
        resolve(span("aa", 2), text="aaaa")


def test_too_many_ranges_are_refused() -> None:
    with pytest.raises(InvalidValue) as caught:
        resolve(*[PROMPT] * 1025)
    assert caught.value.field == "where.include"


END = 40
pairs = st.tuples(st.integers(0, END), st.integers(0, END))
some_spans = st.lists(pairs, max_size=8)


def members(spans) -> set[int]:
    return {p for start, end in spans for p in range(start, end)}


def is_normal(spans: Spans) -> bool:
    edges = [edge for one in spans for edge in one]
    return all(a < b for a, b in pairwise(edges))


@given(some_spans, some_spans, pairs)
def test_spans_are_sets_of_positions(left, right, part) -> None:
    a, b = united(left), united(right)
    less, cut = subtracted(a, b), clipped(a, *part)
    assert members(a) == members(left)
    assert members(less) == members(left) - members(right)
    assert members(cut) == {p for p in members(left) if part[0] <= p < part[1]}
    assert is_normal(a)
    assert is_normal(less)
    assert is_normal(cut)


ROWS = PROMPT_LEN + MAX_TOKENS - 1


IDS = st.lists(st.sampled_from([10, 11, 12, 50, 51, 52]), min_size=1, max_size=3)


@st.composite
def ranges(draw) -> tuple[selector_pb2.Range, set[int], set[int]]:
    """A range, the positions below END that it should select one by one, and the token ids."""
    kind = draw(st.sampled_from(["prompt", "generated", "window", "generated window", "ids"]))
    if kind == "prompt":
        return PROMPT, set(range(PROMPT_LEN)), set()
    if kind == "generated":
        return GENERATED, set(range(PROMPT_LEN, END)), set()
    if kind == "ids":
        ids = draw(IDS)
        return token_range(*ids), set(), set(ids)
    if kind == "generated window":
        start = draw(st.integers(0, MAX_TOKENS - 2))
        end = draw(st.integers(start + 1, 20))
        held = {p for p in range(END) if start <= p - PROMPT_LEN < end}
        return generated(start, end), held, set()
    start = draw(st.integers(0, ROWS - 1))
    end = draw(st.integers(start + 1, END))
    signed = draw(st.booleans())
    shift = PROMPT_LEN if signed else 0
    wire_start = start - shift if start < PROMPT_LEN else start
    wire_end = end - shift if end < PROMPT_LEN else end
    return window(wire_start, wire_end), {p for p in range(END) if start <= p < end}, set()


some_ranges = st.lists(ranges(), max_size=5)
new_tokens = st.lists(
    st.sampled_from([10, 12, 50, 51, 52, 53]), min_size=END - PROMPT_LEN, max_size=END - PROMPT_LEN
)


@given(some_ranges, some_ranges, new_tokens, pairs)
def test_a_selector_selects_what_a_check_of_each_token_selects(include, exclude, new, part) -> None:
    if not include and not exclude:
        return
    selection = selected(*[r for r, _, _ in include], exclude=[r for r, _, _ in exclude])
    tokens = [*range(10, 10 + PROMPT_LEN), *new]

    def named(position: int, parts) -> bool:
        return any(position in held or tokens[position] in ids for _, held, ids in parts)

    wanted = {p for p in range(END) if (not include or named(p, include)) and not named(p, exclude)}
    first, past = sorted(part)
    assert members(selection.selected(PROMPT_LEN, new, 0, END)) == wanted
    assert members(selection.selected(PROMPT_LEN, new, first, past)) == {
        p for p in wanted if first <= p < past
    }
    assert wanted <= members(clipped(selection.reach, 0, END))
    clauses = [selection.spans, *(one.spans for one in selection.conditions)]
    assert all(map(is_normal, clauses))
    assert sum(len(members(clipped(spans, 0, END))) for spans in clauses) == len(
        members(clipped(selection.reach, 0, END))
    )
    assert all(one.spans[0][0] >= PROMPT_LEN for one in selection.conditions)
