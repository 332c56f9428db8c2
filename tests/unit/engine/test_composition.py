"""Acts are composed to what naively happens at each position, to each token."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import (
    MAX_EFFORT,
    MAX_STEPS,
    MAX_TOKEN_SETS,
    Act,
    Band,
    Capture,
    Condition,
    Kind,
    Plan,
    Spans,
    amend,
    compose,
    effort,
)
from rheostat_engine.composition import (
    Piece,
    Step,
    Variant,
    attribution,
    combine,
    only_adds,
)
from rheostat_engine.pieces import segment

from .naive import described, steps
from .strategies import (
    DIGESTS,
    EVERYWHERE,
    POSITIONS,
    SITES,
    VOCABULARY,
    ablate,
    acts,
    add,
    holds,
    plans,
    selects,
    spans,
)

A, B, C = DIGESTS
ACTS = st.lists(acts(), max_size=4)
LOOKS = 1
"""What looking at the acts of a small plan costs: up to 64 looks, or token ids, cost one."""


def variant_of(piece: Piece, token: int) -> Variant:
    """What happens in a piece to a token."""
    number = sum((token in tokens) << bit for bit, tokens in enumerate(piece.sets))
    return piece.variants[number]


@given(st.lists(spans(), max_size=4))
def test_segments_hold_at_each_position_the_spans_that_do(many: list[Spans]) -> None:
    pieces = segment(many)
    starts = [start for start, _ in pieces]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert all(one[1] != other[1] for one, other in pairwise(pieces))
    for position in POSITIONS:
        (members,) = [m for start, m in pieces if start <= position][-1:]
        assert members == tuple(i for i, one in enumerate(many) if holds(one, position))


@given(ACTS)
def test_the_variant_of_a_position_and_token_has_exactly_the_acts_that_select_it(
    many: list[Act],
) -> None:
    pieces = compose(many)
    assert [piece.start for piece in pieces] == sorted({piece.start for piece in pieces})
    assert pieces[0].start == 0
    for position in POSITIONS:
        piece = [piece for piece in pieces if piece.start <= position][-1]
        assert len(piece.variants) == 2 ** len(piece.sets)
        for token in range(VOCABULARY):
            expected = tuple(i for i, act in enumerate(many) if selects(act, position, token))
            assert variant_of(piece, token).members == expected


@given(plans())
def test_a_variant_does_at_each_site_what_its_acts_do_in_their_order(plan: Plan) -> None:
    pieces = compose(plan.acts)
    for position in POSITIONS:
        piece = [piece for piece in pieces if piece.start <= position][-1]
        for token in range(VOCABULARY):
            combination = variant_of(piece, token).combination
            expected = {site: steps(plan, site, position, token) for site in range(SITES)}
            found = {site: described(program) for site, program in combination}
            assert found == {site: one for site, one in expected.items() if one}
            assert list(found) == sorted(found)


@given(plans())
def test_a_program_measures_as_often_as_attribution_says_and_every_acting_act_once(
    plan: Plan,
) -> None:
    for piece in compose(plan.acts):
        for variant in piece.variants:
            programs = dict(variant.combination)
            longest = 0
            for site in range(SITES):
                groups = attribution(plan.acts, variant.members).get(site, [])
                assert len(groups) == sum(step.last for step in programs.get(site, ()))
                longest = max(longest, len(groups))
                expected = [
                    i
                    for i in variant.members
                    if plan.acts[i].acts and site in dict(plan.acts[i].rows)
                ]
                assert [i for group in groups for i in group] == expected
            assert variant.cells == longest


def test_attribution_joins_neighbouring_additions_and_nothing_else() -> None:
    many = [add(0), add(0), ablate(0), add(1), add(0), add(0, scale=0.0), add(0)]
    assert attribution(many, range(7)) == {0: [[0, 1], [2], [4, 6]], 1: [[3]]}
    assert attribution(many, (2, 6)) == {0: [[2], [6]]}


def test_neighbouring_additions_are_one_step_whatever_their_order() -> None:
    one, two, pull = add(0, digest=B), add(0, digest=A, scale=2.0), ablate(0, digests=(C,))
    both = Step(Kind.ADD, addends=((A, 0, 2.0), (B, 0, 1.0)))
    assert combine([one, two], (0, 1)) == ((0, (both,)),)
    assert combine([two, one], (0, 1)) == ((0, (both,)),)
    assert combine([one, add(1), two], (0, 1, 2))[0] == (0, (both,))
    ((_, program),) = combine([one, pull, two], (0, 1, 2))
    assert [step.kind for step in program] == [Kind.ADD, Kind.PULL, Kind.ADD]
    assert [step.addends for step in program] == [((B, 0, 1.0),), (), ((A, 0, 2.0),)]


def test_other_acts_keep_their_order() -> None:
    pull, push = ablate(0), replace(add(0), kind=Kind.NORM_ADD)
    forward, backward = combine([pull, push], (0, 1)), combine([push, pull], (0, 1))
    assert forward != backward
    assert forward[0][1] == backward[0][1][::-1]


def test_directions_of_an_ablation_build_on_each_other_and_those_of_a_clamp_do_not() -> None:
    bands = (Band(0, 1, 1.0), Band(-1, 2, 0.5))
    rows = ((3, (1, 0)),)
    clamp = Act(Kind.PULL, (A, B), rows, EVERYWHERE, bands=bands)
    first = Step(Kind.PULL, (), ((A, 1),), 0, 1, 1.0, last=False)
    second = Step(Kind.PULL, (), ((B, 0),), -1, 2, 0.5, last=True)
    assert combine([clamp], (0,)) == ((3, (first, second)),)
    ablation = replace(clamp, orthogonal=True)
    built = second._replace(direction=((A, 1), (B, 0)))
    assert combine([ablation], (0,)) == ((3, (first, built)),)


def test_only_a_single_addition_is_a_row() -> None:
    ((_, alone),) = combine([add(0), add(0)], (0, 1))
    ((_, chain),) = combine([add(0), ablate(0), add(0)], (0, 1, 2))
    ((_, pull),) = combine([ablate(0)], (0,))
    assert [only_adds(program) for program in (alone, chain, pull)] == [True, False, False]


def conditional(count: int) -> list[Act]:
    """Acts under as many different sets, which meet from position 3 on."""
    return [
        add(0, where=(), conditions=(Condition(((n % 3, 9),), (n, 50), True),))
        for n in range(count)
    ]


def test_no_more_than_so_many_sets_of_token_ids_may_meet_at_one_position() -> None:
    assert [len(piece.sets) for piece in compose(conditional(MAX_TOKEN_SETS))] == [2, 3, 4, 0]
    sentence = "^5 different sets of token ids meet at one position; at most 4 can$"
    with pytest.raises(ValueError, match=sentence):
        compose(conditional(MAX_TOKEN_SETS + 1))


def test_equal_sets_of_token_ids_count_once() -> None:
    one = Condition(EVERYWHERE, (1, 2), True)
    other = Condition(EVERYWHERE, (1, 2), False)
    many = [add(0, where=(), conditions=(one,)), add(1, where=(), conditions=(other,))] * 5
    (piece,) = compose(many)
    assert piece.sets == ((1, 2),)
    assert [variant.members for variant in piece.variants] == [(1, 3, 5, 7, 9), (0, 2, 4, 6, 8)]


def test_no_more_than_so_many_steps_may_meet_at_one_site() -> None:
    most = [ablate(0, 1)] * MAX_STEPS
    ((_, first), (_, second)) = combine(most, range(MAX_STEPS))
    assert (len(first), len(second)) == (MAX_STEPS, MAX_STEPS)
    sentence = f"^{MAX_STEPS + 1} steps meet at one site; at most {MAX_STEPS} can$"
    with pytest.raises(ValueError, match=sentence):
        combine([*most, add(1)], range(MAX_STEPS + 1))
    with pytest.raises(ValueError, match=sentence):
        compose([*most, add(1)])
    apart = [*(replace(act, spans=((0, 4),)) for act in most), add(1, where=((4, 5),))]
    assert [len(piece.variants[0].members) for piece in compose(apart)] == [MAX_STEPS, 1, 0]


def test_effort_counts_pieces_and_what_each_combination_holds() -> None:
    one = Act(Kind.ADD, (A,), ((0, (0,)), (2, (0,))), ((0, 4), (6, 8)))
    two = add(1, where=((2, 8),))
    plan = Plan("r", (one, two), (Capture((1, 2, 3), ((5, 6),)),))
    # Pieces of the acts begin at 0, 2, 4, 6 and 8, of the captures at 0, 5 and 6; the combinations
    # are {one}, {one, two}, {two} and nothing, and {capture} and nothing. Up to 64 looks cost 1.
    assert effort(plan) == 5 + (2 + 3 + 1) + LOOKS + 3 + 3 + LOOKS
    pieces = compose(plan.acts)
    assert [piece.start for piece in pieces] == [0, 2, 4, 6, 8]
    assert pieces[1].variants is pieces[3].variants


def test_effort_counts_every_direction_and_every_variant() -> None:
    pull = ablate(0, 1, digests=(A, B, C))
    assert effort(Plan("r", (pull,))) == 1 + 2 * 3 + LOOKS + 1
    ruled = replace(pull, spans=(), conditions=(Condition(((4, 9),), (1,), True),))
    assert effort(Plan("r", (ruled,))) == 3 + 2 * 2 * 3 + LOOKS + 1
    assert effort(Plan("r", (ruled, ruled))) == 3 + 2 * 2 * 2 * 3 + LOOKS + 1
    other = replace(ruled, conditions=(Condition(((4, 9),), (2,), True),))
    assert effort(Plan("r", (ruled, other))) == 3 + 4 * 2 * 2 * 3 + LOOKS + 1


def test_effort_counts_token_ids_once_per_set() -> None:
    def ruled(start: int, count: int) -> Act:
        where = Condition(((start, start + 1),), tuple(range(count)), True)
        return replace(add(0), spans=(), conditions=(where,))

    pieces = effort(Plan("r", (ruled(0, 1), ruled(2, 1))))
    assert effort(Plan("r", (ruled(0, 64_000), ruled(2, 64_000)))) == pieces + 1000
    assert effort(Plan("r", (ruled(0, 64_000), ruled(2, 6400)))) == pieces + 1100
    assert effort(Plan("r", (ruled(0, 4_000_000),))) > MAX_EFFORT


def test_what_is_worth_too_much_is_found_out_without_looking_at_all_of_it() -> None:
    many = [add(0, where=tuple((p, p + 1) for p in range(i, 100_000, 200))) for i in range(100)]
    apart = [replace(act, spans=((0, 100_000),)) for act in many]
    assert MAX_EFFORT < effort(Plan("r", (*many, *apart))) < 2 * MAX_EFFORT


@given(plans(), plans(), st.integers(0, 20))
def test_an_amended_plan_costs_no_more_than_both_of_its_parts(
    before: Plan, after: Plan, first: int
) -> None:
    assert effort(amend(before, after.acts, first)) <= effort(before) + effort(after)


def test_equal_acts_are_composed_once() -> None:
    once = compose([add(0), ablate(1)])
    assert compose([add(0), ablate(1)]) is once
