"""What a plan's acts hold is taken all at once or not at all, and given back once."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import MAX_PLAN_COST, Act, Band, Capacity, Kind, Plan, Spans, TokenCondition
from rheostat_engine.plan.composition import TokenVariants, Variant
from rheostat_engine.plan.plan import EncodedTable, Window
from rheostat_engine.worker.state.id_allocators import BankError
from rheostat_engine.worker.steering import built_tables as built_tables
from rheostat_engine.worker.steering.steering import RequestSteering

from ...cpu_worker import NOTHING, Worker
from ...strategies import (
    DIGESTS,
    EVERYWHERE,
    LIMIT,
    POSITIONS,
    ROWS,
    SITES,
    VOCABULARY,
    ablate,
    add,
    plans,
)
from ...tables import WIDTH, capacity, norms, used
from ...updates import update_steering

A, B, C = DIGESTS
RULED = TokenCondition(((5, 9),), (1, 3), True)
UNKNOWN = b"\xee" * 32
ZERO = b"\x00" * 32


def acts(*many: Act) -> EncodedTable:
    """Acts as they arrive."""
    encoded = Plan("r", many).packed_acts.encoded
    assert encoded is not None
    return encoded


def amended(plan: Plan, first: int) -> EncodedTable | None:
    """What a plan's acts do from a position on."""
    return update_steering(Plan("r"), plan.acts, first).packed_acts.encoded


def ruled(*tokens: int, where: Spans = RULED.spans) -> Act:
    return replace(add(1), spans=(), conditions=(TokenCondition(where, tokens, True),))


MANY = (add(0, where=((0, 4),)), ablate(1, digests=(B, C)), ruled(1, 3), add(2, scale=2.0))
RICH = acts(*MANY)


@pytest.mark.parametrize(
    ("room", "last", "message"),
    [
        (capacity(), add(3, digest=UNKNOWN), f"vector {UNKNOWN.hex()} is not in the worker"),
        (capacity(), add(3, scale=1e39), "the sum of the vectors is not finite in torch.float32"),
        (capacity(), replace(add(3), rows=((3, (ROWS,)),)), "vector .* has no row 2"),
        (
            capacity(),
            replace(add(3, scale=0.5), rows=((3, (2**31 - 1,)),)),
            "vector .* has no row 2147483647",
        ),
        (capacity(), replace(ablate(3), rows=((3, (ROWS,)),)), "vector .* has no row 2"),
        (capacity(), ablate(3, digests=(ZERO,)), f"vector {ZERO.hex()} has no direction"),
        (capacity(), ablate(3, digests=(A, A)), f"vector {A.hex()} has no direction of its own"),
        (capacity(bank_rows=2), add(3, scale=5.0), "every row of the bank is in use"),
        (capacity(directions=2), ablate(3, digests=(A,)), "every direction is in use"),
        (capacity(steps=7), ablate(3, digests=(B, C, A)), "every step is in use"),
        (capacity(slots=3), add(3, where=((11, 12),)), "every slot is in use"),
        (
            capacity(token_rules=1),
            ruled(2, where=((11, 12),)),
            "every rule about token ids is in use",
        ),
        (capacity(), ruled(VOCABULARY), "a token id is not below the vocabulary's size"),
    ],
)
def test_what_cannot_be_put_in_force_leaves_nothing_behind(
    room: Capacity, last: Act, message: str
) -> None:
    worker = Worker(room)
    zero = {ZERO: np.zeros((1, WIDTH), np.float32)}
    worker.steering.load(zero, norms(zero))
    for before in (None, RequestSteering()):
        with pytest.raises(BankError, match=f"^{message}"):
            worker.steering.set_acts(1, acts(*MANY, last), before)
        assert worker.held() == NOTHING
    numbers, positions = np.ones(LIMIT, np.int64), np.arange(LIMIT)
    found = worker.steering.lookup(numbers, positions)
    assert found.gained is None
    assert not any(np.any(one) for one in found if one is not None)
    applied = worker.steering.set_acts(1, RICH)
    assert applied.dose_slots[0].start == 64  # the first cells that there are


def test_variants_that_find_no_place_leave_nothing_behind() -> None:
    worker = Worker()
    worker.rules.add_variants(*np.zeros((2, worker.rules.free_intervals - 1, 16), np.int32))
    # Two combinations under rules: the second finds no place.
    both = acts(ruled(1, where=((5, 6),)), ruled(2, where=((8, 9),)))
    with pytest.raises(BankError, match=r"^every interval that follows a rule"):
        worker.steering.set_acts(1, both)
    assert worker.held() == NOTHING
    assert worker.rules.free_intervals == 1


