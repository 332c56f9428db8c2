"""An amended plan does the old before a position and the new from there on."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import OPEN_END, Capture, Plan
from rheostat_engine.plan.tables import steering_table

from .naive import steps
from .strategies import (
    EVERYWHERE,
    LIMIT,
    POSITIONS,
    SITES,
    VOCABULARY,
    add,
    plans,
    selects,
)
from .updates import update_steering


@given(plans(), plans(), st.integers(0, LIMIT + 2))
def test_the_old_acts_hold_before_the_change_and_the_new_ones_after_it(
    old: Plan, new: Plan, first: int
) -> None:
    amended = update_steering(old, new.acts, first)
    for position in POSITIONS:
        source = old if position < first else new
        for token in range(VOCABULARY):
            for site in range(SITES):
                expected = steps(source, site, position, token)
                assert steps(amended, site, position, token) == expected


@given(plans(), plans(), st.integers(0, LIMIT + 2))
def test_old_acts_keep_their_indices_and_new_ones_follow(old: Plan, new: Plan, first: int) -> None:
    amended = update_steering(old, new.acts, first)
    kept = [replace(act, spans=(), conditions=()) for act in (*old.acts, *new.acts)]
    assert [replace(act, spans=(), conditions=()) for act in amended.acts] == kept
    for index, act in enumerate(amended.acts):
        early = index < len(old.acts)
        for position in POSITIONS:
            if (position < first) != early:
                assert not any(selects(act, position, t) for t in range(VOCABULARY))


@given(plans(), st.lists(plans(), max_size=4), st.lists(st.integers(0, 6), min_size=4, max_size=4))
def test_a_plan_can_be_amended_again_and_again(
    plan: Plan, changes: list[Plan], strides: list[int]
) -> None:
    by_position = dict.fromkeys(POSITIONS, plan)
    amended, first = plan, 0
    for change, stride in zip(changes, strides, strict=False):
        first += stride
        amended = update_steering(amended, change.acts, first)
        by_position |= {position: change for position in POSITIONS if position >= first}
    for position, source in by_position.items():
        for site in range(SITES):
            assert steps(amended, site, position, 1) == steps(source, site, position, 1)


def test_all_but_the_acts_stays() -> None:
    capture = Capture((1,), EVERYWHERE)
    plan = Plan("r", (add(0),), (capture,), epoch=4, private_from=7)
    assert update_steering(plan, (add(1),), 9) == Plan(
        "r",
        (add(0, where=((0, 9),)), add(1, where=((9, OPEN_END),))),
        (capture,),
        epoch=4,
        private_from=7,
    )


def test_a_change_that_says_nothing_ends_what_was_done() -> None:
    table = steering_table(update_steering(Plan("r", (add(0),)), (), 5).acts)
    assert table is not None
    held = [table.intervals.members[number] for number in table.intervals.sets.tolist()]
    assert (table.intervals.starts.tolist(), held) == ([0, 5], [(0,), ()])
