"""The tokens of a step, and whether it repeats the last one."""

import numpy as np
import pytest

from rheostat_engine.worker.step_tokens import TokensOfSteps


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_the_tokens_of_each_request_lie_together() -> None:
    numbers, positions, repeated = TokensOfSteps().find(ints(4, 0, 2), ints(5, 0, 9), ints(1, 3, 2))
    assert numbers.tolist() == [4, 0, 0, 0, 2, 2]
    assert positions.tolist() == [5, 0, 1, 2, 9, 10]
    assert not repeated


def test_a_step_that_computes_the_next_token_of_each_request_repeats_the_last_one() -> None:
    tokens, numbers, ones = TokensOfSteps(), ints(4, 0, 2), ints(1, 1, 1)
    assert not tokens.find(numbers, ints(5, 0, 9), ones).repeated
    for step in (1, 2, 3):
        found = tokens.find(numbers, ints(5, 0, 9) + step, ones)
        assert found.repeated
        assert found.positions.tolist() == [5 + step, step, 9 + step]


@pytest.mark.parametrize("first", [ints(1, 1), ints(1, 2)])
@pytest.mark.parametrize(
    ("same", "computed", "scheduled"),
    [
        (False, ints(6, 10), ints(1, 1)),  # other requests
        (True, ints(6, 9), ints(1, 1)),  # a position again
        (True, ints(6, 11), ints(1, 1)),
        (True, ints(6, 10), ints(1, 2)),
    ],
)
def test_no_other_step_repeats_the_last_one(
    first: np.ndarray, same: bool, computed: np.ndarray, scheduled: np.ndarray
) -> None:
    tokens, numbers = TokensOfSteps(), ints(4, 2)
    tokens.find(numbers, ints(5, 9), first)
    assert not tokens.find(numbers if same else numbers.copy(), computed, scheduled).repeated


def test_a_step_after_a_prompt_repeats_nothing() -> None:
    tokens, numbers = TokensOfSteps(), ints(4, 2)
    tokens.find(numbers, ints(0, 9), ints(5, 1))
    assert not tokens.find(numbers, ints(5, 10), ints(1, 1)).repeated
    assert tokens.find(numbers, ints(6, 11), ints(1, 1)).repeated