def test_acts_that_cannot_be_composed_are_refused_before_anything_is_taken() -> None:
    worker = Worker()
    with pytest.raises(ValueError, match="steps meet at one site"):
        worker.steering.set_acts(1, acts(*[ablate(0)] * 65))
    assert worker.held() == NOTHING


@pytest.mark.parametrize("last", [add(3, digest=UNKNOWN), ruled(VOCABULARY)])
def test_a_change_that_cannot_be_put_in_force_leaves_the_old_in_force(last: Act) -> None:
    worker = Worker()
    applied = worker.steering.set_acts(1, RICH)
    held = worker.held()
    numbers, positions = np.ones(LIMIT, np.int64), np.arange(LIMIT)
    before = worker.steering.lookup(numbers, positions)
    with pytest.raises(BankError):
        worker.steering.set_acts(1, acts(ablate(4), last), applied, 3)
    assert worker.held() == held
    after = worker.steering.lookup(numbers, positions)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    worker.steering.remove(1, applied)
    assert worker.held() == NOTHING


@given(plans(), plans(), st.integers(0, LIMIT))
def test_a_change_holds_what_both_plans_need_and_gives_it_back(
    old: Plan, new: Plan, first: int
) -> None:
    worker, apart = Worker(), Worker()
    before = worker.steering.set_acts(1, old.packed_acts.encoded)
    applied = worker.steering.set_acts(1, amended(new, first), before, first)
    apart.steering.set_acts(1, old.packed_acts.encoded)
    apart.steering.set_acts(2, amended(new, first))
    assert worker.held() == apart.held()
    assert applied.dose_slots[: len(before.dose_slots)] == before.dose_slots
    worker.steering.remove(1, applied)
    worker.steering.take_out([applied])
    assert worker.held() == NOTHING
    again = worker.steering.set_acts(1, RICH)
    assert again.dose_slots[0].start == 64


@given(st.lists(st.tuples(plans(), st.integers(0, LIMIT)), max_size=4), plans())
def test_at_each_position_the_last_change_that_reaches_it_is_in_force(
    changes: list[tuple[Plan, int]], old: Plan
) -> None:
    """A change acts from its position on, whatever was said of later positions before."""
    worker = Worker()
    applied = worker.steering.set_acts(1, old.packed_acts.encoded)
    alone = [(0, worker.steering.set_acts(2, old.packed_acts.encoded), 2)]
    for number, (plan, first) in enumerate(changes, 3):
        encoded = plan.packed_acts.encoded
        applied = worker.steering.set_acts(1, encoded, applied, first)
        alone.append((first, worker.steering.set_acts(number, encoded), number))
    for position in POSITIONS:
        number = [number for first, _, number in alone if first <= position][-1]
        at = np.array([position])
        mine = worker.steering.lookup(np.array([1]), at)
        others = worker.steering.lookup(np.array([number]), at)
        assert mine.rule.tolist() == others.rule.tolist()
        assert mine.sites.tolist() == others.sites.tolist()
        if not mine.rule[0]:
            assert mine.slot.tolist() == others.slot.tolist()
        assert (mine.dose_slot[0] > 0) == (others.dose_slot[0] > 0)


def test_changes_get_cells_of_their_own_until_there_are_none() -> None:
    worker = Worker(capacity(slots=600, bank_rows=600))
    applied = worker.steering.set_acts(1, acts(add(0, where=((0, 4),)), add(1)))
    for number in range(100):
        applied = worker.steering.set_acts(1, acts(add(2, scale=2.0 + number)), applied, 4 + number)
    assert applied.measured
    # The first two together, the second alone, and every change.
    assert sum(run.count for run in applied.dose_slots) == 2 + 100
    for number in range(100, 520):
        applied = worker.steering.set_acts(1, acts(add(2, scale=2.0 + number)), applied, 4 + number)
    assert not applied.measured
    assert sum(run.count for run in applied.dose_slots) == 512


