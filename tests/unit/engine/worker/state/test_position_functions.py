"""Functions of the position answer like one dictionary per request, and cost what they bring."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine.worker.state.position_functions import Functions, Requests, Segment

Value = tuple[int, int, int]
Intervals = list[tuple[int, Value]]

VALUES = st.tuples(st.integers(0, 9), st.integers(-9, 0), st.integers(0, 2**31 - 1))
FUNCTIONS = st.dictionaries(st.integers(1, 12), VALUES, max_size=4).flatmap(
    lambda rest: VALUES.map(lambda first: sorted({0: first, **rest}.items()))
)
NUMBERS = st.integers(1, 5)
PARTS = st.lists(
    st.tuples(st.integers(0, 12), st.none() | st.integers(0, 3), st.integers(0, 99)), max_size=3
)
WINDOWS = st.tuples(*(st.integers(0, last) for last in (3, 3, 12)), st.integers(1, 5))
"""The functions within and outside, the start and the length."""
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("function"), st.integers(0, 3), FUNCTIONS),
        st.tuples(st.just("request"), NUMBERS, PARTS),
        st.tuples(st.just("window"), NUMBERS, WINDOWS),
        st.tuples(st.just("gone"), NUMBERS, st.none()),
    ),
    max_size=10,
)
TOKENS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 14)), max_size=20)
NOTHING: Intervals = [(0, (0, 0, 0))]


def value_at(intervals: Intervals, position: int) -> Value:
    return [value for start, value in intervals if start <= position][-1]


def add(functions: Functions, intervals: Intervals, columns: int) -> int:
    starts, values = zip(*intervals, strict=True)
    return functions.add(np.array(starts), [value[:columns] for value in values])


@pytest.mark.parametrize("columns", [1, 3])
@given(st.lists(st.tuples(CHANGES, TOKENS), max_size=4))
def test_lookups_equal_those_of_dictionaries_whatever_came_and_went(columns: int, rounds) -> None:
    functions = Functions(columns)
    requests = Requests(functions, bases=1)
    numbers: dict[int, int] = {}
    shared: dict[int, Intervals] = {}
    naive: dict[int, list[tuple[int, Intervals, int]]] = {}
    for changes, tokens in rounds:
        for kind, which, what in changes:
            if kind == "function":
                # Others may use the old one still: it is only forgotten at the end.
                numbers[which] = add(functions, what, columns)
                shared[which] = what
            elif kind == "gone":
                requests.drop(which)
                naive.pop(which, None)
            elif kind == "window":
                inside, outside, start, length = what
                requests.drop(which)
                names = (numbers.get(one, 0) for one in (inside, outside))
                requests.put_window(which, *names, start, start + length)
                places = {0: outside, start: inside, start + length: outside}
                naive[which] = [(at, shared.get(one, NOTHING), 0) for at, one in places.items()]
            else:
                parts = sorted({first: rest for first, *rest in [(0, None, 0), *what]}.items())
                requests.put(
                    which,
                    [Segment(first, numbers.get(f, 0), (base,)) for first, (f, base) in parts],
                )
                naive[which] = [(first, shared.get(f, NOTHING), base) for first, (f, base) in parts]
        assert len(requests) == len(naive)
        expected, bases = [], []
        for number, position in tokens:
            held = naive.get(number, [(0, NOTHING, 0)])
            _, intervals, base = [part for part in held if part[0] <= position][-1]
            expected.append(value_at(intervals, position)[:columns])
            bases.append([base])
        whose = np.array([n for n, _ in tokens], np.int64)
        positions = np.array([p for _, p in tokens], np.int64)
        found, based = requests.lookup(whose, positions)
        assert found.shape == (len(tokens), columns)
        assert [tuple(row) for row in found.tolist()] == expected
        assert based.tolist() == bases
        for step in range(1, 1 + min(30, requests.steps_alike(whose, positions))):
            then, based_then = requests.lookup(whose, positions + step)
            assert (then.tolist(), based_then.tolist()) == (found.tolist(), based.tolist())


@given(st.lists(st.one_of(FUNCTIONS, st.integers(0, 9)), max_size=60), st.integers(0, 14))
def test_functions_keep_their_values_while_others_come_and_go(
    steps: list[Intervals | int], position: int
) -> None:
    functions = Functions(3)
    held: dict[int, Intervals] = {}
    for step in steps:
        if isinstance(step, int):
            if step < len(held):
                gone = list(held)[step]
                del held[gone]
                functions.drop(gone)
        else:
            held[add(functions, step, 3)] = step
        assert len(functions) == len(held)
        names = np.array([0, *held], np.int64)
        found = functions.lookup(names, np.full(len(names), position))
        expected = [(0, 0, 0), *(value_at(intervals, position) for intervals in held.values())]
        assert [tuple(row) for row in found.tolist()] == expected


def test_a_position_far_away_stays_with_its_function() -> None:
    functions = Functions()
    one, other = (functions.add(np.array([0]), [value]) for value in (3, 5))
    far = np.full(2, 2**31 - 2, np.int64)
    assert functions.lookup(np.array([one, other]), far).tolist() == [[3], [5]]


def test_steps_are_alike_until_a_function_changes_or_a_window_begins_or_ends() -> None:
    functions = Functions()
    requests = Requests(functions)
    function = functions.add(np.array([0, 5, 9]), [0, 1, 0])
    other = functions.add(np.array([0]), [1])

    def alike(number: int, position: int) -> int:
        return requests.steps_alike(np.array([number, 0]), np.array([position, 3]))

    requests.put(1, [Segment(0, function)])
    requests.put_window(2, other, function, 20, 30)
    requests.put(3, [Segment(0, function), Segment(7, other)])
    assert [alike(1, position) for position in (0, 4, 5, 8)] == [4, 0, 3, 0]
    assert alike(1, 9) > 2**31
    assert [alike(2, position) for position in (5, 9, 19, 20, 29)] == [3, 10, 0, 9, 0]
    assert alike(2, 30) > 2**31
    assert alike(3, 6) == 0
    assert alike(3, 7) > 2**31
    changes = requests.changes
    requests.drop(1)
    requests.put(3, [Segment(0, other)])
    assert requests.changes == changes + 2


def test_a_request_that_comes_or_goes_costs_nothing_that_others_brought() -> None:
    functions = Functions()
    requests = Requests(functions)
    large = functions.add(np.arange(0, 100_000, 2), np.arange(50_000) % 2)
    for number in range(1, 65):
        requests.put(number, [Segment(0, large)])
    before = functions.written
    for number in range(100, 400):
        small = functions.add(np.array([0, 5]), [0, 7])
        requests.put(number, [Segment(0, small)])
        assert requests.lookup(np.array([number, 9]), np.array([6, 2]))[0].tolist() == [[7], [1]]
        requests.drop(number)
        functions.drop(small)
    assert functions.written - before == 2 * 300


def test_what_ended_is_swept_out_at_the_cost_of_what_came() -> None:
    functions = Functions()
    brought = 0
    held: list[int] = []
    for number in range(3000):
        held.append(functions.add(np.arange(40), np.full(40, number)))
        brought += 40
        if len(held) > 30:
            functions.drop(held.pop(number % 30))
        assert functions.written <= 4 * brought + 2048
    found = functions.lookup(np.array(held), np.full(len(held), 39))
    assert len(set(found[:, 0].tolist())) == len(held)
