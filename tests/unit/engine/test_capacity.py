"""The ledger at admission counts what the worker's bank will really hold."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import Addition, CapacityLedger, Capture, Plan, Shortage
from rheostat_engine.capacity import step_capture_rows
from rheostat_engine.core.bank import Bank, BankError
from rheostat_engine.plan import combine, segment

from .strategies import DIGESTS, LIMIT, ROWS, SITES, captured, plans

VECTORS = {
    digest: np.random.default_rng(i).uniform(1, 2, (ROWS, 4)).astype(np.float32)
    for i, digest in enumerate(DIGESTS)
}
EVERYWHERE = ((0, 2**31 - 1),)
UNLIMITED = 10**6


class Worker:
    """A bank that takes plans as the worker does."""

    def __init__(self, rows: int, slots: int) -> None:
        self.bank = Bank(
            sites=SITES,
            rows=rows + 1,
            slots=slots + 1,
            width=4,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.slots: dict[str, list[int]] = {}

    def install(self, plan: Plan) -> bool:
        pieces = segment(tuple(a.spans for a in plan.additions))
        combinations = [combine([plan.additions[i] for i in active]) for _, active in pieces]
        try:
            self.slots[plan.request_id] = self.bank.acquire(combinations, VECTORS)
        except BankError:
            return False
        return True

    def forget(self, request_id: str) -> None:
        for slot in self.slots.pop(request_id, []):
            self.bank.release(slot)


def steps() -> st.SearchStrategy[list[Plan | int]]:
    """Plans that come, and numbers of those that go."""
    return st.lists(st.one_of(plans(), plans(), st.integers(0, 9)), max_size=12)


def named(many: list[Plan | int]) -> Iterator[tuple[str, Plan | None]]:
    """(id, plan that comes; None: it goes)."""
    for number, one in enumerate(many):
        if isinstance(one, int):
            yield f"{one}", None
        else:
            yield f"{number}", Plan(f"{number}", one.additions, one.captures)


@given(steps(), st.integers(1, 6), st.integers(1, 6))
def test_the_ledger_and_the_workers_bank_agree(
    many: list[Plan | int], rows: int, slots: int
) -> None:
    ledger = CapacityLedger(bank_rows=rows, slots=slots, capture_rows=UNLIMITED)
    worker = Worker(rows, slots)
    for request_id, plan in named(many):
        if plan is None:
            ledger.release(request_id)
            worker.forget(request_id)
        else:
            shortage = ledger.admit(plan, prompt_len=LIMIT, max_step_tokens=LIMIT)
            assert worker.install(plan) == (shortage is None)
        assert ledger.bank_rows_used == worker.bank.rows_used
        assert ledger.slots_used == worker.bank.slots_used
        assert ledger.requests == len(worker.slots)


@given(steps())
def test_once_all_are_released_nothing_is_held(many: list[Plan | int]) -> None:
    ledger = CapacityLedger(bank_rows=4, slots=4, capture_rows=40)
    for request_id, plan in named(many):
        if plan is None:
            ledger.release(request_id)
        else:
            ledger.admit(plan, prompt_len=LIMIT, max_step_tokens=LIMIT)
    for number in range(len(many)):
        ledger.release(f"{number}")
    used = (ledger.bank_rows_used, ledger.slots_used, ledger.capture_rows_used, ledger.requests)
    assert used == (0, 0, 0, 0)


@given(plans(), st.integers(1, LIMIT), st.integers(1, LIMIT))
def test_no_step_of_a_request_needs_more_ring_rows_than_were_reserved(
    plan: Plan, prompt_len: int, chunk: int
) -> None:
    reserved = step_capture_rows(plan, prompt_len=prompt_len, max_step_tokens=chunk)
    chunks = [range(s, min(s + chunk, prompt_len)) for s in range(prompt_len)]
    generated = [range(position, position + 1) for position in range(prompt_len, LIMIT + 2)]
    needed = [sum(len(captured(plan, p)) for p in step) for step in [*chunks, *generated]]
    assert max(needed) <= reserved


def addition(*sites: int, scale: float = 1.0, digest: bytes = DIGESTS[0]) -> Addition:
    """A different row at each site."""
    return Addition(digest, tuple((s, r) for r, s in enumerate(sites)), scale, EVERYWHERE)


def test_what_is_short_is_named_with_how_much_is_missing() -> None:
    ledger = CapacityLedger(bank_rows=2, slots=2, capture_rows=10)

    def admit(plan: Plan) -> Shortage | None:
        return ledger.admit(plan, prompt_len=8, max_step_tokens=4)

    assert admit(Plan("a", (addition(0),), (Capture((0, 1), EVERYWHERE),))) is None
    assert admit(Plan("b", (addition(0, 1, 2),))) == Shortage("bank rows", 2, 1, False)
    assert admit(Plan("b", (addition(1, 2, scale=2.0),))) == Shortage("bank rows", 2, 1, True)
    assert admit(Plan("b", (addition(1),))) is None
    assert admit(Plan("c", (addition(2),))) == Shortage("slots", 1, 0, True)
    assert admit(Plan("c", (), (Capture((3,), EVERYWHERE),))) == Shortage(
        "capture rows", 4, 2, True
    )
    assert admit(Plan("c", (), (Capture((1, 2, 3), EVERYWHERE),))) == Shortage(
        "capture rows", 12, 2, False
    )
    assert admit(Plan("c", (), (Capture((3,), ((2, 4),)),))) is None


def test_a_plan_that_can_never_fit_is_told_so_whatever_else_is_short() -> None:
    ledger = CapacityLedger(bank_rows=1, slots=1, capture_rows=3)
    ledger.admit(Plan("a", (addition(0),)), prompt_len=8, max_step_tokens=4)
    plan = Plan("b", (addition(0, scale=2.0),), (Capture((0,), EVERYWHERE),))
    shortage = ledger.admit(plan, prompt_len=8, max_step_tokens=4)
    assert shortage == Shortage("capture rows", 4, 3, False)


def test_a_plan_that_does_not_fit_reserves_nothing() -> None:
    ledger = CapacityLedger(bank_rows=5, slots=5, capture_rows=3)
    plan = Plan("a", (addition(0, 1),), (Capture((0,), EVERYWHERE),))
    assert ledger.admit(plan, prompt_len=8, max_step_tokens=4) is not None
    assert (ledger.bank_rows_used, ledger.slots_used, ledger.requests) == (0, 0, 0)


def test_an_id_that_is_held_is_not_admitted_again() -> None:
    ledger = CapacityLedger(bank_rows=5, slots=5, capture_rows=5)
    ledger.admit(Plan("a"), prompt_len=1, max_step_tokens=1)
    with pytest.raises(ValueError, match=r"^request 'a' is already admitted$"):
        ledger.admit(Plan("a"), prompt_len=1, max_step_tokens=1)