def test_a_change_is_refused_once_a_request_has_been_changed_too_often() -> None:
    worker = Worker(capacity(slots=1000, bank_rows=1000))
    sites = range(SITES)
    large = [add(*sites, scale=1.0 + n, where=((n, n + 1),)) for n in range(1000)]
    plan_cost = Plan("r", tuple(large)).packed_acts.plan_cost
    applied = None
    for _ in range(MAX_PLAN_COST // plan_cost):
        applied = worker.steering.set_acts(1, acts(*large), applied, 5)
    with pytest.raises(ValueError, match=r"^the request has been changed too often$"):
        worker.steering.set_acts(1, acts(*large), applied, 5)


def test_equal_acts_are_put_together_once() -> None:
    worker = Worker()
    one = worker.steering.set_acts(1, RICH)
    held, built = worker.held(), worker.steering.built_tables.built
    assert built
    many = [worker.steering.set_acts(number, RICH) for number in range(2, 66)]
    assert worker.steering.built_tables.built == built
    assert worker.held() == held
    numbers = np.repeat(np.arange(1, 66), LIMIT)
    found = worker.steering.lookup(numbers, np.tile(np.arange(LIMIT), 65))
    slots = np.where(found.rule == 0, found.slot, 0).reshape(65, LIMIT)
    assert slots.any()
    np.testing.assert_array_equal(slots[1:], slots[[0] * 64])
    for number, applied in enumerate((one, *many[:-1]), 1):
        worker.steering.remove(number, applied)
        assert worker.held() == held
    worker.steering.remove(65, many[-1])
    assert worker.held() == NOTHING


def test_a_table_that_comes_again_soon_is_taken_up_as_it_is() -> None:
    worker = Worker()
    applied = worker.steering.set_acts(1, RICH)
    built = worker.steering.built_tables.built
    worker.steering.remove(1, applied)
    worker.steering.set_acts(2, RICH)
    assert worker.steering.built_tables.built == built


SCARCE = ("slots", "bank_rows", "directions", "steps")
ANYWHERE = Window(0, 50, 0)


def own_digest(number: int) -> bytes:
    return b"own" + number.to_bytes(29)


def own_table(number: int) -> EncodedTable:
    """A table with slots, rows, directions and steps that no other table has."""
    where, one = ((number, number + 1),), (own_digest(number),)
    return acts(add(0, scale=1.0 + number, where=where), ablate(1, digests=one, where=where))


def worker_with_room(**room: int) -> Worker:
    """Room for 1000 of each resource but those that are given, and vectors of `own_table`."""
    worker = Worker(capacity(**{**dict.fromkeys(SCARCE, 1000), **room}))
    drawn = np.random.default_rng(0).normal(size=(100, 1, WIDTH)).astype(np.float32)
    vectors = {own_digest(number): vector for number, vector in enumerate(drawn)}
    worker.steering.load(vectors, norms(vectors))
    return worker


def use_once(worker: Worker, table: EncodedTable, window: Window | None = ANYWHERE) -> None:
    if window is None:
        applied = worker.steering.set_acts(1, table)
    else:
        applied = worker.steering.set_windowed_acts(1, table, window, None)
    worker.steering.remove(1, applied)


def test_tables_of_windows_that_come_again_after_many_steps_are_not_built_again() -> None:
    """As those of a sweep of many pairs, where cells of the other pairs run in between."""
    worker, built = worker_with_room(), []
    for _ in range(3):
        for number in range(60):
            use_once(worker, own_table(number), Window(number, number + 1, 0))
            worker.runtime.send_released()  # as each step does
        built.append(worker.steering.built_tables.built)
    assert built == [built[0]] * 3


def test_steps_release_all_other_unused_tables() -> None:
    worker = worker_with_room()
    use_once(worker, own_table(0))
    use_once(worker, own_table(1), None)
    kept = worker.bank.slots_used
    worker.runtime.send_released()
    assert 0 < worker.bank.slots_used < kept
    use_once(worker, own_table(0), None)  # now without a window
    worker.runtime.send_released()
    assert worker.bank.slots_used
    assert worker.held() == NOTHING


@pytest.mark.parametrize("resource", SCARCE)
def test_steps_release_tables_of_windows_while_more_than_half_of_a_resource_is_used(
    resource: str,
) -> None:
    worker = worker_with_room(**{resource: 100})
    for number in range(90):
        use_once(worker, own_table(number))
    worker.runtime.send_released()
    numbers = worker.bank.slots_used, *used(worker.bank)[:3]
    assert 40 <= numbers[SCARCE.index(resource)] <= 50
    assert worker.held() == NOTHING


def test_steps_release_tables_of_windows_that_share_a_slot_if_they_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(built_tables, "_KEPT_COST", 40)
    worker = Worker(capacity(slots=500))
    for number in range(200):
        use_once(worker, acts(add(0, where=((number, number + 1),))))
    assert worker.bank.slots_used == 1
    worker.runtime.send_released()
    assert 10 < len(worker.steering.built_tables.functions) <= 40


def test_steps_release_tables_of_windows_that_do_not_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(built_tables, "_KEPT_STEPS", 5)
    worker = worker_with_room()
    for number in range(3):
        use_once(worker, own_table(number))
        worker.runtime.send_released()
    left = []
    for _ in range(8):
        left.append(worker.bank.slots_used)
        worker.runtime.send_released()
    assert left == [3] * left.count(3) + [2, 1] + [0] * left.count(0)


def test_what_nobody_uses_makes_room_for_what_comes() -> None:
    worker = Worker(capacity(slots=4, bank_rows=4))
    for number in range(40):
        many = [add(0, scale=1.0 + 4 * number + i, where=((i, i + 1),)) for i in range(4)]
        applied = worker.steering.set_acts(1, acts(*many))
        worker.steering.remove(1, applied)
    assert worker.held() == NOTHING


def test_what_nobody_uses_is_let_go_of_a_part_at_a_time() -> None:
    worker = Worker(capacity(slots=500, bank_rows=500))
    many = [add(0, scale=1.0 + n, where=((n, n + 1),)) for n in range(400)]
    applied = worker.steering.set_acts(1, acts(*many))
    worker.steering.remove(1, applied)
    left = []
    while worker.bank.slots_used:
        worker.steering.built_tables.collect(100)
        left.append(worker.bank.slots_used)
    assert len(left) >= 8
    assert all(before - after <= 51 for before, after in pairwise([400, *left]))
    assert worker.held() == NOTHING


@pytest.mark.parametrize(
    "many",
    [
        [add(*range(SITES), scale=1.0 + n, where=((n, n + 1),)) for n in range(100)],
        [add(*range(SITES), scale=1.0 + n) for n in range(100)],
        [ablate(*range(SITES)), *[add(*range(SITES), scale=1.0 + n) for n in range(50)]],
    ],
    ids=["one after the other", "all at once", "in chains"],
)
def test_a_table_is_put_together_in_slices(
    many: list[Act], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built_tables, "_ROW_BYTES", 4 * WIDTH * 20)
    worker, whole = (Worker(capacity(slots=200, bank_rows=600)) for _ in range(2))
    encoded = acts(*many)
    one = worker.steering.built_tables.use(encoded)
    costs = []
    while one.work is not None:
        costs.append(worker.steering.built_tables.build(one, 30))
    at_one_site = len(many) if len({act.spans for act in many}) == 1 else 1
    assert len(costs) > 5
    assert max(costs) <= 30 + max(20, at_one_site)
    assert sum(costs) == worker.steering.built_tables.built
    applied = worker.steering.set_acts(1, encoded)
    expected = whole.steering.set_acts(1, encoded)
    assert worker.held() == whole.held()
    assert applied.dose_slots == expected.dose_slots
    worker.steering.remove(1, applied)
    worker.steering.built_tables.release(one)
    worker.steering.take_out([applied])
    assert worker.held() == NOTHING


def test_wide_rows_are_made_in_smaller_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built_tables, "_ROW_BYTES", 4 * WIDTH * 5)
    worker = Worker(capacity(slots=200, bank_rows=600))
    one = worker.steering.built_tables.use(
        acts(*[add(n % SITES, scale=1.0 + n) for n in range(40)])
    )
    while one.work is not None:
        assert worker.steering.built_tables.build(one, 1000) <= 2 * 8


