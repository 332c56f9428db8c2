"""What the workers send arrives, in order, as events of requests."""

import numpy as np
import pytest

from rheostat_engine import (
    Gained,
    Installed,
    Released,
    SignalRows,
)
from rheostat_engine.channel.events import (
    GainsHead,
    RowBlocks,
    RowsHead,
    decode_head,
    encode_head,
    split_rows,
)
from rheostat_engine.channel.worker_channel import EventMerger

from ..frames import (
    DOSE,
    ROWS_OF_2,
    ROWS_OF_7,
    feed,
    installed,
    int64,
    payload,
    plain,
    released,
    rows,
    signals,
)


def test_heads_survive_the_wire() -> None:
    for head in (installed(error="why"), rows(), released(captured={4: 2})):
        assert decode_head(encode_head(head)) == head


def test_a_frame_of_rows_is_split_into_blocks() -> None:
    head = RowsHead(
        rank=0,
        dtype="bfloat16",
        width=2,
        site_sets=[[0, 4], [3]],
        number=int64(7, 8),
        which=int64(0, 1),
        start=int64(10, 0),
        count=int64(2, 1),
    )
    data = np.arange(10, dtype="<u2")
    events = split_rows(RowBlocks(head), data.tobytes(), {7: "a", 8: "b"})
    assert [plain(event) for event in events] == [
        ("a", (0, 4), [10, 11], [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        ("b", (3,), [0], [[[8, 9]]]),
    ]
    assert {event.data.dtype for event in events} == {np.dtype("u2")}
    assert {event.positions.dtype for event in events} == {np.dtype("i4")}
    assert {event.data.base is None for event in events} == {True}


def test_a_large_block_is_split_into_sites_that_keep_no_other_in_memory() -> None:
    count = 1 << 13  # 64 KiB of each site
    head = RowsHead(0, "float32", 2, [[0, 4]], int64(7), int64(0), int64(0), int64(count))
    data = np.arange(4 * count, dtype="<f4").reshape(2, 1, count, 2)
    events = split_rows(RowBlocks(head), data.tobytes(), {7: "a"})
    assert [event.sites for event in events] == [(0,), (4,)]
    for event, site in zip(events, data, strict=True):
        assert np.array_equal(event.data, site)
        assert event.positions.tolist() == [*range(count)]
        assert event.data.base is None


@pytest.mark.parametrize("count", [1, 3])
def test_a_frame_whose_labels_do_not_fit_its_rows_is_refused(count: int) -> None:
    merger = EventMerger(1)
    merger.feed(installed())
    head = rows(count=count)
    with pytest.raises(ValueError, match=f"^a frame of 16 bytes labels {8 * count}$"):
        merger.feed(head, payload(2))


VALUES = np.arange(6, dtype="<f4").reshape(2, 3)


def test_a_frame_of_signals_is_one_event() -> None:
    merger = EventMerger(1)
    merger.feed(installed())
    head = decode_head(encode_head(signals()))
    (event,) = merger.feed(head, VALUES.tobytes())
    assert isinstance(event, SignalRows)
    assert (event.request_ids, event.starts, event.counts) == (("r",), (5,), (2,))
    assert event.readings == 2
    assert event.values is not None
    assert event.values.tolist() == VALUES.tolist()


def test_signals_do_not_keep_the_staging_memory() -> None:
    merger = EventMerger(1)
    merger.feed(installed())
    staged = np.frombuffer(VALUES.tobytes(), np.uint8).copy()
    (event,) = merger.feed(signals(), staged)
    staged[:] = 0
    assert isinstance(event, SignalRows)
    assert event.values is not None
    assert event.values.tolist() == VALUES.tolist()


def test_lost_signals_are_reported_with_their_positions() -> None:
    merger = EventMerger(1)
    merger.feed(installed())
    for events in (merger.feed(signals().as_lost), merger.skip(signals())):
        (event,) = events
        assert isinstance(event, SignalRows)
        assert event.values is None
        assert (event.request_ids, event.starts, event.counts) == (("r",), (5,), (2,))


def test_signals_that_fit_nothing_are_refused() -> None:
    merger = EventMerger(1)
    merger.feed(installed())
    with pytest.raises(ValueError, match="labels"):
        merger.feed(signals(), VALUES[:1].tobytes())
    with pytest.raises(KeyError):
        merger.feed(signals(numbers=int64(9)), VALUES.tobytes())
    with pytest.raises(ValueError, match="different lengths"):
        merger.feed(signals(numbers=int64(1, 1)), VALUES.tobytes())
    with pytest.raises(ValueError, match="different lengths"):
        merger.feed(signals(numbers=int64(1)[:4]), VALUES.tobytes())
    assert merger.skip(signals(numbers=int64(9))) == []


def test_one_worker_is_taken_at_its_word() -> None:
    merger = EventMerger(1)
    assert feed(merger, installed(error="why"), rows(), released(captured={2: 2}, lost=1)) == [
        (Installed("r", "why"),),
        ROWS_OF_2,
        (Released("r", (DOSE,), True, {2: 2}, 1, 0, (2, 9)),),
    ]


def test_several_workers_have_all_to_speak_before_a_request_is_installed_or_released() -> None:
    merger = EventMerger(3)
    assert feed(merger, installed(rank=2), installed(rank=0)) == []
    assert feed(merger, installed(rank=1)) == [(Installed("r", ""),)]
    first, second = DOSE._replace(act=1, site=4), DOSE._replace(site=6)
    assert (
        feed(merger, released(rank=0, captured={0: 4}, lost=1, preemptions=1, doses=[DOSE, first]))
        == []
    )
    assert feed(merger, rows(rank=1)) == [ROWS_OF_2]
    assert (
        feed(merger, released(rank=1, captured={2: 2}, lost=2, preemptions=1, doses=[second])) == []
    )
    assert feed(merger, released(rank=2, preemptions=1, doses=[])) == [
        (Released("r", (DOSE, second, first), True, {0: 4, 2: 2}, 3, 1, (2, 9)),)
    ]


def test_what_one_worker_did_not_measure_was_not_measured() -> None:
    merger = EventMerger(2)
    feed(merger, installed(rank=0), installed(rank=1))
    assert feed(merger, released(rank=0), released(rank=1, doses=[], measured=False)) == [
        (Released("r", (DOSE,), False, {}, 0, 0, (2, 9)),)
    ]


def test_a_change_of_gains_is_reported_once_all_workers_have_made_it() -> None:
    changes = [Gained("a", 1, 5), Gained("b", 7, 9)]
    both = [(Gained("a", 1, 5),), (Gained("b", 7, 9),)]
    assert feed(EventMerger(1), GainsHead(0, changes)) == both
    merger = EventMerger(2)
    assert feed(merger, GainsHead(0, changes[:1]), GainsHead(0, [Gained("a", 2, 6)])) == []
    assert feed(merger, GainsHead(1, changes)) == [(Gained("a", 1, 5),)]
    assert feed(merger, GainsHead(1, [Gained("a", 2, 6)])) == [(Gained("a", 2, 6),)]
    assert feed(merger, GainsHead(0, changes[1:])) == [(Gained("b", 7, 9),)]


def test_an_error_of_one_worker_wins() -> None:
    merger = EventMerger(2)
    assert feed(merger, installed(rank=0, error="full"), installed(rank=1)) == [
        (Installed("r", "full"),)
    ]


def test_rows_of_a_fast_worker_wait_until_the_slow_one_has_installed_the_plan() -> None:
    merger = EventMerger(2)
    assert feed(merger, installed(rank=0), rows(2), rows(7)) == []
    assert feed(merger, installed(rank=1)) == [(Installed("r", ""),), ROWS_OF_2, ROWS_OF_7]
    assert feed(merger, rows(7)) == [ROWS_OF_7]


def test_each_worker_has_numbers_of_its_own_and_gives_them_out_again() -> None:
    merger = EventMerger(2)
    feed(merger, installed("a", rank=0, number=1), installed("a", rank=1, number=2))
    feed(merger, installed("b", rank=0, number=2), installed("b", rank=1, number=1))
    found = feed(merger, rows(rank=0, number=1), rows(rank=1, number=1))
    assert [event[0] for event in found] == ["a", "b"]
    feed(merger, released("a", rank=0, number=1), released("a", rank=1, number=2))
    feed(merger, installed("c", rank=0, number=1), installed("c", rank=1, number=2))
    assert [event[0] for event in feed(merger, rows(rank=1, number=2))] == ["c"]
