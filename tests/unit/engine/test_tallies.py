"""How far requests came and what they lost, by request number."""

import numpy as np

from rheostat_engine import OPEN_END, Act, Capture, Kind, Plan
from rheostat_engine.core.ring import Blocks
from rheostat_engine.core.tallies import Tallies
from rheostat_engine.events import ReleasedHead

EVERYWHERE = ((0, OPEN_END),)
PLAN = Plan(
    "r",
    (Act(Kind.ADD, (b"d",), ((2, (0,)),), ((1, 3), (8, OPEN_END))),),
    (Capture((0, 2), ((0, 4),)), Capture((2,), ((3, 6),)), Capture((4,), EVERYWHERE)),
)
CLASS_SITES = np.array([[-1, -1, -1, -1, -1], [0, -1, 1, -1, -1]], np.int32)


def started(*numbers: int, sites: frozenset[int] = frozenset(range(5))) -> Tallies:
    tallies = Tallies(sites)
    tallies.make_room(max(numbers) + 1)
    for number in numbers:
        tallies.start(number, 0)
    return tallies


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_a_request_is_counted_from_its_first_to_its_furthest_position() -> None:
    tallies = started(1, 2)
    tallies.advance(ints(2, 0, 1), ints(2, 0, 0), ints(6, 9, 1))
    tallies.advance(ints(2), ints(6), ints(10))
    tallies.preemptions[2] += 1
    tallies.advance(ints(2), ints(3), ints(7))
    assert tallies.released(2, PLAN, rank=3, measured=True) == ReleasedHead(
        rank=3,
        number=2,
        request_id="r",
        doses=[],
        measured=True,
        captured={0: 2, 2: 4, 4: 8},
        lost_rows=0,
        preemptions=1,
        computed=(2, 10),
        recomputed=4,
    )


def test_a_request_that_was_never_computed_got_nothing() -> None:
    assert started(1).released(1, PLAN, rank=0, measured=False) == ReleasedHead(
        rank=0,
        number=1,
        request_id="r",
        doses=[],
        measured=False,
        captured={},
        lost_rows=0,
        preemptions=0,
        computed=(0, 0),
        recomputed=0,
    )


def test_cached_tokens_that_were_computed_for_a_capture_count_as_computed_again() -> None:
    tallies = started(1, 2)
    for number, forgone in ((1, 5), (2, 5)):
        tallies.start(number, forgone)
    tallies.advance(ints(1, 2), ints(4, 4), ints(20, 7))
    tallies.advance(ints(1), ints(4), ints(6))
    found = [tallies.released(n, PLAN, rank=0, measured=True).recomputed for n in (1, 2)]
    assert found == [5 + 2, 3]
    tallies.start(1, 0)
    tallies.advance(ints(1), ints(4), ints(20))
    assert tallies.released(1, PLAN, rank=0, measured=True).recomputed == 0


def lose(tallies: Tallies, number: int, count: int) -> None:
    """One block of class 1 finds no place, one does."""
    blocks = Blocks(
        token_block=np.zeros(0, np.int32),
        token_order=np.zeros(0, np.int32),
        request=ints(number, number),
        sites_class=np.array([1, 1], np.int32),
        start=ints(0, 9),
        count=ints(count, 7),
    )
    tallies.lose(blocks, np.array([True, False]), CLASS_SITES)


def test_lost_rows_are_not_counted_as_captured_and_are_forgotten_with_the_request() -> None:
    tallies = started(1)
    tallies.advance(ints(1), ints(0), ints(4))
    lose(tallies, 1, 3)
    lose(tallies, 1, 1)
    first = tallies.released(1, PLAN, rank=0, measured=False)
    assert (first.captured, first.lost_rows) == ({4: 4}, 8)
    tallies.start(1, 0)
    tallies.advance(ints(1), ints(0), ints(1))
    second = tallies.released(1, PLAN, rank=0, measured=False)
    assert (second.captured, second.lost_rows) == ({0: 1, 2: 1, 4: 1}, 0)


def test_sites_of_other_workers_are_not_counted() -> None:
    tallies = started(1, sites=frozenset({2, 3}))
    tallies.advance(ints(1), ints(0), ints(4))
    assert tallies.released(1, PLAN, rank=0, measured=False).captured == {2: 4}


def test_growing_keeps_what_was_counted() -> None:
    tallies = started(1)
    tallies.advance(ints(1), ints(2), ints(4))
    tallies.make_room(40)
    tallies.start(39, 0)
    tallies.advance(ints(39), ints(1), ints(2))
    assert tallies.released(1, PLAN, rank=0, measured=False).computed == (2, 4)
    assert tallies.released(39, PLAN, rank=0, measured=False).computed == (1, 2)
