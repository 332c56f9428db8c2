"""A plan arrives in the worker as it was made, and what is no plan is refused with its place."""

import math
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rheostat_engine import OPEN_END, Act, Band, Capture, Condition, Kind, Plan

from .strategies import (
    DIGESTS,
    EVERYWHERE,
    LIMIT,
    POSITIONS,
    SITES,
    VOCABULARY,
    ablate,
    add,
    captured,
    plans,
    selects,
)
from .wires import WIRES, packed, unpacked

A = DIGESTS[0]


@given(plans(), st.integers(0, 3), st.none() | st.integers(0, LIMIT))
def test_a_plan_survives_the_way_into_the_worker(
    acts: Plan, epoch: int, private_from: int | None
) -> None:
    plan = replace(acts, epoch=epoch, private_from=private_from)
    assert Plan.from_wire(plan.to_wire()) == plan
    assert Plan.name_of(plan.to_wire()) == plan.request_id


def test_an_empty_plan_is_a_name_alone_on_the_wire() -> None:
    assert unpacked(Plan("r").to_wire()) == {"id": "r"}


def test_bounds_that_are_missing_are_none_on_the_wire() -> None:
    bands = (Band(-math.inf, 1.0, 0.5), Band(-1.0, math.inf, 1.0))
    plan = Plan("r", (Act(Kind.PULL, (A, A), ((0, (0, 1)),), EVERYWHERE, bands=bands),))
    wire = plan.to_wire()
    assert unpacked(wire)["acts"][0]["bands"] == [[None, 1.0, 0.5], [-1.0, None, 1.0]]  # type: ignore[index]  # plain data
    assert Plan.from_wire(wire) == plan


@given(plans())
def test_nothing_is_captured_before_the_first_captured_position(plan: Plan) -> None:
    found = [position for position in POSITIONS if captured(plan, position)]
    assert plan.first_captured == min(found, default=OPEN_END)


@given(plans())
def test_a_plan_touches_kv_where_an_act_that_changes_something_selects_a_token(plan: Plan) -> None:
    def strong(act: Act) -> bool:
        return any(b.strength for b in act.bands) if act.kind is Kind.PULL else act.scale != 0

    assert plan.touches_kv == any(
        strong(act) and any(site in dict(act.rows) for site in range(SITES))
        for act in plan.acts
        if any(selects(act, p, token) for p in POSITIONS for token in range(VOCABULARY))
    )


def test_a_plan_that_is_private_touches_kv_and_captures_do_not() -> None:
    capture = Capture((0,), EVERYWHERE)
    assert Plan("r", private_from=0).touches_kv
    assert not Plan("r", (), (capture,), epoch=3).touches_kv


CONDITION = Condition(((9, OPEN_END),), (3, 7), True)
PLAN = Plan(
    "r",
    (
        add(2, 3, where=((0, 4), (6, 9)), conditions=(CONDITION,)),
        ablate(1, digests=DIGESTS[:2]),
    ),
    (Capture((1,), ((0, 2),)),),
)
ADD, PULL = 0, 1


def act_with(number: int, **values: object) -> dict[str, object]:
    """The plan's wire with something else in one of its acts."""
    wire = unpacked(PLAN.to_wire())
    wire["acts"][number].update(values)  # type: ignore[index]  # plain data
    return wire


def plan_with(**values: object) -> dict[str, object]:
    """The plan's wire with something else in it."""
    return {**unpacked(PLAN.to_wire()), **values}


def conditions(spans: object, tokens: object, among: object = True) -> dict[str, object]:
    """The plan's wire with another condition."""
    return {**act_with(ADD, conditions=[[spans, 0, among]]), "sets": [tokens]}


