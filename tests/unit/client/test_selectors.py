"""Selectors: what an expression becomes on the wire, and what is refused."""

import pytest
from google.protobuf import text_format

import rheostat
from rheostat import Selector
from rheostat._selectors import selector_of, to_wire
from rheostat_wire.v1 import selector_pb2

(PROMPT,), (GENERATED,) = selector_of("prompt").include, selector_of("generated").include


def wire(text: str) -> selector_pb2.Selector:
    return text_format.Parse(text, selector_pb2.Selector())


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("prompt", "include { phase: PHASE_PROMPT }"),
        ("generated", "include { phase: PHASE_GENERATED }"),
        (rheostat.positions(-1), "include { positions { start: -1 } }"),
        (rheostat.positions(0), "include { positions { start: 0 end: 1 } }"),
        (rheostat.positions(-2, -1), "include { positions { start: -2 } }"),
        (
            rheostat.positions(7, 3, 4, 3),
            "include { positions { start: 3 end: 5 } } include { positions { start: 7 end: 8 } }",
        ),
        (
            rheostat.positions(-1, 0),
            "include { positions { start: -1 } } include { positions { start: 0 end: 1 } }",
        ),
        (rheostat.window(0, 5), "include { positions { start: 0 end: 5 } }"),
        (rheostat.window(), "include { positions { } }"),
        (rheostat.window(end=-1), "include { positions { end: -1 } }"),
        (rheostat.window(2, -2), "include { positions { start: 2 end: -2 } }"),
        (rheostat.generated(0, 8), "include { generated { start: 0 end: 8 } }"),
        (rheostat.generated(3), "include { generated { start: 3 } }"),
        (rheostat.token_ids(5, 9), "include { token_ids { ids: 5 ids: 9 } }"),
        (rheostat.span("Eiffel"), 'include { text { text: "Eiffel" } }'),
        (
            rheostat.span("Eiffel", occurrence=0),
            'include { text { text: "Eiffel" occurrence: 0 } }',
        ),
        (
            "prompt" | rheostat.generated(0, 2),
            "include { phase: PHASE_PROMPT } include { generated { start: 0 end: 2 } }",
        ),
        (
            rheostat.positions(1) | "generated",
            "include { positions { start: 1 end: 2 } } include { phase: PHASE_GENERATED }",
        ),
        ("all" - rheostat.positions(0), "exclude { positions { start: 0 end: 1 } }"),
        (
            ("prompt" | rheostat.generated(0, 2)) - rheostat.span("a") - "generated",
            "include { phase: PHASE_PROMPT } include { generated { start: 0 end: 2 } }"
            'exclude { text { text: "a" } } exclude { phase: PHASE_GENERATED }',
        ),
    ],
)
def test_an_expression_means_the_ranges_it_is_written_with(selector, expected):
    assert to_wire(selector_of(selector)) == wire(expected)


@pytest.mark.parametrize("selector", [None, "all", "all" | rheostat.positions(3)])
def test_every_token_is_said_by_absence(selector):
    assert to_wire(selector_of(selector)) is None


def test_uniting_something_that_excludes_is_refused_since_excludes_would_win():
    partial = "prompt" - rheostat.positions(0)
    for unite in (lambda: partial | rheostat.positions(0), lambda: "generated" | partial):
        with pytest.raises(rheostat.InvalidRequest) as raised:
            unite()
        assert raised.value.message == "unite first, then exclude: (a | b) - c"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: rheostat.positions(), "REASON_EMPTY_SELECTOR"),
        (lambda: rheostat.token_ids(), "REASON_EMPTY_SELECTOR"),
        (lambda: rheostat.positions(0) - "all", "REASON_EMPTY_SELECTOR"),
        (lambda: rheostat.window(5, 5), "REASON_INVALID_POSITION"),
        (lambda: rheostat.window(-1, -3), "REASON_INVALID_POSITION"),
        (lambda: rheostat.generated(4, 4), "REASON_INVALID_POSITION"),
        (lambda: rheostat.generated(-1), "REASON_INVALID_POSITION"),
        (lambda: rheostat.span(""), "REASON_MISSING_FIELD"),
        (lambda: selector_of("last"), "REASON_INVALID_VALUE"),
        (lambda: "prompt" - (rheostat.window() - rheostat.positions(0)), "REASON_INVALID_VALUE"),
    ],
)
def test_what_selects_nothing_or_means_nothing_is_refused_before_it_is_sent(make, reason):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        make()
    assert (raised.value.reason, raised.value.path) == (reason, "where")


def test_a_selector_reads_as_the_expression_that_makes_it():
    selector = ("prompt" | rheostat.generated(0, 8)) - rheostat.span("Eiffel", occurrence=1)
    expected = "(\"prompt\" | generated(0, 8)) - span('Eiffel', occurrence=1)"
    assert repr(selector) == expected
    words = [
        Selector((PROMPT, GENERATED)),
        Selector((PROMPT,), (GENERATED,)),
        Selector((), (PROMPT, GENERATED)),
        Selector((GENERATED, PROMPT), (GENERATED,)),
        Selector((rheostat.positions(3).include[0], PROMPT, GENERATED)),
    ]
    assert [repr(one) for one in words] == [
        '"prompt" | generated()',
        '"prompt" - generated()',
        '"all" - window() - "generated"',
        '("generated" | window()) - "generated"',
        'positions(3) | "prompt" | "generated"',
    ]
    for one in words:
        eval(
            repr(one),
            {name: getattr(rheostat, name) for name in ("generated", "positions", "window")},
        )
    assert repr("all" - rheostat.positions(-1)) == '"all" - positions(-1)'


@pytest.mark.parametrize(
    ("select", "advice"),
    [
        (lambda: rheostat.positions([0, 1]), "write rheostat.positions(*[0, 1])"),
        (lambda: rheostat.positions(range(3)), "write rheostat.positions(*range(0, 3))"),
        (lambda: rheostat.token_ids((5, 9)), "write rheostat.token_ids(*(5, 9))"),
    ],
)
def test_the_error_for_a_list_shows_how_to_pass_the_numbers(select, advice):
    with pytest.raises(rheostat.InvalidRequest) as raised:
        select()
    assert advice in raised.value.message
