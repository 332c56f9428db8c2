"""Gates that are shut where all of them are decided have changed no token, and never will."""

import math

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from rheostat_engine import Act, Kind
from rheostat_engine.plan.gate_decisions import DecidedOnce, decided_once
from rheostat_engine.plan.gates import Combine, Form, Gate, GateCondition, Hold, Pool
from rheostat_engine.plan.tables import steering_table

from ..gated import gates, openings
from ..strategies import DIGESTS, EVERYWHERE, LIMIT, add

COLUMNS = 2
LAST = 7
"""The last position of the prompt."""


def condition(decided_at: int = LAST) -> GateCondition:
    return GateCondition((0,), Pool.MEAN, Combine.ANY, 0.5, math.inf, 1, decided_at)


def gate(*conditions: GateCondition, hold: Hold = Hold.REST, **fields: object) -> Gate:
    """A gate that the prompt's end decides."""
    one = Gate(conditions or (condition(),), Combine.ALL, Form.STEP, 0.5, 0.0, hold)
    return one._replace(**fields)


def decided(*gates: Gate | None, scale: float = 1.0) -> DecidedOnce | None:
    """The decision about acts with these gates."""
    acts = tuple(
        Act(Kind.ADD, (DIGESTS[0],), ((4, (0,)),), EVERYWHERE, scale, gate=one) for one in gates
    )
    table = steering_table(acts)
    assert table is not None
    return decided_once(table)


def test_a_gate_that_the_prompts_end_decides_is_known_there() -> None:
    assert decided(gate()) == DecidedOnce(LAST, (0,))
    assert decided(None, gate(), gate(), gate(hold=Hold.TOKEN)) == DecidedOnce(LAST, (0, 1))
    assert decided(gate(hold=Hold.NEXT_TOKEN)) == DecidedOnce(LAST + 1, (0,))
    assert decided(gate(late=LAST + 1), gate()) == DecidedOnce(LAST + 1, (0, 1))


@pytest.mark.parametrize(
    "some",
    {
        "each token": [gate(condition(-1))],
        "one of two": [gate(), gate(condition(-1))],
        "a condition of each token": [gate(condition(), condition(-1))],
        "two positions": [gate(condition(), condition(LAST - 1))],
        "inverted": [gate(invert=True)],
        "late, but open where it is decided": [gate(late=LAST)],
        "open at one token before the other is decided": [
            gate(hold=Hold.TOKEN),
            gate(late=LAST + 1),
        ],
        "none": [None],
    }.items(),
    ids=lambda pair: pair[0],
)
def test_other_gates_are_never_known(some: tuple[str, list[Gate | None]]) -> None:
    assert decided(*some[1]) is None


def test_acts_that_change_nothing_have_no_part() -> None:
    assert decided(gate(), scale=0.0) is None
    weak = Act(Kind.ADD, (DIGESTS[0],), ((4, (0,)),), EVERYWHERE, 0.0, gate=gate(condition(-1)))
    table = steering_table((weak, add(1), Act(*_fields(gate()))))
    assert table is not None
    assert decided_once(table) == DecidedOnce(LAST, (1,))


def _fields(one: Gate) -> tuple[object, ...]:
    return (Kind.ADD, (DIGESTS[0],), ((4, (0,)),), EVERYWHERE, 1.0, (), False, (), None, one)


@st.composite
def decided_gates(draw: st.DrawFn) -> list[Gate]:
    """Gates of which most are decided at one position, late or not."""
    found = []
    for one in draw(st.lists(gates(COLUMNS), min_size=1, max_size=3)):
        if draw(st.integers(0, 3)):
            at = draw(st.sampled_from([LAST, LAST, LAST - 1]))
            conditions = tuple(each._replace(decided_at=at) for each in one.conditions)
            late = draw(st.sampled_from([0, at + 1, at + 2])) if one.hold is not Hold.TOKEN else 0
            one = one._replace(conditions=conditions, late=late, end=0, invert=False)
        found.append(one)
    return found


@given(st.data())
def test_gates_that_are_shut_at_that_position_are_shut_at_every_token(data: st.DataObject) -> None:
    some = data.draw(decided_gates())
    one = decided(*some)
    event("known" if one is not None else "unknown")
    if one is None or one.position >= LIMIT:
        return
    numbers = st.sampled_from((-1.0, 0.2, 0.7, 2.0))
    row = st.dictionaries(st.integers(0, COLUMNS - 1), numbers)
    history = data.draw(st.lists(row, min_size=LIMIT, max_size=LIMIT))
    acts = tuple(dict.fromkeys(some))
    opened = [openings(each, history, 0, lambda *_: None) for each in acts]
    assert one.gates == tuple(range(len(acts)))
    shut = all(each[one.position] == 0 for each in opened)
    event("shut" if shut else "open")
    if shut:
        assert not any(map(any, opened))
