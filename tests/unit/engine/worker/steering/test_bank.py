"""Equal sums share a row, equal combinations a slot, and what nobody uses is used again."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import Kind, Normalise, Readout
from rheostat_engine.plan.composition import Combination, Program, RowKey, Step
from rheostat_engine.worker.state.id_allocators import BankError
from rheostat_engine.worker.steering.bank import Bank

from ...tables import CPU, capacity, used

A, B, ZERO = b"a", b"b", b"0"
RNG = np.random.default_rng(0)
VECTORS = {
    A: RNG.normal(size=(2, 8)).astype(np.float32),
    B: RNG.normal(size=(2, 8)).astype(np.float32),
    ZERO: np.zeros((1, 8), np.float32),
    b"huge": np.full((1, 8), 3e38, np.float32),
    b"narrow": np.ones((1, 4), np.float32),
    b"nan": np.full((1, 8), np.nan, np.float32),
}
NOTHING = (0, 0, 0, 0)


def make(rows: int = 9, slots: int = 9, dtype: torch.dtype = torch.float32) -> Bank:
    """A bank of three sites."""
    room = capacity(bank_rows=rows, slots=slots)
    return Bank(sites=3, capacity=room, width=8, dtype=dtype, device=CPU)


def at(site: int, *addends: tuple[bytes, int, float]) -> tuple[int, Program]:
    """A sum that is added at a site."""
    return site, (Step(Kind.ADD, addends=tuple(sorted(addends))),)


def content(bank: Bank, slot: int) -> torch.Tensor:
    """[sites, W]: what a slot adds."""
    bank.flush()
    return bank.programs.rows[bank.code_of[:, slot].long()]


PULL = Step(Kind.PULL, direction=((A, 0),), strength=1.0)
ONE: Combination = (at(1, (A, 0, 1.0)),)
TWO: Combination = (at(0, (A, 0, 1.0)), at(2, (A, 1, 2.0), (B, 0, -0.5)))
CHAIN: Combination = ((0, (PULL, *at(0, (A, 0, 1.0))[1])), at(2, (A, 1, 1.0)))


def test_a_slot_adds_its_combinations_sums() -> None:
    bank = make()
    one, two = bank.acquire([ONE, TWO], VECTORS)
    expected = np.zeros((2, 3, 8), np.float32)
    expected[0, 1] = VECTORS[A][0]
    expected[1, 0] = VECTORS[A][0]
    expected[1, 2] = np.float32(2.0) * VECTORS[A][1] + np.float32(-0.5) * VECTORS[B][0]
    np.testing.assert_array_equal(content(bank, one), expected[0])
    np.testing.assert_array_equal(content(bank, two), expected[1])
    assert bank.slot_sites[[one, two]].tolist() == [[False, True, False], [True, False, True]]
    assert bank.sites_of(np.array([0, one], np.int32)).tolist() == [False, True, False]
    assert bank.sites_of(np.array([two, one], np.int32)).tolist() == [True, True, True]
    assert bank.sites_of(np.array([0], np.int32)).tolist() == [False, False, False]


def test_a_slot_with_a_chain_says_where_the_chain_begins() -> None:
    bank = make()
    (slot,) = bank.acquire([CHAIN], VECTORS)
    bank.flush()
    codes = bank.code_of[:, slot].tolist()
    assert (codes[0] < 0, codes[1], codes[2] > 0) == (True, 0, True)
    assert bank.slot_sites[slot].tolist() == [True, False, True]
    assert used(bank) == (2, 1, 2, 1)


def test_equal_content_has_one_row_and_one_slot() -> None:
    bank = make()
    slots = bank.acquire([ONE, TWO, ONE], VECTORS)
    slots += bank.acquire([TWO], VECTORS)
    assert (slots[0], slots[1]) == (slots[2], slots[3])
    assert used(bank) == (2, 0, 0, 2)
    for slot in slots[:3]:
        bank.release(slot)
    assert used(bank) == (2, 0, 0, 1)
    bank.release(slots[3])
    assert used(bank) == NOTHING


def test_an_empty_combination_is_slot_zero_and_a_sum_of_zeros_row_zero() -> None:
    bank = make()
    cancelled = (at(1, (A, 0, 1.0), (A, 0, -1.0)), at(2, (ZERO, 0, 3.0)))
    nothing, zeros = bank.acquire([(), cancelled], VECTORS)
    assert nothing == 0
    assert used(bank) == (0, 0, 0, 1)
    assert not content(bank, zeros).any()
    assert not bank.slot_sites[zeros].any()
    bank.release(nothing)
    bank.release(zeros)
    assert used(bank) == NOTHING


def test_rows_of_zeros_need_no_room() -> None:
    bank = make(rows=1)
    zeros = (at(0, (ZERO, 0, 3.0)), at(2, (A, 0, 1.0), (A, 0, -1.0)))
    (slot,) = bank.acquire([(zeros[0], *ONE, zeros[1])], VECTORS)
    assert content(bank, slot).any(dim=1).tolist() == [False, True, False]
    assert used(bank) == (1, 0, 0, 1)
    bank.release(slot)
    assert used(bank) == NOTHING


@pytest.mark.parametrize(("dtype", "held"), [(torch.float16, 0.0), (torch.bfloat16, 1e-8)], ids=str)
def test_what_the_streams_dtype_rounds_to_zero_is_a_row_of_zeros(
    dtype: torch.dtype, held: float
) -> None:
    bank = make(dtype=dtype)
    tiny = {b"tiny": np.full((1, 8), -1e-8, np.float32)}
    bank.acquire([(at(0, (b"tiny", 0, 1.0)),)], tiny)
    assert bank.programs.rows_used == bool(held)


def test_what_was_made_is_on_the_device_after_a_flush() -> None:
    bank = make()
    slots = bank.acquire([ONE, CHAIN], VECTORS)
    assert not bank.code_of.any()
    assert not bank.programs.ints.any()
    bank.flush()
    assert bank.code_of[:, slots].any(dim=0).all()
    assert bank.programs.ints.any()


UNIT = "vector {} has no direction of its own"


def pull(*direction: tuple[bytes, int], low: float = 0.0, strength: float = 1.0) -> Combination:
    """One step along a direction at site 0."""
    return ((0, (Step(Kind.PULL, (), direction, low, np.inf, strength),)),)


@pytest.mark.parametrize(
    ("combination", "message"),
    [
        ((at(0, (b"\xab", 0, 1.0)),), "vector ab is not in the worker"),
        ((at(0, (A, 2, 1.0)),), "vector 61 has no row 2 of width 8"),
        ((at(0, (A, -1, 1.0)),), "vector 61 has no row -1 of width 8"),
        ((at(0, (b"narrow", 0, 1.0)),), f"vector {b'narrow'.hex()} has no row 0 of width 8"),
        ((at(0, (b"nan", 0, 1.0)),), "the sum of the vectors is not finite in torch.float32"),
        ((at(0, (b"huge", 0, 2.0)),), "the sum of the vectors is not finite in torch.float32"),
        ((at(0, (A, 0, 1e300)),), "the sum of the vectors is not finite in torch.float32"),
        (pull((b"\xab", 0)), "vector ab is not in the worker"),
        (pull((A, 0), (A, 2)), "vector 61 has no row 2 of width 8"),
        (pull((ZERO, 0)), UNIT.format(ZERO.hex())),
        (pull((b"nan", 0)), UNIT.format(b"nan".hex())),
        (pull((A, 0), (A, 0)), UNIT.format(A.hex())),
        (pull((A, 0), low=1e39), "a bound or strength is not finite in float32"),
        (pull((A, 0), strength=-1e39), "a bound or strength is not finite in float32"),
    ],
)
def test_what_cannot_be_made_is_refused_and_nothing_is_taken(
    combination: Combination, message: str
) -> None:
    bank = make()
    with pytest.raises(BankError, match=f"^{message}$"):
        bank.acquire([ONE, TWO, CHAIN, combination], VECTORS)
    assert used(bank) == NOTHING
    ((_, program),) = combination
    with pytest.raises(BankError, match=f"^{message}$"):
        bank.acquire([((0, (*ONE[0][1], PULL, *program)),)], VECTORS)
    assert used(bank) == NOTHING
    bank.acquire([ONE, TWO], VECTORS)
    assert used(bank) == (2, 0, 0, 2)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float16, 7e4), (torch.bfloat16, 3.4e38)], ids=str
)
def test_a_sum_that_only_the_streams_dtype_cannot_hold_is_refused(
    dtype: torch.dtype, scale: float
) -> None:
    ones = {b"1": np.ones((1, 8), np.float32)}
    combination = (at(0, (b"1", 0, scale)),)
    make().acquire([combination], ones)
    with pytest.raises(BankError, match=f"^the sum of the vectors is not finite in {dtype}$"):
        make(dtype=dtype).acquire([combination], ones)


@pytest.mark.parametrize("rows", [True, False])
def test_a_full_bank_refuses_until_something_is_released(rows: bool) -> None:
    bank = make(rows=1) if rows else make(slots=1)
    (slot,) = bank.acquire([ONE], VECTORS)
    other = (at(1, (B, 0, 1.0)),)
    message = "every row of the bank is in use" if rows else "every slot is in use"
    with pytest.raises(BankError, match=f"^{message}$"):
        bank.acquire([other], VECTORS)
    bank.release(slot)
    (slot,) = bank.acquire([other], VECTORS)
    np.testing.assert_array_equal(content(bank, slot)[1], VECTORS[B][0])
    assert not content(bank, slot)[[0, 2]].any()


KEYS = st.lists(
    st.tuples(st.sampled_from([A, B]), st.integers(0, 1), st.sampled_from([1.0, 0.3, -2.0])),
    min_size=1,
    max_size=4,
).map(lambda key: tuple(sorted(key)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@given(key=KEYS)
def test_a_row_is_the_float32_sum_rounded_once(dtype: torch.dtype, key: RowKey) -> None:
    bank = make(dtype=dtype)
    (slot,) = bank.acquire([(at(1, *key),)], VECTORS)
    total = np.zeros(8, np.float32)
    for digest, row, scale in key:
        total = total + np.float32(scale) * VECTORS[digest][row]
    assert torch.equal(content(bank, slot)[1], torch.from_numpy(total).to(dtype))


STEPS = st.one_of(
    KEYS.map(lambda key: Step(Kind.ADD, addends=key)),
    st.sampled_from(
        [
            PULL,
            Step(Kind.PULL, (), ((A, 0), (B, 1)), -1.0, 1.0, 0.5),
            PULL._replace(readout=Readout(Normalise.NONE, bias=0.5), write=((B, 0),)),
            Step(Kind.NORM_ADD, direction=((B, 0),), strength=0.25),
            Step(Kind.REPLACE, ((A, 1, 1.0),), strength=1.0),
            Step(Kind.REPLACE, ((B, 0, 1.0),), strength=0.5, mask=((A, 1, 1.0),)),
            Step(Kind.ADD_LAST, ((A, 1, 1.0),), strength=0.5),
            Step(Kind.ADD_LAST, ((B, 0, 1.0),), strength=1.0, mask=((A, 0, 1.0),)),
        ]
    ),
)
COMBINATIONS = st.dictionaries(
    st.integers(0, 2), st.lists(STEPS, min_size=1, max_size=3).map(tuple), max_size=2
).map(lambda by_site: tuple(sorted(by_site.items())))


def said(bank: Bank, slot: int) -> list[object]:
    """All that a slot says, contents in place of numbers."""
    bank.flush()
    words: list[object] = []
    for code in bank.code_of[:, slot].tolist():
        programs, step = bank.programs, -code
        words.append(programs.rows[max(code, 0)].tolist())
        while step > 0:
            kind, number, following, last, mask, _, write = programs.ints[step].tolist()
            rows = kind in (Kind.ADD, Kind.REPLACE, Kind.ADD_LAST)
            content_of = (programs.rows if rows else programs.directions)[number].tolist()
            second = programs.rows[mask].tolist() if rows else mask
            written = programs.directions[write].tolist()
            floats = programs.floats[step].tolist()
            words.append((kind, last, floats, content_of, second, written))
            step = following
    return words


@given(st.lists(st.tuples(st.lists(COMBINATIONS, max_size=3), st.integers(0, 5)), max_size=8))
def test_every_slot_that_is_held_says_what_it_said_whatever_comes_and_goes(
    steps: list[tuple[list[Combination], int]],
) -> None:
    room = capacity(bank_rows=6, directions=2, steps=7, slots=4)
    bank = Bank(sites=3, capacity=room, width=8, dtype=torch.float32, device=CPU)
    alone = make(rows=40)
    held: list[tuple[int, list[object]]] = []
    for combinations, leaving in steps:
        try:
            slots = bank.acquire(combinations, VECTORS)
        except BankError:
            slots = []
        for slot, combination in zip(slots, combinations, strict=False):
            (reference,) = alone.acquire([combination], VECTORS)
            held.append((slot, said(alone, reference)))
            alone.release(reference)
        for _ in range(min(leaving, len(held))):
            bank.release(held.pop(0)[0])
        for slot, expected in held:
            assert said(bank, slot) == expected
    for slot, _ in held:
        bank.release(slot)
    assert used(bank) == NOTHING
    assert not bank.programs.rows[0].any()
    assert not bank.code_of[:, 0].any()
