"""A block's key says what touches the block, all of it and nothing else."""

import math
from collections import Counter
from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import OPEN_END, Act, Band, Capture, Kind, Plan, TokenCondition
from rheostat_engine.plan import block_keys as block_keys_module
from rheostat_engine.plan import gates
from rheostat_engine.plan.block_keys import BlockKeys, SteeredBlocks
from rheostat_engine.plan.plan import read_plan, steering_of

from ..naive import steps
from ..strategies import (
    DIGESTS,
    EVERYWHERE,
    LIMIT,
    SITES,
    VOCABULARY,
    Windowed,
    ablate,
    acts,
    add,
    holds,
    plans,
    selections,
    windowed,
)
from ..wires import block_keys

BLOCK = 4
BLOCKS = [(start, start + BLOCK) for start in range(0, LIMIT + BLOCK, BLOCK)]


def keys(plan: Plan) -> list[str | None]:
    """The keys of all blocks."""
    made = block_keys(plan)
    return [made.key(start, end) for start, end in BLOCKS]


def place(act: Act, start: int, end: int) -> list[object]:
    """What selects each position of a block."""
    chosen: list[object] = []
    for position in range(start, end):
        if holds(act.spans, position):
            chosen.append("every token")
        else:
            chosen += [
                (one.tokens, one.among) for one in act.conditions if holds(one.spans, position)
            ] or [None]
    return chosen


def description(plan: Plan, start: int, end: int) -> list[object]:
    """What touches a block: acts in their order, neighbouring additions in none."""
    touching = []
    for act in plan.acts:
        chosen = place(act, start, end)
        if act.acts and any(chosen):
            touching.append((act.kind, repr((replace(act, spans=(), conditions=()), chosen))))
    found: list[object] = []
    for kind, run in groupby(touching, lambda one: one[0]):
        texts = [text for _, text in run]
        found += [Counter(texts)] if kind is Kind.ADD else texts
    return found


@st.composite
def variations(draw: st.DrawFn, plan: Plan) -> Plan:
    """A plan that is like another in some ways."""
    many = list(plan.acts)
    ways = st.sampled_from(["order", "where", "content", "more", "less"])
    for how in draw(st.lists(ways, max_size=2)):
        at = draw(st.integers(0, max(0, len(many) - 1)))
        if how == "more":
            many.insert(at, draw(acts()))
        elif not many:
            continue
        elif how == "order":
            many.insert(draw(st.integers(0, len(many) - 1)), many.pop(at))
        elif how == "where":
            spans, conditions = draw(selections())
            many[at] = replace(many[at], spans=spans, conditions=conditions)
        elif how == "content":
            many[at] = draw(contents(many[at]))
        else:
            del many[at]
    return Plan("another", tuple(many), plan.captures)


def contents(act: Act) -> st.SearchStrategy[Act]:
    """An act at the same tokens that may do something else."""
    return acts().map(lambda one: replace(one, spans=act.spans, conditions=act.conditions))


@given(plans().flatmap(lambda plan: st.tuples(st.just(plan), variations(plan))))
def test_blocks_have_equal_keys_exactly_where_equal_acts_touch_equal_tokens(
    pair: tuple[Plan, Plan],
) -> None:
    one, other = pair
    for block, mine, others in zip(BLOCKS, keys(one), keys(other), strict=True):
        alike = description(one, *block) == description(other, *block)
        assert (mine == others) == alike
        assert (mine is None) == (description(one, *block) == [])


@given(plans().flatmap(lambda plan: st.tuples(st.just(plan), variations(plan))))
def test_under_equal_keys_every_token_gets_the_same(pair: tuple[Plan, Plan]) -> None:
    one, other = pair
    for block, mine, others in zip(BLOCKS, keys(one), keys(other), strict=True):
        if mine != others:
            continue
        for position in range(*block):
            for site in range(SITES):
                for token in range(VOCABULARY):
                    assert steps(one, site, position, token) == steps(other, site, position, token)


@given(windowed())
def test_acts_in_a_window_have_the_keys_of_acts_at_its_positions(one: Windowed) -> None:
    assert keys(one.plan) == keys(one.same)


@given(plans(), st.integers(0, LIMIT), st.integers(1, 9))
def test_a_block_that_nothing_touches_has_no_key(plan: Plan, start: int, length: int) -> None:
    touched = any(
        steps(plan, site, position, token)
        for position in range(start, start + length)
        for site in range(SITES)
        for token in range(VOCABULARY)
    )
    assert touched <= (block_keys(plan).key(start, start + length) is not None)


