"""A plan says the same as a list of what happens at each position."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import OPEN_END, Addition, Capture, Plan, Spans
from rheostat_engine.plan import combine, segment

from .strategies import DIGESTS, LIMIT, additions, captured, effect, holds, plans, spans

POSITIONS = (*range(LIMIT + 3), OPEN_END - 1)
EVERYWHERE = ((0, OPEN_END),)


@given(st.lists(spans(), max_size=4).map(tuple))
def test_segments_hold_at_each_position_the_spans_that_do(many: tuple[Spans, ...]) -> None:
    pieces = segment(many)
    starts = [start for start, _ in pieces]
    assert starts[0] == 0
    assert starts == sorted(set(starts))
    assert all(one[1] != other[1] for one, other in pairwise(pieces))
    for position in POSITIONS:
        (members,) = [m for start, m in pieces if start <= position][-1:]
        assert members == tuple(i for i, one in enumerate(many) if holds(one, position))


@given(plans())
def test_the_additions_of_a_segment_combine_to_what_happens_at_its_positions(plan: Plan) -> None:
    for position in POSITIONS:
        active = [a for a in plan.additions if holds(a.spans, position)]
        combined = combine(active)
        assert [site for site, _ in combined] == sorted(effect(plan, position))
        assert {site: Counter(key) for site, key in combined} == effect(plan, position)
        assert combined == combine(active[::-1])


@given(plans())
def test_a_plan_needs_a_slot_per_combination_and_a_row_per_sum(plan: Plan) -> None:
    effects = [effect(plan, position) for position in POSITIONS]
    frozen = {
        frozenset((site, frozenset(key.items())) for site, key in one.items())
        for one in effects
        if one
    }
    assert {
        frozenset((site, frozenset(Counter(key).items())) for site, key in combination)
        for combination in plan.combinations()
    } == frozen
    assert len(plan.combinations()) == len(frozen)
    assert {frozenset(Counter(key).items()) for key in plan.row_keys()} == {
        key for one in frozen for _, key in one
    }


@given(plans())
def test_a_plan_survives_the_way_into_the_worker(plan: Plan) -> None:
    assert Plan.from_wire(plan.to_wire()) == plan
    carried = msgspec.msgpack.decode(msgspec.msgpack.encode(plan.to_wire()))
    assert Plan.from_wire(carried) == plan


@given(plans(), st.integers(0, LIMIT + 2))
def test_a_plan_captures_the_prompt_where_it_captures_one_of_its_positions(
    plan: Plan, prompt_len: int
) -> None:
    expected = any(captured(plan, position) for position in range(prompt_len))
    assert plan.captures_prompt(prompt_len) == expected


@given(plans())
def test_a_plan_has_a_salt_exactly_where_it_adds_something_somewhere(plan: Plan) -> None:
    touches = any(effect(plan, position) for position in POSITIONS)
    assert plan.touches_kv == touches
    assert (plan.cache_salt() is not None) == touches


@given(plans(), st.randoms(use_true_random=False), additions(), st.sampled_from(range(3)))
def test_what_is_written_in_another_order_or_beside_nothing_has_the_same_salt(
    plan: Plan, random: object, addition: Addition, dead: int
) -> None:
    nothing = (
        replace(addition, scale=0.0),
        replace(addition, rows=()),
        replace(addition, spans=()),
    )[dead]
    shuffled = [*plan.additions, nothing]
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis gives a random.Random
    other = Plan("another", tuple(shuffled), (Capture((0,), EVERYWHERE),))
    assert other.cache_salt() == plan.cache_salt()


@given(plans(), plans())
def test_plans_that_are_written_differently_have_different_salts(one: Plan, other: Plan) -> None:
    def written(plan: Plan) -> Counter[Addition]:
        return Counter(a for a in plan.additions if a.scale and a.rows and a.spans)

    assert (one.cache_salt() == other.cache_salt()) == (written(one) == written(other))


def test_steering_from_the_end_of_prompts_of_different_length_has_different_salts() -> None:
    salts = [
        Plan("", (Addition(DIGESTS[0], ((2, 0),), 1.0, ((end, OPEN_END),)),)).cache_salt()
        for end in range(5)
    ]
    assert len(set(salts)) == 5


def test_an_addition_that_is_made_twice_has_a_salt_of_its_own() -> None:
    once = Addition(DIGESTS[0], ((2, 0),), 1.0, EVERYWHERE)
    assert Plan("", (once,)).cache_salt() != Plan("", (once, once)).cache_salt()


WIRE = {"id": "r", "add": [[b"d", [[2, 0]], 1.0, [[0, 4], [6, 9]]]], "capture": [[[1], [[0, 2]]]]}


@pytest.mark.parametrize(
    "wire",
    [
        None,
        [],
        {},
        {**WIRE, "id": 3},
        {**WIRE, "add": None},
        {**WIRE, "add": [[5, [[2, 0]], 1.0, []]]},
        {**WIRE, "add": [["text", [[2, 0]], 1.0, []]]},
        {**WIRE, "add": [[b"d", [[2, 0, 1]], 1.0, []]]},
        {**WIRE, "add": [[b"d", [["2", 0]], 1.0, []]]},
        {**WIRE, "add": [[b"d", [[2.0, 0]], 1.0, []]]},
        {**WIRE, "add": [[b"d", [[2, 0]], "1.0", []]]},
        {**WIRE, "add": [[b"d", [[2, 0]], 10**400, []]]},
        {**WIRE, "add": [[b"d", [[2, 0]], float("nan"), []]]},
        {**WIRE, "add": [[b"d", [[2, 0]], float("inf"), []]]},
        {**WIRE, "add": [[b"d", [[2, 0]], 1.0, [[float("inf"), 4]]]]},
        {**WIRE, "add": [[b"d", [[2, 0]], 1.0, [[-1, 4]]]]},
        {**WIRE, "add": [[b"d", [[2, 0]], 1.0, [[4, 4]]]]},
        {**WIRE, "add": [[b"d", [[2, 0]], 1.0, [[0, OPEN_END + 1]]]]},
        {**WIRE, "add": [[b"d", [[2, 0]], 1.0, [[0, 4], [3, 9]]]]},
        {**WIRE, "add": [[b"d", [[2, 0]], 1.0, [[0, 4], [4, 9]]]]},
        {**WIRE, "add": [[b"d", [[2, 0]], 1.0, [[6, 9], [0, 4]]]]},
        {**WIRE, "capture": [[[None], []]]},
        {**WIRE, "capture": [[["1"], []]]},
        {**WIRE, "capture": [[[1], [[3, 1]]]]},
    ],
)
def test_what_is_no_plan_is_refused(wire: object) -> None:
    Plan.from_wire(WIRE)
    with pytest.raises(ValueError, match="plan"):
        Plan.from_wire(wire)


def test_effort_counts_pieces_and_what_each_combination_holds() -> None:
    one = Addition(bytes(32), ((0, 0), (2, 0)), 1.0, ((0, 4), (6, 8)))
    two = Addition(bytes(32), ((1, 0),), 1.0, ((2, 8),))
    plan = Plan("r", (one, two), (Capture((1, 2, 3), ((5, 6),)),))
    # Pieces of the additions begin at 0, 2, 4, 6 and 8, of the captures at 0, 5 and 6; the
    # combinations are {one}, {one, two}, {two} and nothing, and {capture} and nothing.
    assert plan.effort() == 5 + 3 + (2 + 3 + 1) + 3
    assert [start for start, _ in plan.pieces()] == [0, 2, 4, 6, 8]
    assert plan.pieces()[1][1] == plan.pieces()[3][1]
