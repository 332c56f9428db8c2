"""The ledger at admission counts what the worker will really hold."""

import gc
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import (
    Act,
    Capacity,
    CapacityLedger,
    Capture,
    Plan,
    Shortage,
    TokenCondition,
)
from rheostat_engine.plan import tables
from rheostat_engine.plan.composition import TokenVariants, only_adds
from rheostat_engine.plan.needs import SHARED
from rheostat_engine.plan.tables import CaptureNeed
from rheostat_engine.worker.state.id_allocators import BankError
from rheostat_engine.worker.steering.steering import RequestSteering

from ..cpu_worker import NOTHING, Worker
from ..gated import gated_plans
from ..naive import described
from ..strategies import DIGESTS, EVERYWHERE, LIMIT, ablate, add, captured, plans
from ..tables import capacity, used, variants_of

RESOURCES = [field.name for field in fields(Capacity)]
HELD = ("bank_rows", "directions", "steps", "slots")
A, B, C = DIGESTS


class Crowd:
    """Plans in force on a worker, by the ids that the ledger knows."""

    def __init__(self, room: Capacity) -> None:
        self.worker = Worker(room)
        self._placed: dict[str, tuple[int, RequestSteering]] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._placed)

    def add_request(self, plan: Plan) -> bool:
        self._number += 1
        try:
            applied = self.worker.steering.set_acts(
                self._number, plan.packed_acts.encoded, gates=plan.packed_acts.gates
            )
        except BankError:
            return False
        self._placed[plan.request_id] = self._number, applied
        return True

    def remove_request(self, request_id: str) -> None:
        if request_id in self._placed:
            number, applied = self._placed.pop(request_id)
            self.worker.steering.remove(number, applied)
            self.worker.steering.take_out([applied])

    def used(self) -> dict[str, int]:
        self.worker.steering.built_tables.collect(1 << 30)
        return dict(zip(HELD, used(self.worker.bank), strict=True))


def steps() -> st.SearchStrategy[list[Plan | int]]:
    """Plans that come, and numbers of those that go."""
    return st.lists(st.one_of(plans(), plans(), st.integers(0, 9)), max_size=12)


def named(many: list[Plan | int]) -> Iterator[tuple[str, Plan | None]]:
    """(id, plan that comes; None: it goes)."""
    for number, one in enumerate(many):
        if isinstance(one, int):
            yield f"{one}", None
        else:
            yield f"{number}", replace(one, request_id=f"{number}")


ROOM = st.builds(
    capacity,
    bank_rows=st.integers(1, 6),
    directions=st.integers(1, 5),
    steps=st.integers(1, 12),
    slots=st.integers(1, 8),
    token_rules=st.integers(1, 3),
    capture_rows=st.just(10**6),
)


@given(steps(), st.one_of(ROOM, st.just(capacity())))
def test_what_the_ledger_admits_the_worker_can_hold_and_both_count_the_same(
    many: list[Plan | int], room: Capacity
) -> None:
    ledger, crowd = CapacityLedger(room), Crowd(room)
    for request_id, plan in named(many):
        if plan is None:
            ledger.release(request_id)
            crowd.remove_request(request_id)
        else:
            shortage = ledger.admit(plan, prompt_len=LIMIT, max_step_tokens=LIMIT)
            if shortage is None:
                assert crowd.add_request(plan)
            elif shortage.resource != "token_rules":
                assert not crowd.add_request(plan)
        assert {name: ledger.used(name) for name in HELD} == crowd.used()
        assert ledger.used("token_rules") >= len(crowd.worker.rules)
        assert ledger.requests == len(crowd)