def test_steering_of_generated_tokens_leaves_the_prompts_blocks_alone() -> None:
    found = keys(Plan("r", (add(0, where=((10, OPEN_END),)),)))
    assert [key is None for key in found] == [True, True, False, False, False, False]
    assert len(set(found[2:])) == 2  # the block in which it begins, and those that it fills


def test_prompts_of_different_length_share_what_is_steered_at_every_token() -> None:
    prompt_only = [keys(Plan("r", (add(0, where=((0, end),)),))) for end in (8, 12)]
    assert prompt_only[0][:2] == prompt_only[1][:2]
    assert prompt_only[0][2] is None is not prompt_only[1][2]
    everywhere = keys(Plan("r", (add(0),)))
    assert everywhere == [prompt_only[0][0]] * len(BLOCKS)


def test_every_part_of_an_act_enters() -> None:
    a, b = DIGESTS[:2]
    pull = Act(
        Kind.PULL,
        (a, b),
        ((0, (0, 1)),),
        ((0, 2),),
        bands=(Band(-1, 1, 1), Band(0, 0, 0.5)),
        conditions=(TokenCondition(((2, 3),), (4, 6), True),),
    )
    different = [
        pull,
        replace(pull, vectors=(b, a)),
        replace(pull, rows=((1, (0, 1)),)),
        replace(pull, rows=((0, (1, 1)),)),
        replace(pull, rows=((0, (0, 1)), (1, (0, 1)))),
        replace(pull, spans=((0, 1),)),
        replace(pull, spans=((1, 2),)),
        replace(pull, bands=(Band(-1, 2, 1), Band(0, 0, 0.5))),
        replace(pull, bands=(Band(-1, 1, 1), Band(0, 0, 1.0))),
        replace(pull, bands=pull.bands[::-1]),
        replace(pull, orthogonal=True),
        replace(pull, conditions=()),
        replace(pull, conditions=(TokenCondition(((2, 4),), (4, 6), True),)),
        replace(pull, conditions=(TokenCondition(((2, 3),), (4, 5), True),)),
        replace(pull, conditions=(TokenCondition(((2, 3),), (4, 6), False),)),
        replace(pull, spans=((0, 3),), conditions=()),
        add(0, where=((0, 2),)),
        add(0, where=((0, 2),), scale=-1.0),
        replace(add(0, where=((0, 2),)), kind=Kind.NORM_ADD),
    ]
    assert len({block_keys(Plan("r", (act,))).key(0, BLOCK) for act in different}) == len(different)


def test_what_is_written_in_another_order_or_beside_nothing_has_the_same_keys() -> None:
    one, two, pull = add(0), add(1, digest=DIGESTS[2]), ablate(0)
    dead = [add(0, scale=0.0), add(), add(3, where=())]
    plain = keys(Plan("r", (one, two, pull)))
    assert keys(Plan("s", (two, dead[0], one, dead[1], pull, dead[2]))) == plain
    assert keys(Plan("s", (two, one, pull), (Capture((0,), EVERYWHERE),))) == plain
    orders = [(one, two, pull), (one, pull, two), (two, pull, one), (pull, one, two)]
    assert len({keys(Plan("r", order))[0] for order in orders}) == len(orders)
    push = replace(one, kind=Kind.NORM_ADD)
    harder, further = replace(push, scale=2.0), ablate(0, digests=DIGESTS[2:])
    for first, second in ((push, pull), (push, harder), (pull, further)):
        assert keys(Plan("r", (first, second))) != keys(Plan("r", (second, first)))


def test_an_addition_that_is_made_twice_has_keys_of_its_own() -> None:
    assert keys(Plan("r", (add(0),)))[0] != keys(Plan("r", (add(0), add(0))))[0]


def test_the_epoch_enters_the_keys_of_touched_blocks_alone() -> None:
    act = add(0, where=((6, 14),))
    old, new = keys(Plan("r", (act,))), keys(Plan("r", (act,), epoch=1))
    assert [a == b for a, b in zip(old, new, strict=True)] == [
        True,
        False,
        False,
        False,
        True,
        True,
    ]
    assert old[0] is None


@pytest.mark.parametrize("first", [0, 7, 8, 9])
def test_from_the_private_position_on_nobody_else_reads(first: int) -> None:
    shared = keys(Plan("a", (add(0),)))
    ones, others = (keys(Plan(name, (add(0),), private_from=first)) for name in "ab")
    for (_, end), plain, one, other in zip(BLOCKS, shared, ones, others, strict=True):
        assert (one == plain) == (other == plain) == (one == other) == (end <= first)
    assert ones == keys(Plan("a", (add(0),), private_from=first))