INF, NAN = math.inf, math.nan
BAND = [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("wire", "where"),
    [
        (None, "Expected `object`"),
        ([], "Expected `object`"),
        ({}, "missing required field `id`"),
        (plan_with(id=3), r"\$.id"),
        (plan_with(acts=None), r"\$.acts"),
        (plan_with(acts=[None]), r"\$.acts\[0\]"),
        (plan_with(acts=[{}]), r"\$.acts\[0\]"),
        (plan_with(epoch=-1), r"\$.epoch"),
        (plan_with(epoch=2**63), r"\$.epoch"),
        (plan_with(private_from=-1), r"\$.private_from"),
        (plan_with(private_from="0"), r"\$.private_from"),
        (plan_with(capture=[[[None], []]]), r"\$.capture\[0\]\[0\]\[0\]"),
        (plan_with(capture=[[["1"], []]]), r"\$.capture\[0\]\[0\]\[0\]"),
        (plan_with(capture=[[[-1], []]]), r"\$.capture\[0\]\[0\]\[0\]"),
        (plan_with(capture=[[[1], [[3, 1]]]]), "spans are not ascending and apart"),
        (act_with(ADD, kind=9), r"\$.acts\[0\].kind"),
        (act_with(ADD, kind="ADD"), r"\$.acts\[0\].kind"),
        (act_with(PULL, kind=int(Kind.ADD)), "ADD: it takes one vector and no bands"),
        (act_with(ADD, kind=int(Kind.PULL)), "PULL: bands and vectors don't fit"),
        (act_with(ADD, vectors=[5]), r"\$.acts\[0\].vectors\[0\]"),
        (act_with(ADD, vectors=["text"]), r"\$.acts\[0\].vectors\[0\]"),
        (act_with(ADD, vectors=[A[:31]]), r"\$.acts\[0\].vectors\[0\]"),
        (act_with(ADD, vectors=[A + b"x"]), r"\$.acts\[0\].vectors\[0\]"),
        (act_with(ADD, vectors=[]), "ADD: rows and vectors don't fit"),
        (act_with(ADD, vectors=[A, A]), "ADD: rows and vectors don't fit"),
        (act_with(ADD, rows=[[2, [0]], [3, [0, 1]]]), "ADD: rows and vectors don't fit"),
        (act_with(ADD, rows=[[2, 0]]), r"\$.acts\[0\].rows\[0\]\[1\]"),
        (act_with(ADD, rows=[["2", [0]]]), r"\$.acts\[0\].rows\[0\]\[0\]"),
        (act_with(ADD, rows=[[2.0, [0]]]), r"\$.acts\[0\].rows\[0\]\[0\]"),
        (act_with(ADD, rows=[[2, [-1]]]), r"\$.acts\[0\].rows\[0\]\[1\]\[0\]"),
        (act_with(ADD, rows=[[2, [2**64 - 1]]]), r"\$.acts\[0\].rows\[0\]\[1\]\[0\]"),
        (act_with(ADD, scale="1.0"), r"\$.acts\[0\].scale"),
        (act_with(ADD, scale=NAN), "ADD: its scale is not finite"),
        (act_with(ADD, scale=INF), "ADD: its scale is not finite"),
        (act_with(ADD, bands=[BAND]), "ADD: it takes one vector and no bands"),
        (act_with(PULL, bands=[BAND]), "PULL: bands and vectors don't fit"),
        (act_with(PULL, bands=[BAND, [1.0, 0.0, 1.0]]), "PULL: a band is empty"),
        (act_with(PULL, bands=[BAND, [NAN, 0.0, 1.0]]), "PULL: a band is empty"),
        (act_with(PULL, bands=[BAND, [INF, None, 1.0]]), "PULL: a band is empty"),
        (act_with(PULL, bands=[BAND, [None, -INF, 1.0]]), "PULL: a band is empty"),
        (act_with(PULL, bands=[BAND, [0.0, 0.0, INF]]), "PULL: .* its strength not finite"),
        (act_with(PULL, bands=[BAND, [0.0, 0.0, NAN]]), "PULL: .* its strength not finite"),
        (act_with(PULL, bands=[BAND, [0.0, 0.0]]), r"\$.acts\[1\].bands\[1\]"),
        (act_with(PULL, orthogonal=1), r"\$.acts\[1\].orthogonal"),
        (act_with(ADD, spans=[[INF, 4]]), r"\$.acts\[0\].spans\[0\]\[0\]"),
        (act_with(ADD, spans=[[-1, 4]]), "ADD: spans are not ascending and apart"),
        (act_with(ADD, spans=[[4, 4]]), "ADD: spans are not ascending and apart"),
        (act_with(ADD, spans=[[0, OPEN_END + 1]]), "ADD: spans are not ascending and apart"),
        (act_with(ADD, spans=[[0, 4], [3, 9]]), "ADD: spans are not ascending and apart"),
        (act_with(ADD, spans=[[0, 4], [4, 9]]), "ADD: spans are not ascending and apart"),
        (act_with(ADD, spans=[[6, 9], [0, 4]]), "ADD: spans are not ascending and apart"),
        (conditions([[12, 10]], [3]), "ADD: spans are not ascending and apart"),
        (conditions([[8, 10]], [3]), "ADD: conditions hold positions twice"),
        (conditions([[9, 10]], []), "token ids are missing or not ascending"),
        (conditions([[9, 10]], [3, 3]), "token ids are missing or not ascending"),
        (conditions([[9, 10]], [7, 3]), "token ids are missing or not ascending"),
        (conditions([[9, 10]], [-1]), r"\$.sets\[0\]\[0\]"),
        (act_with(ADD, conditions=[[[[9, 10]], 1, True]]), "there is no set 1 of token ids"),
        (conditions([[9, 10]], [3], None), r"\$.acts\[0\].conditions\[0\]\[2\]"),
    ],
    ids=repr,
)
def test_what_is_no_plan_is_refused_with_its_place(wire: object, where: str) -> None:
    assert Plan.from_wire(PLAN.to_wire()) == PLAN
    with pytest.raises(ValueError, match=f"^this is no plan: .*{where}"):
        Plan.from_wire(packed(wire))


@pytest.mark.parametrize("wire", [None, {"id": "r"}, "r", PLAN.to_wire()[:-1], b""])
def test_what_was_never_a_wire_is_refused_and_names_nobody(wire: object) -> None:
    with pytest.raises(ValueError, match=r"^this is no plan: "):
        Plan.from_wire(wire)
    assert Plan.name_of(wire) is None


@given(WIRES)
@example({"id": "r", "acts": [{"kind": 2**80, "vectors": [], "rows": [], "spans": []}]})
@example(packed({"id": "r", "epoch": float("nan")}))
@example(packed({1: 2, None: "r", "id": "r"}))
def test_reading_a_wire_yields_a_plan_or_a_value_error(wire: object) -> None:
    try:
        plan = Plan.from_wire(wire)
    except ValueError as error:
        said = str(error)
    else:
        assert Plan.from_wire(plan.to_wire()) == plan
        return
    assert said.startswith("this is no plan: ")


def test_a_set_of_token_ids_travels_once() -> None:
    many = Condition(((0, 4),), tuple(range(1000)), True)
    acts = tuple(replace(add(site), spans=(), conditions=(many,)) for site in range(SITES))
    wire = Plan("r", acts).to_wire()
    assert unpacked(wire)["sets"] == [list(many.tokens)]
    sets = {id(act.conditions[0].tokens) for act in Plan.from_wire(wire).acts}
    assert len(sets) == 1