@given(
    st.lists(gated_plans(), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_gates_and_their_states_are_admitted_as_the_worker_has_room_for_them(
    drawn: list[Plan], gates: int, states: int, sums: int
) -> None:
    room = replace(capacity(), gates=gates, gate_states=states, row_sums=sums)
    ledger, crowd = CapacityLedger(room), Crowd(room)
    for number, plan in enumerate(drawn):
        plan = replace(plan, request_id=f"r{number}")
        shortage = ledger.admit(plan, prompt_len=LIMIT, max_step_tokens=LIMIT)
        if shortage is None or shortage.resource in ("gates", "gate_states", "row_sums"):
            assert crowd.add_request(plan) == (shortage is None)
        worker = crowd.worker
        worker.steering.built_tables.collect(1 << 30)
        states_there = worker.steering.gates
        held = worker.bank.programs.gates_used, states_there.used, states_there.row_sums.used
        assert held == tuple(map(ledger.used, ("gates", "gate_states", "row_sums")))
    for number in range(len(drawn)):
        ledger.release(f"r{number}")
        crowd.remove_request(f"r{number}")
    assert crowd.worker.held() == NOTHING


def test_rows_that_come_to_nothing_are_reserved_though_the_worker_needs_none() -> None:
    room = capacity(bank_rows=2)
    ledger, crowd = CapacityLedger(room), Crowd(room)
    plan = Plan("r", (add(0), add(0, scale=-1.0), add(1)))
    assert ledger.admit(plan, prompt_len=1, max_step_tokens=1) is None
    assert crowd.add_request(plan)
    assert (ledger.used("bank_rows"), crowd.used()["bank_rows"]) == (2, 1)


@given(plans())
def test_a_plan_needs_what_its_variants_are_made_of_each_content_once(plan: Plan) -> None:
    table = plan.packed_acts.table
    all_token_variants = variants_of(table)
    combinations = {
        v.combination
        for token_variants in all_token_variants
        for v in token_variants.variants
        if v.combination
    }
    programs = {program for combination in combinations for _, program in combination}
    chains = {p for p in programs if not only_adds(p)}
    total = plan.packed_acts.needs.total
    assert {resource: total[resource] for resource in SHARED} == {
        "bank_rows": len({row for p in programs for step in p for row in step.rows}),
        "directions": len(
            {one for p in programs for step in p for one in (step.direction, step.write) if one}
        ),
        "steps": sum(len(described(program)) for program in chains),
        "slots": len(combinations),
        "token_rules": len(
            {token_variants.sets for token_variants in all_token_variants if token_variants.sets}
        ),
        "gates": 0,
        "intervals": 0 if table is None else len(table.intervals.starts),
    }
    assert plan.packed_acts.ruled == sum(
        bool(token_variants.sets) for token_variants in all_token_variants
    )


def ruled(*spans: tuple[int, int], token: int = 1) -> Act:
    return replace(add(1), spans=(), conditions=(TokenCondition(spans, (token,), True),))


def test_every_combination_that_follows_a_rule_takes_a_place_of_its_own() -> None:
    ledger = CapacityLedger(replace(capacity(), ruled_intervals=3))
    two = Plan("", (ruled((2, 3), (6, 9)), ruled((4, 5), (10, 12), token=2)))
    assert ledger.admit(replace(two, request_id="a"), prompt_len=4, max_step_tokens=4) is None
    assert ledger.used("ruled_intervals") == 2
    shortage = ledger.admit(replace(two, request_id="b"), prompt_len=4, max_step_tokens=4)
    assert shortage == Shortage("ruled_intervals", 2, 1, ever=True)
    ledger.release("a")
    assert ledger.admit(replace(two, request_id="b"), prompt_len=4, max_step_tokens=4) is None


def test_every_sample_takes_places_and_ring_rows_of_its_own() -> None:
    ledger = CapacityLedger(replace(capacity(capture_rows=9), ruled_intervals=3))
    ruled = replace(add(1), spans=(), conditions=(TokenCondition(((6, 9),), (1,), True),))
    plan = Plan("a", (ruled,), (Capture((0, 1, 2), ((6, 9),)),))
    assert ledger.admit(plan, prompt_len=4, max_step_tokens=4, samples=3) is None
    used = {name: ledger.used(name) for name in ("ruled_intervals", "capture_rows", "slots")}
    assert used == {"ruled_intervals": 3, "capture_rows": 9, "slots": 1}
    ledger.release("a")
    shortage = ledger.admit(plan, prompt_len=4, max_step_tokens=4, samples=4)
    assert shortage is not None
    assert (shortage.free, shortage.ever) == (
        9 if shortage.resource == "capture_rows" else 3,
        False,
    )


@given(steps())
def test_once_all_are_released_nothing_is_held(many: list[Plan | int]) -> None:
    ledger = CapacityLedger(capacity(bank_rows=4, slots=4, capture_rows=40))
    for request_id, plan in named(many):
        if plan is None:
            ledger.release(request_id)
        else:
            ledger.admit(plan, prompt_len=LIMIT, max_step_tokens=LIMIT)
    for number in range(len(many)):
        ledger.release(f"{number}")
    assert {name: ledger.used(name) for name in RESOURCES} == dict.fromkeys(RESOURCES, 0)
    assert ledger.requests == 0


@given(plans() | gated_plans(), plans() | gated_plans())
def test_what_a_plan_lacks_is_what_admitting_would_add(one: Plan, other: Plan) -> None:
    ledger = CapacityLedger(capacity(capture_rows=10**6))
    assert ledger.admit(one, prompt_len=LIMIT, max_step_tokens=LIMIT) is None
    plan = replace(other, request_id="other", captures=())
    lacking = ledger.additional_needs(plan)
    expected = {name: ledger.used(name) + lacking[name] for name in RESOURCES}
    assert ledger.admit(plan, prompt_len=LIMIT, max_step_tokens=LIMIT) is None
    assert {name: ledger.used(name) for name in RESOURCES} == expected


@given(plans(), st.integers(1, LIMIT), st.integers(1, LIMIT))
def test_no_step_of_a_request_needs_more_ring_rows_than_were_reserved(
    plan: Plan, prompt_len: int, chunk: int
) -> None:
    reserved = plan.packed_captures.need(prompt_len=prompt_len, max_step_tokens=chunk).rows
    chunks = [range(s, min(s + chunk, prompt_len)) for s in range(prompt_len)]
    generated = [range(position, position + 1) for position in range(prompt_len, LIMIT + 2)]
    needed = [sum(len(captured(plan, p)) for p in step) for step in [*chunks, *generated]]
    assert max(needed) <= reserved


@given(st.lists(plans(), min_size=1, max_size=4), st.integers(1, 60), st.data())
def test_no_step_of_admitted_requests_needs_more_ring_rows_than_there_are(
    many: list[Plan], rows: int, data: st.DataObject
) -> None:
    chunk = data.draw(st.integers(1, LIMIT))
    ledger = CapacityLedger(capacity(capture_rows=rows))
    admitted = []
    for number, plan in enumerate(many):
        plan = replace(plan, request_id=f"{number}", acts=())
        length = data.draw(st.integers(1, LIMIT))
        if ledger.admit(plan, prompt_len=length, max_step_tokens=chunk) is None:
            admitted.append((plan, length))
    left, needed = chunk, 0
    for plan, length in admitted:
        start = data.draw(st.integers(0, LIMIT))
        most = min(left, length - start) if start < length else min(left, 1)
        count = data.draw(st.integers(0, max(0, most)))
        left -= count
        needed += sum(len(captured(plan, p)) for p in range(start, start + count))
    assert needed <= rows


def test_small_steps_let_any_number_of_captures_in() -> None:
    ledger = CapacityLedger(capacity(capture_rows=10))
    for number in range(50):
        plan = Plan(f"{number}", (), (Capture((0, 1), EVERYWHERE),))
        assert ledger.admit(plan, prompt_len=8, max_step_tokens=5) is None
    wide = Plan("wide", (), (Capture((0, 1, 2), EVERYWHERE),))
    shortage = ledger.admit(wide, prompt_len=8, max_step_tokens=5)
    assert shortage == Shortage("capture_rows", 15, 0, False)


def test_what_is_observed_counts_beside_the_plan_of_its_request() -> None:
    """Own sites and those of an observer each fit any step alone, and not together."""
    ledger = CapacityLedger(capacity(capture_rows=65))
    own = Plan("own", (), (Capture((0, 1), EVERYWHERE),))
    assert ledger.admit(own, prompt_len=100, max_step_tokens=32) is None
    need = CaptureNeed(rows=64, sites=4)
    shortage = ledger.observe("observed", need, max_step_tokens=32)
    assert shortage == Shortage("capture_rows", 64, 1, ever=True)
    assert (ledger.requests, ledger.used("capture_rows")) == (1, 64)
    assert ledger.observe("observed", CaptureNeed(1, 3), max_step_tokens=32) is None
    # Another of two sites fitted any step before; a token may now be captured at three.
    other = replace(own, request_id="other")
    assert ledger.admit(other, prompt_len=100, max_step_tokens=32) == Shortage(
        "capture_rows", 64, 0, ever=True
    )
    assert ledger.observe("observed", CaptureNeed(0, 0), max_step_tokens=32) is None
    assert ledger.requests == 1
    assert ledger.admit(other, prompt_len=100, max_step_tokens=32) is None


def test_what_is_observed_is_replaced_and_given_back_with_its_name() -> None:
    ledger = CapacityLedger(capacity(capture_rows=10))
    for rows in (4, 9, 2):
        assert ledger.observe("a", CaptureNeed(rows, 5), max_step_tokens=4) is None
        assert ledger.used("capture_rows") == rows
    assert ledger.observed("a") == CaptureNeed(2, 5)
    shortage = ledger.observe("a", CaptureNeed(12, 5), max_step_tokens=4)
    assert shortage == Shortage("capture_rows", 10, 8, ever=True)
    assert ledger.observed("a") == CaptureNeed(2, 5)
    ledger.release("a")
    assert (ledger.used("capture_rows"), ledger.requests) == (0, 0)
    assert ledger.observed("a") == CaptureNeed(0, 0)


def test_pieces_are_counted_once_for_equal_acts_or_captures() -> None:
    ledger = CapacityLedger(replace(capacity(), intervals=12))
    spans = ((1, 2), (3, 4))
    plan = Plan("a", (add(0, where=spans),), (Capture((0,), spans),))

    def admit(one: Plan) -> Shortage | None:
        return ledger.admit(one, prompt_len=8, max_step_tokens=4)

    assert admit(plan) is None
    assert ledger.used("intervals") == 5 + 5
    assert admit(replace(plan, request_id="b", captures=())) is None
    assert ledger.used("intervals") == 5 + 5
    other = Plan("c", (), (Capture((1,), spans),))
    assert admit(other) == Shortage("intervals", 5, 2, ever=True)
    ledger.release("a")
    assert ledger.used("intervals") == 5
    assert admit(other) is None


def test_a_plan_that_is_packed_is_not_looked_through_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan("r", (add(0), ablate(1)), (Capture((1,), ((0, 4),)),)).pack()
    monkeypatch.setattr(tables, "cut_intervals", None)
    monkeypatch.setattr(tables, "combine", None)
    ledger = CapacityLedger(capacity())
    for name in ("a", "b"):
        one = replace(plan, request_id=name, epoch=5)
        assert ledger.additional_needs(one)["slots"] == (name == "a")
        assert ledger.admit(one, prompt_len=4, max_step_tokens=4, samples=3) is None


def test_a_packed_plan_keeps_no_programs() -> None:
    """Many large plans may wait at a time, and programs take far more memory than tables."""
    acts = tuple(add(0, 1, scale=1.0 + n, where=((n, n + 1),)) for n in range(20))
    gc.collect()
    before = programs_in_memory()
    plan = Plan("r", acts).pack()
    gc.collect()
    assert plan.packed_acts.needs.total["bank_rows"] == 20
    assert programs_in_memory() == before


def programs_in_memory() -> int:
    return sum(type(one) is TokenVariants for one in gc.get_objects())


def different(*sites: int, scale: float = 1.0, digest: bytes = A) -> Act:
    """A different row at each site."""
    return replace(
        add(digest=digest, scale=scale), rows=tuple((s, (r,)) for r, s in enumerate(sites))
    )


def test_what_is_short_is_named_with_how_much_is_missing() -> None:
    ledger = CapacityLedger(capacity(bank_rows=2, slots=2, capture_rows=10))

    def admit(plan: Plan) -> Shortage | None:
        return ledger.admit(plan, prompt_len=4, max_step_tokens=6)

    assert admit(Plan("a", (different(0),), (Capture((0, 1), EVERYWHERE),))) is None
    assert admit(Plan("b", (different(0, 1, 2),))) == Shortage("bank_rows", 2, 1, False)
    assert admit(Plan("b", (different(1, 2, scale=2.0),))) == Shortage("bank_rows", 2, 1, True)
    assert admit(Plan("b", (different(1),))) is None
    assert admit(Plan("c", (different(2),))) == Shortage("slots", 1, 0, True)
    assert admit(Plan("c", (), (Capture((3,), EVERYWHERE),))) == Shortage(
        "capture_rows", 4, 2, True
    )
    assert admit(Plan("c", (), (Capture((1, 2, 3), EVERYWHERE),))) == Shortage(
        "capture_rows", 12, 2, False
    )
    assert admit(Plan("c", (), (Capture((3,), ((2, 4),)),))) is None


RULED = TokenCondition(EVERYWHERE, (1,), True)


@pytest.mark.parametrize(
    ("first", "second", "shortage"),
    [
        (ablate(0), ablate(0, digests=(A, C)), Shortage("directions", 2, 0, False)),
        (ablate(0), ablate(1, digests=(C,)), Shortage("directions", 1, 0, True)),
        (ablate(0), ablate(0, 1, digests=(B, B, B)), Shortage("steps", 3, 1, False)),
        (
            add(0, where=(), conditions=(RULED,)),
            add(0, where=(), conditions=(RULED._replace(among=False, tokens=(2,)),)),
            Shortage("token_rules", 1, 0, True),
        ),
    ],
)
def test_every_resource_can_be_what_is_short(first: Act, second: Act, shortage: Shortage) -> None:
    many = 5 if shortage.resource == "steps" else 1
    ledger = CapacityLedger(capacity(directions=many, steps=2, token_rules=1))
    assert ledger.admit(Plan("a", (first,)), prompt_len=8, max_step_tokens=4) is None
    assert ledger.admit(Plan("b", (second,)), prompt_len=8, max_step_tokens=4) == shortage


def test_a_plan_that_can_never_fit_is_told_so_whatever_else_is_short() -> None:
    ledger = CapacityLedger(capacity(bank_rows=1, slots=1, capture_rows=3))
    ledger.admit(Plan("a", (add(0),)), prompt_len=8, max_step_tokens=4)
    plan = Plan("b", (add(0, scale=2.0),), (Capture((0,), EVERYWHERE),))
    shortage = ledger.admit(plan, prompt_len=8, max_step_tokens=4)
    assert shortage == Shortage("capture_rows", 4, 3, False)


def test_a_plan_that_does_not_fit_reserves_nothing() -> None:
    ledger = CapacityLedger(capacity(capture_rows=3))
    plan = Plan("a", (add(0, 1), ablate(1)), (Capture((0,), EVERYWHERE),))
    assert ledger.admit(plan, prompt_len=8, max_step_tokens=4) is not None
    assert {name: ledger.used(name) for name in RESOURCES} == dict.fromkeys(RESOURCES, 0)
    assert ledger.requests == 0


def test_a_plan_that_cannot_be_composed_is_refused_and_reserves_nothing() -> None:
    ledger = CapacityLedger(capacity())
    with pytest.raises(ValueError, match="steps meet at one site"):
        ledger.admit(Plan("a", (ablate(0),) * 65), prompt_len=8, max_step_tokens=4)
    assert ledger.requests == 0


def test_an_id_that_is_held_is_not_admitted_again() -> None:
    ledger = CapacityLedger(capacity())
    ledger.admit(Plan("a"), prompt_len=1, max_step_tokens=1)
    with pytest.raises(ValueError, match=r"^request 'a' is already admitted$"):
        ledger.admit(Plan("a"), prompt_len=1, max_step_tokens=1)
