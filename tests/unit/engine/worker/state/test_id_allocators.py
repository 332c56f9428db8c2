"""Numbers and runs are handed out once, shared by content, and handed out again."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine.worker.state.device_table import Table
from rheostat_engine.worker.state.id_allocators import (
    Exhausted,
    RangeAllocator,
    RefCountedIds,
    Taken,
)


@given(
    st.integers(0, 4), st.lists(st.tuples(st.booleans(), st.sampled_from("abcdef")), max_size=30)
)
def test_content_has_one_number_while_it_is_used_and_no_other_content_has_it(
    count: int, steps: list[tuple[bool, str]]
) -> None:
    shared: RefCountedIds[str] = RefCountedIds(count, "letter")
    users: dict[str, list[int]] = {}
    for takes, content in steps:
        held = users.get(content, [])
        if takes and not held and len(users) == count:
            with pytest.raises(Exhausted, match="every letter is in use"):
                shared.take(content)
        elif takes:
            taken = shared.take(content)
            assert taken.fresh == (not held)
            assert set(held) <= {taken.number}
            assert 1 <= taken.number <= count
            users.setdefault(content, []).append(taken.number)
        elif held:
            number = held.pop()
            assert shared.give(content) == (0 if held else number)
            if not held:
                del users[content]
        numbers = [numbers[0] for numbers in users.values()]
        assert len(set(numbers)) == len(numbers) == len(shared)
        assert all((one in shared) == (one in users) for one in "abcdef")


def test_a_number_that_is_free_again_is_fresh_again() -> None:
    shared: RefCountedIds[str] = RefCountedIds(1, "letter")
    assert shared.take("a") == Taken(1, fresh=True)
    assert shared.take("a") == Taken(1, fresh=False)
    assert [shared.give("a"), shared.give("a")] == [0, 1]
    assert shared.take("b") == Taken(1, fresh=True)
    with pytest.raises(KeyError):
        shared.give("a")


@given(st.integers(0, 3), st.integers(1, 12), st.lists(st.integers(-3, 6), max_size=30))
def test_runs_lie_apart_and_are_refused_only_where_no_gap_is_long_enough(
    start: int, size: int, steps: list[int]
) -> None:
    ranges = RangeAllocator(start, start + size)
    held: list[tuple[int, int]] = []
    for step in steps:
        if step <= 0:
            if held:
                ranges.give(*held.pop(step % len(held)))
            continue
        begin = ranges.take(step)
        used = {n for at, count in held for n in range(at, at + count)}
        gaps = [
            at
            for at in range(start, start + size - step + 1)
            if used.isdisjoint(range(at, at + step))
        ]
        assert begin == (gaps[0] if gaps else None)
        if begin is not None:
            held.append((begin, step))
    for one in held:
        ranges.give(*one)
    assert ranges.take(size) == start


def test_a_table_is_written_when_it_is_flushed_and_only_where_something_waits() -> None:
    table = Table(torch.zeros(4, 3))
    table.put(2, np.array([1, 2, 3]))
    table.put(1, np.array([4.0, 5.0, 6.0]))
    table.put(2, np.array([7, 8, 9]))
    assert not table.tensor.any()
    table.flush()
    expected = [[0.0] * 3, [4.0, 5.0, 6.0], [7.0, 8.0, 9.0], [0.0] * 3]
    assert table.tensor.tolist() == expected
    table.tensor.zero_()
    table.flush()
    assert not table.tensor.any()


def test_a_table_can_be_written_column_by_column_and_keeps_its_memory() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.int32)
    table = Table(tensor, dim=1)
    table.put(2, np.array([1, 2], np.int64))
    table.put(0, np.array([3, 4], np.int64))
    table.flush()
    assert table.tensor is tensor
    assert tensor.tolist() == [[3, 0, 1], [4, 0, 2]]


@pytest.mark.parametrize("dim", [0, 1])
@given(st.lists(st.lists(st.integers(0, 4), max_size=5, unique=True), max_size=6))
def test_of_several_contents_for_a_row_the_last_one_stays(dim: int, puts: list[list[int]]) -> None:
    table = Table(torch.zeros(5, 5, dtype=torch.bfloat16), dim=dim)
    expected = torch.zeros(5, 5)
    for count, numbers in enumerate(puts, 1):
        contents = np.full((len(numbers), 5), float(count))
        table.put_all(numbers, contents if dim == 0 else contents.T)
        expected[numbers] = float(count)
    table.flush()
    assert table.tensor.tolist() == (expected if dim == 0 else expected.T).tolist()


def test_much_does_not_wait() -> None:
    table = Table(torch.zeros(3, 200_000))
    for number in range(2):
        table.put(number, np.ones(200_000, np.float32))
    assert table.tensor.any(dim=1).tolist() == [True, True, False]
