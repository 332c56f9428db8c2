"""Tables hold what plans say, cost what they are worth, and survive the way into the worker."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import (
    MAX_PLAN_COST,
    OPEN_END,
    Act,
    Capture,
    Kind,
    Plan,
    PlanTooLarge,
    RowEncoding,
    Spans,
    TokenCondition,
)
from rheostat_engine.plan.composition import Clause
from rheostat_engine.plan.intervals import cut_intervals
from rheostat_engine.plan.plan import captures_of, read_plan, steering_of
from rheostat_engine.plan.row_encodings import Codec, Directions
from rheostat_engine.plan.tables import (
    MAX_CAPTURE_COST,
    MAX_INTERVALS,
    CaptureTable,
    SteeringTable,
    capture_table,
    count,
    steering_table,
)
from rheostat_engine.plan.wire import captures_from, captures_to, steering_from, steering_to

from ..strategies import (
    DIGESTS,
    LIMIT,
    POSITIONS,
    ablate,
    acts,
    add,
    captures,
    holds,
    packed_ids,
    plans,
    spans,
)
from ..updates import update_steering

A, B, C = DIGESTS


@given(st.lists(spans(), max_size=4))
def test_pieces_hold_at_each_position_the_spans_that_do(many: list[Spans]) -> None:
    starts, sets, members = cut_intervals(many)
    assert starts[0] == 0
    assert starts.tolist() == sorted(set(starts.tolist()))
    assert all(one != other for one, other in pairwise(sets.tolist()))
    assert len(set(members)) == len(members)
    assert {*sets.tolist()} == {*range(len(members))}
    for position in POSITIONS:
        interval = int(np.searchsorted(starts, position, side="right")) - 1
        assert members[sets[interval]] == tuple(
            i for i, one in enumerate(many) if holds(one, position)
        )


@given(st.lists(spans(), max_size=4), st.integers(0, LIMIT), st.integers(0, LIMIT + 3))
def test_the_positions_of_each_set_are_counted(many: list[Spans], start: int, length: int) -> None:
    intervals = cut_intervals(many)
    held = [
        tuple(i for i, one in enumerate(many) if holds(one, position))
        for position in range(start, start + length)
    ]
    expected = [held.count(members) for members in intervals.members]
    assert count(intervals, start, start + length).tolist() == expected


def test_a_set_that_holds_in_many_pieces_is_priced_once() -> None:
    priced: list[tuple[int, ...]] = []
    many = tuple((2 * i, 2 * i + 1) for i in range(1000))

    def cost_of(members: tuple[int, ...]) -> int:
        priced.append(members)
        return 1

    intervals = cut_intervals([many, ((0, OPEN_END),)], cost_of=cost_of)
    assert sorted(priced) == [(0, 1), (1,)]
    assert len(intervals.starts) == 2000


def test_spans_that_are_worth_too_much_are_found_out_without_looking_at_all_of_them() -> None:
    priced = []
    nested = [((i, 20_000 - i),) for i in range(5000)]
    with pytest.raises(PlanTooLarge, match=r"^It costs over 10000, "):
        cut_intervals(nested, cost_of=lambda m: priced.append(m) or len(m), max_cost=10_000)
    assert len(priced) < 200
    with pytest.raises(
        PlanTooLarge, match=r"^There are 10000 intervals; at most 9999 are allowed$"
    ):
        cut_intervals(nested, max_intervals=9_999)


def steering(*many: Act) -> SteeringTable:
    table = steering_table(many)
    assert table is not None
    return table


def captured(*many: Capture) -> CaptureTable:
    table = capture_table(many)
    assert table is not None
    return table


GLANCES = 1
"""What up to 64 pieces, ids or sites cost together."""


def test_the_effort_of_acts_counts_what_each_set_of_them_holds_once() -> None:
    one = Act(Kind.ADD, (A,), ((0, (0,)), (2, (0,))), ((0, 4), (6, 8)))
    two = add(1, where=((2, 8),))
    # The sets are {one}, {one, two}, {two} and nothing.
    assert steering(one, two).plan_cost == (2 + 3 + 1) + GLANCES
    intervals = steering(one, two).intervals
    assert intervals.starts.tolist() == [0, 2, 4, 6, 8]
    assert intervals.sets[1] == intervals.sets[3]
    often = replace(one, spans=tuple((2 * i, 2 * i + 1) for i in range(1000)))
    assert steering(often).plan_cost == 2 + 32


def test_the_effort_of_acts_counts_every_direction_and_every_variant() -> None:
    pull = ablate(0, 1, digests=(A, B, C))
    assert steering(pull).plan_cost == 2 * 3 + GLANCES
    ruled = replace(pull, spans=(), conditions=(TokenCondition(((4, 9),), (1,), True),))
    assert steering(ruled).plan_cost == 2 * 2 * 3 + GLANCES
    assert steering(ruled, ruled).plan_cost == 2 * 2 * 2 * 3 + GLANCES
    other = replace(ruled, conditions=(TokenCondition(((4, 9),), (2,), True),))
    assert steering(ruled, other).plan_cost == 4 * 2 * 2 * 3 + GLANCES


def test_the_effort_of_a_subspace_counts_the_pairs_that_are_made_orthogonal() -> None:
    digests = tuple(bytes([number]) * 32 for number in range(64))

    def plan_cost(count: int, *, orthogonal: bool) -> int:
        pull = replace(ablate(0, 1, digests=digests[:count]), orthogonal=orthogonal)
        read = 2 * count // 16
        return steering(pull).plan_cost - read - GLANCES

    assert plan_cost(64, orthogonal=False) == 2 * 64
    assert plan_cost(64, orthogonal=True) == 2 * sum(1 + before // 4 for before in range(64))
    assert plan_cost(1, orthogonal=True) == 2


def test_the_effort_of_acts_counts_token_ids_once_per_set() -> None:
    def ruled(start: int, ids: int) -> Act:
        where = TokenCondition(((start, start + 1),), tuple(range(ids)), True)
        return replace(add(0), spans=(), conditions=(where,))

    small = steering(ruled(0, 1), ruled(2, 1)).plan_cost
    assert steering(ruled(0, 64_000), ruled(2, 64_000)).plan_cost == small + 1000
    assert steering(ruled(0, 64_000), ruled(2, 6400)).plan_cost == small + 1100
    with pytest.raises(PlanTooLarge):
        steering_table((ruled(0, 4_000_000),))


def test_acts_that_hold_nowhere_cost_what_it_takes_to_read_them() -> None:
    rows = tuple((site, (0,)) for site in range(160))
    assert steering(Act(Kind.ADD, (A,), rows, ())).plan_cost == 160 // 16 + GLANCES


def test_the_effort_of_captures_counts_their_different_sets_and_directions() -> None:
    often = Capture(tuple(range(64)), tuple((2 * i, 2 * i + 1) for i in range(960)))
    # Captured and not; 64 sites of one set, and 1920 pieces.
    assert captured(often).plan_cost == 2 + 1 + 30
    encoding = RowEncoding(Codec.CAST, "float32", directions=Directions((A, B, C), (0, 1, 0)))
    both = replace(often, encoding=encoding), Capture((99,), often.spans, encoding)
    assert captured(*both).plan_cost == 2 + 3 + 2 + 30


def test_tables_have_a_most_that_they_may_cost() -> None:
    within = tuple(add(0, where=((i, 9000 - i),)) for i in range(400))
    with pytest.raises(PlanTooLarge, match=rf"^It costs .*{MAX_PLAN_COST}[ ,]"):
        steering_table(within)
    nested = tuple(Capture((i,), ((i, 9000 - i),)) for i in range(MAX_CAPTURE_COST))
    with pytest.raises(PlanTooLarge, match=rf"^It costs .*{MAX_CAPTURE_COST}[ ,]"):
        capture_table(nested)
    far = tuple((2 * i, 2 * i + 1) for i in range(MAX_INTERVALS // 2 + 1))
    with pytest.raises(
        PlanTooLarge, match=rf"^There are {MAX_INTERVALS + 2} intervals; at most {MAX_INTERVALS} "
    ):
        capture_table((Capture((0,), far),))
    with pytest.raises(
        PlanTooLarge, match=rf"^There are {MAX_INTERVALS + 2} intervals; at most {MAX_INTERVALS} "
    ):
        steering_table((add(0, where=far),))


@given(plans(), plans(), st.integers(0, 20))
def test_an_amended_plan_costs_no_more_than_both_of_its_parts(
    before: Plan, after: Plan, first: int
) -> None:
    whole = update_steering(before, after.acts, first).packed_acts.plan_cost
    assert whole <= before.packed_acts.plan_cost + after.packed_acts.plan_cost


def same_intervals(one: CaptureTable | SteeringTable, other: CaptureTable | SteeringTable) -> bool:
    pairs = zip(one.intervals[:2], other.intervals[:2], strict=True)
    return one.intervals.members == other.intervals.members and all(
        np.array_equal(a, b) for a, b in pairs
    )


@given(st.lists(acts(), min_size=1, max_size=4).map(tuple))
def test_a_table_of_acts_survives_the_way_into_the_worker(many: tuple[Act, ...]) -> None:
    table = steering(*many)
    found = steering_from(steering_to(table))
    assert (found.acts, found.clauses, found.sets) == (table.acts, table.clauses, table.sets)
    assert same_intervals(found, table)
    assert found.plan_cost == table.plan_cost


@given(st.lists(captures(), max_size=3).map(tuple))
def test_a_table_of_captures_survives_the_way_into_the_worker(many: tuple[Capture, ...]) -> None:
    table = capture_table(many)
    if table is None:
        assert not any(one.sites and one.spans for one in many)
        return
    found = captures_from(captures_to(table))
    assert found.captures == table.captures
    assert same_intervals(found, table)
    first = min(one.spans[0][0] for one in many if one.sites and one.spans)
    assert (found.plan_cost, found.first) == (table.plan_cost, first)


def test_a_set_of_token_ids_travels_once() -> None:
    many = TokenCondition(((0, 4),), tuple(range(1000)), True)
    acts = tuple(replace(add(site), spans=(), conditions=(many,)) for site in range(5))
    table = steering(*acts)
    assert table.sets == (packed_ids(many.tokens),)
    assert [clause.tokens for clause in table.clauses] == [None, 0] * 5
    assert table.clauses[1] == Clause(0, 0, True)


def test_plans_with_equal_acts_and_captures_share_their_tables() -> None:
    plan = Plan("a", (add(0), ablate(1)), (Capture((1,), ((0, 4),)),))
    packed = plan.pack()
    copy = replace(packed, request_id="b", epoch=3)
    assert copy.packed_acts is packed.packed_acts
    assert copy.packed_captures is packed.packed_captures
    other = replace(packed, captures=(Capture((2,), ((0, 4),)),))
    assert other.packed_acts is packed.packed_acts
    assert other.packed_captures is not packed.packed_captures
    assert read_plan(other.to_wire()).captures != read_plan(packed.to_wire()).captures
    found = [read_plan(one.to_wire()) for one in (plan, packed, copy)]
    assert len({one.acts for one in found}) == len({one.captures for one in found}) == 1


def test_a_table_is_read_once_as_long_as_somebody_has_it() -> None:
    plan = Plan("a", (add(0, scale=77.0),), (Capture((1,), ((0, 77),)),))
    one, other = read_plan(plan.to_wire()), read_plan(replace(plan, request_id="b").to_wire())
    assert one.acts is not None
    assert other.acts is not None
    assert one.captures is not None
    assert other.captures is not None
    tables: Sequence[object] = steering_of(one.acts), captures_of(one.captures)
    assert tables[0] is steering_of(other.acts)
    assert tables[1] is captures_of(other.captures)
