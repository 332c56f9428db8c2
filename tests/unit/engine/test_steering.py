"""What a plan's acts hold is taken all at once or not at all, and given back once."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import Act, Band, Capacity, Condition, Kind, Plan, Spans, amend, compose
from rheostat_engine.core.steering import Placed
from rheostat_engine.core.vectors import BankError

from .strategies import (
    DIGESTS,
    EVERYWHERE,
    LIMIT,
    POSITIONS,
    SITES,
    VOCABULARY,
    ablate,
    add,
    plans,
)
from .tables import VECTORS, WIDTH, capacity, norms
from .worker import NOTHING, Worker

A, B, C = DIGESTS
RULED = Condition(((5, 9),), (1, 3), True)
UNKNOWN = b"\xee" * 32
ZERO = b"\x00" * 32


def plan(*acts: Act) -> Plan:
    return Plan("r", acts)


def ruled(*tokens: int, where: Spans = RULED.spans) -> Act:
    return replace(add(1), spans=(), conditions=(Condition(where, tokens, True),))


RICH = plan(add(0, where=((0, 4),)), ablate(1, digests=(B, C)), ruled(1, 3), add(2, scale=2.0))


@pytest.mark.parametrize(
    ("room", "last", "message"),
    [
        (capacity(), add(3, digest=UNKNOWN), f"vector {UNKNOWN.hex()} is not in the worker"),
        (capacity(), add(3, scale=1e39), "the sum of the vectors is not finite in torch.float32"),
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
    for before in (None, Placed()):
        with pytest.raises(BankError, match=f"^{message}"):
            worker.steering.place(1, replace(RICH, acts=(*RICH.acts, last)), before)
        assert worker.held() == NOTHING
    numbers, positions = np.ones(LIMIT, np.int64), np.arange(LIMIT)
    found = worker.steering.lookup(numbers, positions)
    assert not any(one.any() for one in found)
    placed = worker.steering.place(1, RICH)
    assert placed.cells[0].start == 64  # the first cells that there are


def test_variants_that_find_no_place_leave_nothing_behind() -> None:
    worker = Worker()
    pieces = len(worker.rules.slots) // 16
    starts = [worker.rules.place([0], [0]) for _ in range(pieces - 1)]
    # Two pieces under the rule: the second finds no place.
    act = ruled(1, where=((5, 6), (8, 9)))
    with pytest.raises(BankError, match=r"^every piece that follows a rule"):
        worker.steering.place(1, plan(act))
    assert worker.held() == NOTHING
    assert worker.rules.place([0], [0]) not in starts


def test_acts_that_cannot_be_composed_are_refused_before_anything_is_taken() -> None:
    worker = Worker()
    with pytest.raises(ValueError, match="steps meet at one site"):
        worker.steering.place(1, plan(*[ablate(0)] * 65))
    assert worker.held() == NOTHING


@pytest.mark.parametrize("last", [add(3, digest=UNKNOWN), ruled(VOCABULARY)])
def test_a_change_that_cannot_be_put_in_force_leaves_the_old_in_force(last: Act) -> None:
    worker = Worker()
    placed = worker.steering.place(1, RICH)
    held = worker.held()
    numbers, positions = np.ones(LIMIT, np.int64), np.arange(LIMIT)
    before = worker.steering.lookup(numbers, positions)
    with pytest.raises(BankError):
        worker.steering.place(1, plan(ablate(4), last), placed)
    assert worker.held() == held
    after = worker.steering.lookup(numbers, positions)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    worker.steering.remove(1, placed)
    assert worker.held() == NOTHING


@given(plans(), plans(), st.integers(0, LIMIT))
def test_a_change_holds_what_the_new_plan_needs_and_the_cells_of_both(
    old: Plan, new: Plan, first: int
) -> None:
    worker, alone = Worker(), Worker()
    before = worker.steering.place(1, old)
    new = amend(old, new.acts, first)
    placed = worker.steering.place(1, new, before)
    alone.steering.place(1, new)
    assert worker.held() == alone.held()
    assert placed.cells[: len(before.cells)] == before.cells
    worker.steering.remove(1, placed)
    worker.steering.take_out([placed])
    assert worker.held() == NOTHING
    again = worker.steering.place(1, RICH)
    assert again.cells[0].start == 64


def test_changes_go_on_to_fill_the_cells_of_what_stays() -> None:
    worker = Worker(capacity(slots=300, bank_rows=300))
    changed = plan(add(0, where=((0, 4),)), add(1))
    placed = worker.steering.place(1, changed)
    for number in range(100):
        changed = amend(changed, (add(2, scale=2.0 + number),), 4 + number)
        placed = worker.steering.place(1, changed, placed)
    assert placed.measured
    # The first two together, the second alone, and every change.
    assert sum(run.count for run in placed.cells) == 2 + 100


def test_a_change_may_take_the_room_of_what_it_replaces() -> None:
    worker = Worker(replace(capacity(), ruled_pieces=2))
    before = worker.steering.place(1, plan(ruled(1, where=((5, 6), (8, 9)))))
    placed = worker.steering.place(1, plan(ruled(1, where=((5, 6), (9, 10)))), before)
    with pytest.raises(BankError, match=r"^every piece that follows a rule"):
        worker.steering.place(1, plan(ruled(1, where=((1, 2), (5, 6), (9, 10)))), placed)
    found = worker.steering.lookup(np.array([1, 1]), np.array([8, 9]))
    assert (found.rule > 0).tolist() == [False, True]
    worker.steering.remove(1, placed)
    assert worker.held() == NOTHING


def test_equal_acts_are_put_together_once(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    one = worker.steering.place(1, RICH)
    held = worker.held()
    monkeypatch.setattr(worker.bank, "acquire", None)
    many = [worker.steering.place(number, replace(RICH, request_id="s")) for number in (2, 3)]
    numbers = np.repeat([1, 2, 3], LIMIT)
    found = worker.steering.lookup(numbers, np.tile(np.arange(LIMIT), 3))
    slots = np.where(found.rule == 0, found.slot, 0).reshape(3, LIMIT)
    assert slots.any()
    np.testing.assert_array_equal(slots[1:], slots[[0, 0]])
    for number, placed in zip((1, 2), (one, many[0]), strict=True):
        worker.steering.remove(number, placed)
        assert worker.held() == held
    worker.steering.remove(3, many[1])
    assert worker.held() == NOTHING


@given(plans())
def test_the_sites_of_a_token_hold_all_where_one_of_its_variants_acts(one: Plan) -> None:
    worker = Worker()
    worker.steering.place(7, one)
    pieces = compose(one.acts)
    for position in POSITIONS:
        piece = [piece for piece in pieces if piece.start <= position][-1]
        expected = {site for v in piece.variants for site, _ in v.combination}
        found = worker.steering.lookup(np.array([7, 3]), np.array([position, position]))
        assert set(np.flatnonzero(found.sites)) == expected
        assert found.slot[1] == found.cell[1] == found.rule[1] == 0
        assert bool(found.rule[0]) <= bool(piece.sets)
    nobody = worker.steering.lookup(np.array([3]), np.array([0]))
    assert not any(part.any() for part in nobody)


def test_acts_that_do_nothing_hold_nothing() -> None:
    worker = Worker()
    nothing = Act(Kind.PULL, (A,), ((0, (0,)),), EVERYWHERE, bands=(Band(0, 0, 0),))
    dead = replace(ruled(1), scale=0.0)
    assert worker.steering.place(1, plan(add(0, scale=0.0), add(), nothing, dead)).cells == ()
    assert worker.held() == NOTHING


def test_a_plan_too_large_to_be_measured_is_in_force_and_says_so() -> None:
    worker = Worker(capacity(slots=1000, bank_rows=1000))
    many = [add(n % SITES, scale=1.0 + n, where=((n, n + 1),)) for n in range(600)]
    placed = worker.steering.place(1, plan(*many))
    assert (placed.measured, placed.cells) == (False, ())
    again = worker.steering.place(1, plan(add(0)), placed)
    assert (again.measured, again.cells) == (False, ())


def test_norms_are_those_of_the_vectors_that_acts_use() -> None:
    steering = Worker().steering
    found = steering.norms_of((add(0), ablate(1, digests=(C,)), add(0, scale=0.0, digest=UNKNOWN)))
    assert sorted(found) == [A, C]
    for digest, norm in found.items():
        expected = np.linalg.norm(VECTORS[digest].astype(np.float64), axis=1)
        np.testing.assert_allclose(norm, expected, rtol=1e-6)
    with pytest.raises(BankError, match=f"^vector {UNKNOWN.hex()} is not in the worker$"):
        steering.norms_of((add(0, digest=UNKNOWN),))
