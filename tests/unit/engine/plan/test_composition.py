"""Acts are composed to what naively happens at each position, to each token."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import Act, Band, Kind, Plan, TokenCondition
from rheostat_engine.plan import gates
from rheostat_engine.plan.composition import (
    MAX_STEPS,
    MAX_TOKEN_SETS,
    Step,
    TokenVariants,
    Variant,
    attribution,
    combine,
    only_adds,
)
from rheostat_engine.plan.gates import Combine, Form, Gate, Hold, Pool
from rheostat_engine.plan.tables import steering_table

from ..naive import described, steps
from ..strategies import (
    DIGESTS,
    EVERYWHERE,
    LAST,
    POSITIONS,
    SITES,
    VOCABULARY,
    ablate,
    acts,
    add,
    packed_ids,
    plans,
    selects,
)
from ..tables import variants_of

A, B, C = DIGESTS
ACTS = st.lists(acts(), max_size=4)


def mix_at(acts: Sequence[Act], position: int) -> TokenVariants:
    """What happens at a position."""
    table = steering_table(tuple(acts))
    if table is None:
        return TokenVariants((), (Variant((), ()),))
    interval = int(np.searchsorted(table.intervals.starts, position, side="right")) - 1
    return table.token_variants(int(table.intervals.sets[interval]))


def variant_of(token_variants: TokenVariants, token: int) -> Variant:
    """What happens to a token."""
    number = sum(
        (token.to_bytes(4, "little") in ids(tokens)) << bit
        for bit, tokens in enumerate(token_variants.sets)
    )
    return token_variants.variants[number]


def ids(tokens: bytes) -> list[bytes]:
    """The token ids of a set, each as it travels."""
    return [tokens[at : at + 4] for at in range(0, len(tokens), 4)]


@given(ACTS)
def test_the_variant_of_a_position_and_token_has_exactly_the_acts_that_select_it(
    many: list[Act],
) -> None:
    for position in POSITIONS:
        token_variants = mix_at(many, position)
        assert len(token_variants.variants) == 2 ** len(token_variants.sets)
        for token in range(VOCABULARY):
            expected = tuple(i for i, act in enumerate(many) if selects(act, position, token))
            assert variant_of(token_variants, token).members == expected


@given(plans())
def test_a_variant_does_at_each_site_what_its_acts_do_in_their_order(plan: Plan) -> None:
    for position in POSITIONS:
        token_variants = mix_at(plan.acts, position)
        for token in range(VOCABULARY):
            combination = variant_of(token_variants, token).combination
            expected = {site: steps(plan, site, position, token) for site in range(SITES)}
            found = {site: described(program) for site, program in combination}
            assert found == {site: one for site, one in expected.items() if one}
            assert list(found) == sorted(found)


@given(plans())
def test_a_program_measures_as_often_as_attribution_says_and_every_acting_act_once(
    plan: Plan,
) -> None:
    table = steering_table(plan.acts)
    for token_variants in variants_of(table):
        for variant in token_variants.variants:
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
                expected.sort(key=lambda i: plan.acts[i].kind in LAST)
                assert [i for group in groups for i in group] == expected
            assert variant.dose_slots == longest


@given(ACTS.filter(bool), st.integers(0, SITES))
def test_a_combination_is_made_of_those_at_some_sites(many: list[Act], cut: int) -> None:
    members = range(len(many))
    whole = combine(many, members)
    low, high = range(cut), range(cut, SITES)
    assert combine(many, members, low) + combine(many, members, high) == whole
    groups = attribution(many, members, low) | attribution(many, members, high)
    assert groups == attribution(many, members)


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


def test_an_addition_under_a_gate_does_not_part_its_neighbours() -> None:
    gate = Gate(
        (gates.GateCondition((0,), Pool.LAST, Combine.ANY, 0.0, math.inf),),
        Combine.ALL,
        Form.STEP,
        0.5,
        0.0,
        Hold.REST,
    )
    one, two, pull = add(0, digest=B), add(0, digest=A, scale=2.0), ablate(0, digests=(C,))
    gated = replace(add(0, digest=C), gate=gate)
    ((_, plain),) = combine([one, two], (0, 1))
    for many in ([one, gated, two], [gated, one, two], [one, two, gated]):
        ((_, program),) = combine(many, (0, 1, 2))
        opens, *rest, last = program
        assert (opens.kind, tuple(rest), last.addends) == (Kind.GATE, plain, ((C, 0, 1.0),))
        added = [number for number, act in enumerate(many) if act is not gated]
        assert attribution(many, range(3)) == {0: [added, [many.index(gated)]]}
    ((_, program),) = combine([one, gated, pull, two], range(4))
    assert [step.kind for step in program] == [Kind.GATE, Kind.ADD, Kind.ADD, Kind.PULL, Kind.ADD]
    assert attribution([one, gated, pull, two], range(4)) == {0: [[0], [1], [2], [3]]}


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
        add(0, where=(), conditions=(TokenCondition(((n % 3, 9),), (n, 50), True),))
        for n in range(count)
    ]


def all_token_variants(acts: Sequence[Act]) -> tuple[TokenVariants, ...]:
    """What happens, piece by piece."""
    table = steering_table(tuple(acts))
    assert table is not None
    return tuple(table.token_variants(number) for number in table.intervals.sets.tolist())


def test_no_more_than_so_many_sets_of_token_ids_may_meet_at_one_position() -> None:
    assert [
        len(token_variants.sets)
        for token_variants in all_token_variants(conditional(MAX_TOKEN_SETS))
    ] == [2, 3, 4, 0]
    sentence = "^5 different sets of token ids meet at one position; at most 4 can$"
    with pytest.raises(ValueError, match=sentence):
        all_token_variants(conditional(MAX_TOKEN_SETS + 1))


def test_equal_sets_of_token_ids_count_once() -> None:
    one = TokenCondition(EVERYWHERE, (1, 2), True)
    other = TokenCondition(EVERYWHERE, (1, 2), False)
    many = [add(0, where=(), conditions=(one,)), add(1, where=(), conditions=(other,))] * 5
    (token_variants,) = all_token_variants(many)
    assert token_variants.sets == (packed_ids((1, 2)),)
    assert [variant.members for variant in token_variants.variants] == [
        (1, 3, 5, 7, 9),
        (0, 2, 4, 6, 8),
    ]


def test_no_more_than_so_many_steps_may_meet_at_one_site() -> None:
    most = [ablate(0, 1)] * MAX_STEPS
    ((_, first), (_, second)) = combine(most, range(MAX_STEPS))
    assert (len(first), len(second)) == (MAX_STEPS, MAX_STEPS)
    sentence = f"^{MAX_STEPS + 1} steps meet at one site; at most {MAX_STEPS} can$"
    with pytest.raises(ValueError, match=sentence):
        combine([*most, add(1)], range(MAX_STEPS + 1))
    with pytest.raises(ValueError, match=sentence):
        all_token_variants([*most, add(1)])
    apart = [*(replace(act, spans=((0, 4),)) for act in most), add(1, where=((4, 5),))]
    assert [
        len(token_variants.variants[0].members) for token_variants in all_token_variants(apart)
    ] == [MAX_STEPS, 1, 0]
