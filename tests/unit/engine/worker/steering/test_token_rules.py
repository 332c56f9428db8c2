"""Rules say of every token id in which sets it is, and variants lie where they were put."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine.plan.acts import TokenSet
from rheostat_engine.worker.state.id_allocators import BankError
from rheostat_engine.worker.steering.token_rules import TokenRules

from ...strategies import SETS, VOCABULARY, packed_ids
from ...tables import CPU

RULES = st.lists(st.sampled_from(SETS), min_size=1, max_size=4, unique=True).map(tuple)


def make(rules: int = 3) -> TokenRules:
    return TokenRules(rules, 8, VOCABULARY, CPU)


def travel(sets: tuple[TokenSet, ...]) -> tuple[bytes, ...]:
    """Sets of token ids as they arrive."""
    return tuple(map(packed_ids, sets))


def variants(*many: list[int]) -> npt.NDArray[np.int32]:
    """As many variants of each combination as there can be."""
    return np.array([[*one, *[0] * (16 - len(one))] for one in many], np.int32)


@given(st.lists(st.tuples(st.booleans(), RULES), max_size=12))
def test_the_bits_of_a_rule_in_use_say_which_sets_hold_each_token(
    steps: list[tuple[bool, tuple[TokenSet, ...]]],
) -> None:
    rules = make()
    used: dict[tuple[TokenSet, ...], list[int]] = {}
    for acquires, sets in steps:
        if acquires and sets not in used and len(used) == 3:
            with pytest.raises(BankError, match=r"^every rule about token ids is in use$"):
                rules.acquire(travel(sets))
        elif acquires:
            used.setdefault(sets, []).append(rules.acquire(travel(sets)))
        elif sets in used:
            rules.release(travel(sets))
            used[sets].pop()
            if not used[sets]:
                del used[sets]
        assert len(rules) == len(used)
        for held, numbers in used.items():
            (number,) = set(numbers)
            assert number > 0
            assert rules.count(number) == 2 ** len(held)
            expected = [
                sum((token in tokens) << bit for bit, tokens in enumerate(held))
                for token in range(VOCABULARY)
            ]
            assert rules.bits[number].tolist() == expected
    assert not rules.bits[0].any()
    assert rules.count(0) == 1


@pytest.mark.parametrize("tokens", [(VOCABULARY,), (0, VOCABULARY), (-1, 2)])
def test_a_token_id_that_the_model_lacks_is_refused_and_takes_nothing(tokens: TokenSet) -> None:
    rules = make()
    sentence = f"^a token id is not below the vocabulary's size, {VOCABULARY}$"
    with pytest.raises(BankError, match=sentence):
        rules.acquire(travel(((1,), tokens)))
    assert len(rules) == 0


def test_variants_reach_the_device_when_they_are_flushed() -> None:
    rules = make()
    slots, dose_slots = variants([7, 8], [1, 2, 3, 4]), variants([70, 80], [10, 20, 30, 40])
    one, other = rules.add_variants(slots, dose_slots).tolist()
    assert not rules.variants.any()
    rules.flush()
    assert rules.variants[one : one + 2].tolist() == [[7, 70], [8, 80]]
    assert rules.variants[other : other + 4].tolist() == [[1, 10], [2, 20], [3, 30], [4, 40]]
    assert rules.slots[other : other + 4].tolist() == [1, 2, 3, 4]
    rules.remove_variants(np.array([one]))
    assert rules.add_variants(variants([5, 6]), variants([50, 60])).tolist() == [one]
    rules.flush()
    assert rules.variants[one : one + 2].tolist() == [[5, 50], [6, 60]]
    rules.variants.zero_()
    rules.flush()
    assert not rules.variants.any()


def test_where_no_place_is_left_for_variants_none_of_them_is_placed() -> None:
    rules = make()
    starts = rules.add_variants(*np.ones((2, 7, 16), np.int32))
    sentence = "^every interval that follows a rule about token ids is in use$"
    with pytest.raises(BankError, match=sentence):
        rules.add_variants(*np.ones((2, 2, 16), np.int32))
    assert rules.free_intervals == 1
    rules.remove_variants(starts[3:4])
    assert starts[3] in rules.add_variants(*np.ones((2, 2, 16), np.int32))


def test_what_is_placed_is_what_a_lookup_on_the_device_finds() -> None:
    rules = make()
    number = rules.acquire(travel(((0,), (1, 3))))
    (start,) = rules.add_variants(variants([10, 11, 12, 13]), variants([0])).tolist()
    rules.flush()
    slots = rules.variants[start + rules.bits[number].long(), 0]
    assert slots.tolist() == [11, 12, 10, 12, 10, 10]
    assert slots.dtype == torch.int32
