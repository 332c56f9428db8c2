"""A plan arrives in the worker as it was made, and what is no plan is refused with its place."""

import contextlib
import copy
import math
import pickle
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rheostat_engine import (
    OPEN_END,
    Act,
    Activation,
    Band,
    Capture,
    Codec,
    Directions,
    Kind,
    Normalise,
    Plan,
    Readout,
    RowEncoding,
    TokenCondition,
)
from rheostat_engine.plan.gates import Combine, Form, Gate, GateCondition, Hold, Pool
from rheostat_engine.plan.plan import ReceivedPlan, read_plan, read_request_id, steering_of
from rheostat_engine.plan.tables import CaptureTable, SteeringTable
from rheostat_engine.plan.wire import captures_from, captures_to, steering_from, steering_to

from ..strategies import (
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
from ..wires import WIRES, int32, packed, unpacked

A = DIGESTS[0]


@given(plans(), st.integers(0, 3), st.none() | st.integers(0, LIMIT), st.booleans())
def test_a_plan_says_on_its_way_who_it_is_and_what_it_shares(
    acts: Plan, epoch: int, private_from: int | None, measured: bool
) -> None:
    plan = replace(acts, epoch=epoch, private_from=private_from, measured=measured)
    plan = plan.for_request(plan.request_id, epoch)
    found = read_plan(plan.to_wire())
    assert found == ReceivedPlan(
        plan.request_id,
        epoch,
        private_from,
        plan.packed_acts.encoded,
        plan.packed_captures.encoded,
        measured,
    )
    assert read_request_id(plan.to_wire()) == plan.request_id


def test_an_empty_plan_is_a_name_alone_on_the_wire() -> None:
    assert unpacked(Plan("r").to_wire()) == {"id": "r"}


def test_bounds_that_are_missing_are_infinite_on_the_wire() -> None:
    bands = (Band(-math.inf, 1.0, 0.5), Band(-1.0, math.inf, 1.0))
    plan = Plan("r", (Act(Kind.PULL, (A, A), ((0, (0, 1)),), EVERYWHERE, bands=bands),))
    wire = inside(plan, "acts")
    plain = [[Normalise.UNIT, Activation.IDENTITY, 0.0, 0.0], False, False]
    assert wire["acts"][0]["bands"] == [[-INF, 1.0, 0.5, *plain], [-1.0, INF, 1.0, *plain]]
    assert plan.packed_acts.encoded is not None
    assert steering_of(plan.packed_acts.encoded).acts[0].bands == bands


def test_a_plan_that_waits_takes_a_few_bytes_for_each_site_of_its_acts() -> None:
    def made(number: int) -> Act:
        rows = ((site, (site % 36,)) for site in range(180))
        return Act(Kind.ADD, (number.to_bytes(32),), tuple(rows), EVERYWHERE, 1.0 + number)

    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    plan = Plan("r", tuple(map(made, range(256))))
    size = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(plan.acts) == 256
    assert size < 256 * (8 * 180 + 2000)


def test_the_rows_of_an_act_are_pairs_of_site_and_rows() -> None:
    pairs = ((1, (3, 4)), (5, (0, 9)), (1 << 20, (2, 2)))
    act = Act(Kind.PULL, (A, A), pairs, EVERYWHERE, bands=(Band(0.0, 0.0, 1.0),) * 2)
    assert tuple(act.rows) == pairs == act.rows
    assert hash(act.rows) == hash(pairs)
    assert (len(act.rows), act.rows[1], tuple(act.rows[1:])) == (3, pairs[1], pairs[1:])
    assert list(act.site_rows.within(range(2, 6))) == [pairs[1]]
    assert list(act.site_rows.within(range(6, 9))) == []
    same = replace(act, rows=pairs)
    assert same == act
    assert hash(same) == hash(act)
    assert replace(act, rows=pairs[:2]) != act
    assert copy.deepcopy(act) == act == pickle.loads(pickle.dumps(act))
    assert not Act(Kind.ADD, (A,), (), EVERYWHERE).strong


@given(plans())
def test_nothing_is_captured_before_the_first_captured_position(plan: Plan) -> None:
    found = [position for position in POSITIONS if captured(plan, position)]
    table = plan.packed_captures.table
    first = OPEN_END if table is None else table.first
    assert first == min(found, default=OPEN_END)


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


CONDITION = TokenCondition(((9, OPEN_END),), (3, 7), True)
PLAN = Plan(
    "r",
    (
        add(2, 3, where=((0, 4), (6, 9)), conditions=(CONDITION,)),
        ablate(1, digests=DIGESTS[:2]),
    ),
    (Capture((1,), ((0, 2),), RowEncoding(Codec.CAST, "float16")),),
)
ADD, PULL = 0, 1


def inside(plan: Plan, part: str) -> Any:  # plain data of a wire
    """What a table's wire holds."""
    encoded = getattr(plan, f"packed_{part}").encoded
    return unpacked(encoded.wire)


def acts_with(**values: object) -> tuple[str, object]:
    """The wire of the acts with something else in it."""
    return "acts", {**inside(PLAN, "acts"), **values}


def act_with(number: int, **values: object) -> tuple[str, object]:
    """The wire of the acts with something else in one of them."""
    wire = inside(PLAN, "acts")
    wire["acts"][number].update(values)
    return "acts", wire


def captures_with(**values: object) -> tuple[str, object]:
    """The wire of the captures with something else in it."""
    return "captures", {**inside(PLAN, "captures"), **values}


def intervals_with(part: str = "captures", **values: object) -> tuple[str, object]:
    """The wire of a table with other intervals."""
    wire = inside(PLAN, part)
    wire["intervals"].update(values)
    return part, wire


def test_what_is_changed_below_is_right_before() -> None:
    assert steering_from(msgspec.msgpack.encode(acts_with()[1])).acts
    assert captures_from(msgspec.msgpack.encode(captures_with()[1])).captures
    assert intervals_with("acts")[1] == acts_with()[1]


INF, NAN = math.inf, math.nan
BAND = [0.0, 0.0, 1.0]
UNFIT = "a set is not ascending, or names a missing member"


@pytest.mark.parametrize(
    ("table", "where"),
    [
        (acts_with(acts=None), r"\$.acts"),
        (acts_with(acts=[None]), r"\$.acts\[0\]"),
        (acts_with(acts=[{}]), r"\$.acts\[0\]"),
        (act_with(ADD, kind=11), r"\$.acts\[0\].kind"),
        (act_with(ADD, kind="ADD"), r"\$.acts\[0\].kind"),
        (act_with(ADD, kind=int(Kind.SUM)), "SUM: it is no act"),
        (act_with(ADD, kind=int(Kind.READ_MEAN)), "READ_MEAN: it is no act"),
        (act_with(PULL, kind=int(Kind.ADD)), "ADD: it takes one vector and no bands"),
        (act_with(ADD, kind=int(Kind.PULL)), "PULL: bands and vectors don't fit"),
        (act_with(ADD, vectors=[5]), r"\$.acts\[0\].vectors\[0\]"),
        (act_with(ADD, vectors=["text"]), r"\$.acts\[0\].vectors\[0\]"),
        (act_with(ADD, vectors=[A[:31]]), r"\$.acts\[0\].vectors\[0\]"),
        (act_with(ADD, vectors=[A + b"x"]), r"\$.acts\[0\].vectors\[0\]"),
        (act_with(ADD, vectors=[]), "ADD: rows and vectors don't fit"),
        (act_with(ADD, vectors=[A, A]), "ADD: rows and vectors don't fit"),
        (act_with(ADD, rows=int32([0, 0, 0])), "ADD: rows and vectors don't fit"),
        (act_with(ADD, sites=int32([2])), "ADD: rows and vectors don't fit"),
        (act_with(ADD, sites=int32([3, 2])), "ADD: its sites are not ascending"),
        (act_with(ADD, sites=int32([2, 2])), "ADD: its sites are not ascending"),
        (act_with(ADD, sites=int32([-1, 2])), "ADD: its sites are not ascending"),
        (act_with(ADD, rows=int32([0, -1])), "ADD: .* a row below 0"),
        (act_with(ADD, sites=[2, 3]), r"\$.acts\[0\].sites"),
        (act_with(ADD, rows=[[0], [0]]), r"\$.acts\[0\].rows"),
        (act_with(ADD, sites=b"123"), "sites are torn"),
        (act_with(ADD, rows=b"123"), "rows are torn"),
        (act_with(ADD, scale="1.0"), r"\$.acts\[0\].scale"),
        (act_with(ADD, scale=NAN), "ADD: its scale is not finite"),
        (act_with(ADD, scale=INF), "ADD: its scale is not finite"),
        (act_with(ADD, bands=[BAND]), "ADD: it takes one vector and no bands"),
        (act_with(PULL, kind=int(Kind.REPLACE)), "REPLACE: it takes a vector, at most one mask"),
        (act_with(ADD, kind=int(Kind.REPLACE), scale=1.5), "REPLACE: .* a scale from 0 to 1"),
        (act_with(PULL, kind=int(Kind.ADD_LAST)), "ADD_LAST: it takes a vector, at most one mask"),
        (act_with(ADD, kind=int(Kind.ADD_LAST), scale=-0.5), "ADD_LAST: .* from 0 to 1"),
        (act_with(PULL, bands=[BAND]), "PULL: bands and vectors don't fit"),
        (act_with(PULL, bands=[BAND, [1.0, 0.0, 1.0]]), "PULL: a band is empty"),
        (act_with(PULL, bands=[BAND, [NAN, 0.0, 1.0]]), "PULL: a band is empty"),
        (act_with(PULL, bands=[BAND, [INF, INF, 1.0]]), "PULL: a band is empty"),
        (act_with(PULL, bands=[BAND, [-INF, -INF, 1.0]]), "PULL: a band is empty"),
        (act_with(PULL, bands=[BAND, [0.0, 0.0, INF]]), "PULL: .* a number of it is not finite"),
        (
            act_with(PULL, bands=[BAND, [*BAND, [1, 0, NAN]]], orthogonal=False),
            "PULL: .* a number of it is not finite",
        ),
        (act_with(PULL, bands=[BAND, [*BAND, [4]]]), r"\$.acts\[1\].bands\[1\]\[3\]\[0\]"),
        (act_with(PULL, bands=[BAND, [*BAND, [1, 0, 0.0, 0.0], True]]), "bands and vectors"),
        (
            act_with(PULL, bands=[BAND, [*BAND, [0]]], orthogonal=True),
            "directions of a subspace are read as they are",
        ),
        (act_with(PULL, bands=[BAND, [0.0, 0.0, NAN]]), "PULL: .* a number of it is not finite"),
        (act_with(PULL, bands=[BAND, [0.0, 0.0]]), r"\$.acts\[1\].bands\[1\]"),
        (act_with(PULL, orthogonal=1), r"\$.acts\[1\].orthogonal"),
        (acts_with(clauses=[[2, None, True]]), "there is no act 2"),
        (acts_with(clauses=[[0, 1, True]]), "there is no set 1 of token ids"),
        (acts_with(clauses=[[0, 0, None]]), r"\$.clauses\[0\]\[2\]"),
        (acts_with(clauses=[[0, None, True]]), UNFIT),
        (acts_with(clauses=[[0, None, True]] * 3), "conditions of an act overlap"),
        (acts_with(sets=[b""]), "token ids are missing or not ascending"),
        (acts_with(sets=[int32([3, 3])]), "token ids are missing or not ascending"),
        (acts_with(sets=[int32([7, 3])]), "token ids are missing or not ascending"),
        (acts_with(sets=[int32([-1])]), "token ids are missing or not ascending"),
        (acts_with(sets=[b"12345"]), "token ids are torn"),
        (intervals_with(starts=b"123"), "positions are torn"),
        (intervals_with(sets=b"123"), "sets are torn"),
        (intervals_with(starts=b"", sets=b""), "intervals and sets don't fit"),
        (intervals_with(starts=int32([0])), "intervals and sets don't fit"),
        (intervals_with(starts=int32([1, 2])), "positions are not ascending from 0"),
        (intervals_with(starts=int32([0, 0])), "positions are not ascending from 0"),
        (intervals_with(starts=int32([0, OPEN_END])), "positions are not ascending from 0"),
        (intervals_with(sets=int32([0, 2])), "an interval names a set that is missing"),
        (intervals_with(sets=int32([-1, 0])), "an interval names a set that is missing"),
        (intervals_with(members=[[1], []]), UNFIT),
        (intervals_with("acts", members=[[1, 0]] * 4), UNFIT),
        (intervals_with(members=[[-1], []]), r"\$.intervals.members\[0\]\[0\]"),
        (captures_with(captures=[[[None], None]]), r"\$.captures\[0\]\[0\]\[0\]"),
        (captures_with(captures=[[["1"], None]]), r"\$.captures\[0\]\[0\]\[0\]"),
        (captures_with(captures=[[[-1], None]]), r"\$.captures\[0\]\[0\]\[0\]"),
        (captures_with(captures=[[[2, 1], None]]), "sites are not ascending"),
        (captures_with(captures=[[[1], 1]]), "there is no encoding 1"),
        (captures_with(encodings=[{"codec": 9}]), r"\$.encodings\[0\].codec"),
        (captures_with(encodings=[{"codec": 1}]), "CAST: its type or seed is invalid"),
        (captures_with(encodings=[{"codec": 2, "vectors": [0], "rows": [0]}]), "FULL8: directions"),
    ],
    ids=repr,
)
def test_what_is_no_table_is_refused_with_its_place(table: tuple[str, object], where: str) -> None:
    reader: Callable[[bytes], object] = {"acts": steering_from, "captures": captures_from}[table[0]]
    with pytest.raises(ValueError, match=f"^this is no plan: .*{where}"):
        reader(msgspec.msgpack.encode(table[1]))


@pytest.mark.parametrize(
    ("wire", "where"),
    [
        (packed([]), "Expected `object`"),
        (packed({}), "missing required field `id`"),
        (packed({"id": 3}), r"\$.id"),
        (packed({"id": "r", "epoch": -1}), r"\$.epoch"),
        (packed({"id": "r", "epoch": 2**63}), r"\$.epoch"),
        (packed({"id": "r", "private_from": -1}), r"\$.private_from"),
        (packed({"id": "r", "private_from": "0"}), r"\$.private_from"),
        (packed({"id": "r", "acts": [b"1"]}), r"\$.acts"),
        (packed({"id": "r", "captures": [b"1", 5]}), r"\$.captures\[1\]"),
        (packed({"id": "r", "gates": [3]}), r"\$.gates"),
        (packed({"id": "r", "gates": packed([3])}), r"gates: .*\$\[0\]"),
        (packed({"id": "r", "gates": b"\xc1"}), "gates: "),
        (None, "it is not made of bytes"),
        ({"id": "r"}, "it is not made of bytes"),
        ("r", "it is not made of bytes"),
        (PLAN.to_wire()[:-1], "truncated"),
        (b"", "truncated"),
    ],
)
def test_what_is_no_plan_is_refused_with_its_place(wire: object, where: str) -> None:
    with pytest.raises(ValueError, match=f"^this is no plan: .*{where}"):
        read_plan(wire)


def test_gates_are_parsed_once_for_all_samples_with_them() -> None:
    condition = GateCondition((0,), Pool.LAST, Combine.ANY, 0.25, math.inf)
    gate = Gate((condition,), Combine.ALL, Form.STEP, 0.5, 0.0, Hold.TOKEN)
    plan = Plan("r", (replace(add(2), gate=gate),)).pack()
    one, other = (read_plan(plan.for_request(name, 0).to_wire()) for name in ("a", "b"))
    assert one.gates == (gate,)
    assert other.gates is one.gates


@pytest.mark.parametrize("wire", [None, {"id": "r"}, "r", PLAN.to_wire()[:-1], b""])
def test_what_was_never_a_wire_names_nobody(wire: object) -> None:
    assert read_request_id(wire) is None


@given(WIRES)
@example(packed({"id": "r", "epoch": float("nan")}))
@example(packed({1: 2, None: "r", "id": "r"}))
def test_reading_a_wire_yields_tables_or_a_value_error(wire: object) -> None:
    try:
        found = read_plan(wire)
        acts = None if found.acts is None else steering_from(found.acts.wire)
        captures = None if found.captures is None else captures_from(found.captures.wire)
    except ValueError as error:
        said = str(error)
    else:
        check_tables(acts, captures)
        return
    assert said.startswith("this is no plan: ")


def check_tables(acts: SteeringTable | None, captures: CaptureTable | None) -> None:
    """Whatever was read can be written again, priced and looked through."""
    if acts is not None:
        again = steering_from(steering_to(acts))
        assert (again.acts, again.clauses, again.sets) == (acts.acts, acts.clauses, acts.sets)
        assert acts.plan_cost >= 0
        for number in range(len(acts.intervals.members)):
            with contextlib.suppress(ValueError):
                acts.token_variants(number)
    if captures is not None:
        assert captures_from(captures_to(captures)).captures == captures.captures
        assert captures.need(prompt_len=5, max_step_tokens=3).rows >= 0


def test_readouts_of_a_projection_travel_and_decide_the_encoding() -> None:
    readouts = (Readout(Normalise.COSINE, Activation.TANH, 0.5), Readout(Normalise.NONE))
    plain = RowEncoding(Codec.CAST, "float32", directions=Directions((A, A), (0, 1)))
    read = replace(plain, directions=Directions((A, A), (0, 1), readouts))
    other = replace(plain, directions=Directions((A, A), (0, 1), readouts[::-1]))
    assert len({plain.key, read.key, other.key}) == 3
    table = Plan("r", (), (Capture((1,), EVERYWHERE, read),)).packed_captures.table
    assert table is not None
    assert captures_from(captures_to(table)).captures[0].encoding == read
