"""How far requests came and what they lost, by request number."""

import numpy as np

from rheostat_engine.channel.events import Released
from rheostat_engine.worker.capture.request_progress import Ended, RequestProgress
from rheostat_engine.worker.capture.ring import RowBlocks

SITE_SET_RANKS = np.array([[-1, -1, -1, -1, -1], [0, -1, 1, -1, -1]], np.int32)


def started(*numbers: int) -> RequestProgress:
    progress = RequestProgress(np.array([0, 1, 2, 3, 70]))
    progress.make_room(max(numbers) + 1)
    for number in numbers:
        progress.start(number, 0)
    return progress


def released(
    progress: RequestProgress, number: int, selected: np.ndarray | None, *, measured: bool
) -> Released:
    (report,) = progress.released([Ended(number, "r", selected, measured)])
    return report


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_a_request_is_counted_from_its_first_to_its_furthest_position() -> None:
    progress = started(1, 2)
    progress.advance(ints(2, 0, 1), ints(2, 0, 0), ints(6, 9, 1))
    progress.advance(ints(2), ints(6), ints(10))
    progress.preemptions[2] += 1
    progress.advance(ints(2), ints(3), ints(7))
    assert progress.span(2) == (2, 10)
    selected = ints(2, 0, 4, 0, 8)
    assert released(progress, 2, selected, measured=True) == Released(
        request_id="r",
        doses=(),
        measured=True,
        captured={0: 2, 2: 4, 70: 8},
        lost_rows=0,
        preemptions=1,
        computed=(2, 10),
        recomputed=4,
    )


def test_a_request_that_was_never_computed_got_nothing() -> None:
    assert started(1).span(1) == (0, 0)
    assert released(started(1), 1, None, measured=False) == Released(
        request_id="r",
        doses=(),
        measured=False,
        captured={},
        lost_rows=0,
        preemptions=0,
        computed=(0, 0),
        recomputed=0,
    )


def test_cached_tokens_that_were_computed_for_a_capture_count_as_computed_again() -> None:
    progress = started(1, 2)
    for number, cached_tokens_recomputed in ((1, 5), (2, 5)):
        progress.start(number, cached_tokens_recomputed)
    progress.advance(ints(1, 2), ints(4, 4), ints(20, 7))
    progress.advance(ints(1), ints(4), ints(6))
    found = [released(progress, n, None, measured=True).recomputed for n in (1, 2)]
    assert found == [5 + 2, 3]
    progress.start(1, 0)
    progress.advance(ints(1), ints(4), ints(20))
    assert released(progress, 1, None, measured=True).recomputed == 0


def lose(progress: RequestProgress, number: int, count: int) -> None:
    """One block of class 1 finds no place, one does."""
    blocks = RowBlocks(
        token_block=np.zeros(0, np.int32),
        token_order=np.zeros(0, np.int32),
        request=ints(number, number),
        site_set=np.array([1, 1], np.int32),
        start=ints(0, 9),
        count=ints(count, 7),
    )
    progress.count_lost(blocks, np.array([True, False]), SITE_SET_RANKS)


def test_lost_rows_are_not_counted_as_captured_and_are_forgotten_with_the_request() -> None:
    progress = started(1)
    progress.advance(ints(1), ints(0), ints(4))
    lose(progress, 1, 3)
    lose(progress, 1, 1)
    selected = ints(4, 0, 4, 0, 4)
    first = released(progress, 1, selected, measured=False)
    assert (first.captured, first.lost_rows) == ({70: 4}, 8)
    progress.start(1, 0)
    second = released(progress, 1, selected, measured=False)
    assert (second.captured, second.lost_rows) == ({0: 4, 2: 4, 70: 4}, 0)


def test_rows_of_each_request_are_lost_by_themselves() -> None:
    progress = started(1, 2)
    blocks = RowBlocks(
        token_block=np.zeros(0, np.int32),
        token_order=np.zeros(0, np.int32),
        request=ints(2, 1, 2, 1),
        site_set=np.array([1, 1, 1, 0], np.int32),
        start=ints(0, 0, 9, 4),
        count=ints(5, 2, 3, 7),
    )
    progress.count_lost(blocks, np.array([True, True, True, True]), SITE_SET_RANKS)
    lost = [released(progress, n, None, measured=True).lost_rows for n in (1, 2)]
    assert lost == [2 * 2, 2 * (5 + 3)]


def test_growing_keeps_what_was_counted() -> None:
    progress = started(1)
    progress.advance(ints(1), ints(2), ints(4))
    progress.make_room(40)
    progress.start(39, 0)
    progress.advance(ints(39), ints(1), ints(2))
    assert released(progress, 1, None, measured=False).computed == (2, 4)
    assert released(progress, 39, None, measured=False).computed == (1, 2)