def subspace(count: int, *sites: int) -> Act:
    """An act that ablates the subspace of some vectors."""
    digests = tuple(DIGESTS[number % 3] for number in range(count))
    rows = tuple((site, tuple(number // 3 for number in range(count))) for site in sites)
    bands = (Band(0.0, 0.0, 1.0),) * count
    return Act(Kind.PULL, digests, rows, EVERYWHERE, bands=bands, orthogonal=True)


def test_the_directions_of_one_site_are_made_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built_tables, "_ROW_BYTES", 4 * WIDTH * 3)
    worker, whole = Worker(), Worker()
    encoded = acts(subspace(2 * ROWS, 1, 4))
    one = worker.steering.built_tables.use(encoded)
    costs = []
    while one.work is not None:
        costs.append(worker.steering.built_tables.build(one, 1))
    assert max(costs) <= 3
    assert sum(costs) >= sum(1 + before // 4 for before in range(2 * ROWS))
    worker.steering.set_acts(1, encoded)
    whole.steering.set_acts(1, encoded)
    assert worker.held() == whole.held()
    for part in (worker, whole):
        part.bank.flush()
    assert torch.equal(worker.bank.programs.directions, whole.bank.programs.directions)


@pytest.mark.parametrize("slices", range(8))
def test_directions_whose_table_is_let_go_of_early_are_given_back(
    slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built_tables, "_ROW_BYTES", 4 * WIDTH * 3)
    worker = Worker()
    one = worker.steering.built_tables.use(acts(subspace(2 * ROWS, 1)))
    for _ in range(slices):
        worker.steering.built_tables.build(one, 1)
    worker.steering.built_tables.release(one)
    assert worker.held() == NOTHING


def test_directions_that_find_no_room_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(built_tables, "_ROW_BYTES", 4 * WIDTH * 3)
    worker = Worker(capacity(directions=2 * ROWS - 1))
    with pytest.raises(BankError, match="every direction is in use"):
        worker.steering.set_acts(1, acts(subspace(2 * ROWS, 1)))
    assert worker.held() == NOTHING


@pytest.mark.parametrize("slices", range(6))
def test_a_table_that_is_let_go_of_before_it_is_complete_leaves_nothing(slices: int) -> None:
    worker = Worker()
    one = worker.steering.built_tables.use(acts(*MANY, *[add(*range(SITES), scale=9.0)] * 3))
    for _ in range(slices):
        worker.steering.built_tables.build(one, 1)
    worker.steering.built_tables.release(one)
    assert worker.held() == NOTHING


@given(plans())
def test_the_sites_of_a_token_hold_all_where_one_of_its_variants_acts(one: Plan) -> None:
    worker = Worker()
    worker.steering.set_acts(7, one.packed_acts.encoded)
    table = one.packed_acts.table
    for position in POSITIONS:
        token_variants = TokenVariants((), (Variant((), ()),))
        if table is not None:
            interval = int(np.searchsorted(table.intervals.starts, position, side="right")) - 1
            token_variants = table.token_variants(int(table.intervals.sets[interval]))
        expected = {site for v in token_variants.variants for site, _ in v.combination}
        found = worker.steering.lookup(np.array([7, 3]), np.array([position, position]))
        assert set(np.flatnonzero(found.sites)) == expected
        assert found.slot[1] == found.dose_slot[1] == found.rule[1] == 0
        assert bool(found.rule[0]) <= bool(token_variants.sets)
    nobody = worker.steering.lookup(np.array([3]), np.array([0]))
    assert nobody.gained is None
    assert not any(np.any(part) for part in nobody if part is not None)


def test_acts_that_do_nothing_hold_nothing() -> None:
    worker = Worker()
    nothing = Act(Kind.PULL, (A,), ((0, (0,)),), EVERYWHERE, bands=(Band(0, 0, 0),))
    dead = replace(ruled(1), scale=0.0)
    applied = worker.steering.set_acts(1, acts(add(0, scale=0.0), add(), nothing, dead))
    assert [run.count for run in applied.dose_slots] == [0]
    assert worker.held() == NOTHING


def test_a_plan_too_large_to_be_measured_is_in_force_and_says_so() -> None:
    worker = Worker(capacity(slots=1000, bank_rows=1000))
    many = [add(n % SITES, scale=1.0 + n, where=((n, n + 1),)) for n in range(600)]
    applied = worker.steering.set_acts(1, acts(*many))
    assert (applied.measured, applied.dose_slots) == (False, [])
    again = worker.steering.set_acts(1, acts(add(0)), applied, 7)
    assert (again.measured, again.dose_slots) == (False, [])


def test_a_request_whose_vectors_are_not_there_is_refused_and_others_are_not() -> None:
    worker = Worker()
    with pytest.raises(BankError, match=f"^vector {UNKNOWN.hex()} is not in the worker$"):
        worker.steering.built_tables.use(acts(add(0, digest=UNKNOWN)))
    worker.steering.built_tables.use(
        acts(add(0, scale=0.0, digest=UNKNOWN), add(1, digest=UNKNOWN, where=()))
    )