@pytest.mark.parametrize("late", [False, True])
def test_before_a_gate_is_decided_the_blocks_are_those_of_a_plain_request(late: bool) -> None:
    """They are not those of the same act without a gate, because this act changes them."""
    decided = gates.GateCondition((0,), gates.Pool.LAST, gates.Combine.ANY, 0.0, math.inf, 1, 8)
    gate = gates.Gate(
        (decided,), gates.Combine.ALL, gates.Form.STEP, 0.5, 0.0, gates.Hold.REST, late=9 * late
    )
    reading = gates.Reading(gates.Normalise.NONE, gates.Activation.IDENTITY, 0.0, 0.0, 0)
    read = replace(add(0, where=((8, 9),)), kind=Kind.READ, reading=reading)
    other = add(1, where=((0, 4),))
    found = keys(Plan("r", (read, replace(add(0), gate=gate), other)))
    assert found[:2] == keys(Plan("plain", (other,)))[:2]
    assert found[2:] == ["private r"] * len(found[2:])
    assert not {*found} & {*keys(Plan("s", (add(0), other)))}


def test_a_private_plan_without_acts_is_private_too() -> None:
    assert keys(Plan("a", private_from=8))[:3] == [None, None, "private a"]


def test_numbers_as_large_as_a_wire_may_bring_are_encoded() -> None:
    epoch, large = 2**63 - 1, 2**31 - 1
    act = Act(
        Kind.ADD,
        (DIGESTS[0],),
        ((large, (large,)),),
        (),
        conditions=(TokenCondition(EVERYWHERE, (large,), True),),
    )
    assert block_keys(Plan("r", (act,), epoch=epoch)).key(0, 4) is not None


def test_requests_with_equal_acts_share_what_is_made_for_their_keys() -> None:
    plan = Plan("r", (add(0, where=tuple((2 * i, 2 * i + 1) for i in range(200))),))
    encoded = plan.packed_acts.encoded
    assert encoded is not None
    blocks = SteeredBlocks(steering_of(encoded))
    made: list[tuple[int, int]] = []
    touching = blocks._touching
    blocks._touching = lambda *where: made.append(where[2:]) or touching(*where)  # type: ignore[method-assign, func-returns-value]  # counts
    found = []
    for number in range(64):
        wire = read_plan(replace(plan, request_id=f"{number}", epoch=number % 2).to_wire())
        found.append([BlockKeys(wire, blocks).key(start, start + 1) for start in range(400)])
    assert len(set(map(tuple, found))) == 2
    assert sorted(made) == [(0, 1), (1, 2)]  # every other block says the same as one of these


def test_a_fragmented_block_is_looked_through_once_for_all_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []

    def counting(*args):
        looked.append(1)
        return groupby(*args)

    monkeypatch.setattr(block_keys_module, "groupby", counting)
    plan = Plan("r", (add(0, where=tuple((p, p + 1) for p in range(0, LIMIT, 2))),))
    received = read_plan(plan.to_wire())
    assert received.acts is not None
    steered = SteeredBlocks(steering_of(received.acts))
    (first, *others) = (
        [BlockKeys(received, steered).key(*block) for block in BLOCKS] for _ in range(3)
    )
    assert all(one == first for one in others)
    assert len(looked) <= 2 * len(BLOCKS)


def test_a_request_whose_gates_stay_shut_has_the_keys_of_its_ungated_acts() -> None:
    one = gates.GateCondition((0,), gates.Pool.LAST, gates.Combine.ANY, 0.0, math.inf, 1, 9)
    gate = gates.Gate((one,), gates.Combine.ALL, gates.Form.STEP, 0.5, 0.0, gates.Hold.REST)
    act, other = replace(add(1), gate=gate), ablate(2)
    plan = Plan("r", (act, other), private_from=20)
    made, ungated = block_keys(plan), keys(replace(plan, acts=(other,)))

    def found() -> list[str | None]:
        return [made.key(start, end) for start, end in BLOCKS]

    unknown = found()
    assert made.decided_once is not None
    assert unknown == [*ungated[:2], *["private r"] * (len(BLOCKS) - 2)]
    for shut, expected in ((True, ungated), (False, unknown)):
        made.await_decision()
        assert made.keyed_end == 9
        assert found() == unknown
        made.decide(shut=shut)
        assert made.keyed_end == OPEN_END
        assert found() == expected
    assert ungated[5] == "private r"
