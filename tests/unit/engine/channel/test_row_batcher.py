"""Rows of decode steps wait for later rows of the same request, and leave in order."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import Attached, Event, Released, Rows
from rheostat_engine.channel.events import AttachedHead, RowBlocks, RowsHead
from rheostat_engine.channel.frame_copies import FrameCopies
from rheostat_engine.channel.row_batcher import REQUESTS_AT_ONCE, RowBatcher
from rheostat_engine.channel.worker_channel import EventMerger

from ..frames import installed, int64, released

MANY = REQUESTS_AT_ONCE + 4
WIDTH = 2
SITE_SETS = [[3], [3, 5]]
Block = tuple[int, int, int, int]
"""Number of the request, index of its sites, first position, positions."""


class Workers:
    """A merger, the time, and the rows that were sent and that came, by request and site."""

    def __init__(self, requests: int = MANY, ranks: int = 1) -> None:
        self.now = 0.0
        self.frames = FrameCopies()
        self.merger = EventMerger(ranks, batcher=RowBatcher(self.frames, lambda: self.now))
        self.sent: dict[tuple[str, int], list[tuple[int, float]]] = {}
        self.came: dict[tuple[str, int], list[tuple[int, float]]] = {}
        self._next_value = itertools.count(1)
        for number in range(requests):
            self.merger.feed(installed(f"r{number}", number=number))

    def step(self, blocks: Sequence[Block], *, copied: bool = True) -> list[Event]:
        """The events of a frame of rows."""
        payload = []
        for number, which, start, count in blocks:
            for site in SITE_SETS[which]:
                for position in range(start, start + count):
                    value = next(self._next_value)
                    payload += [value] * WIDTH
                    self.sent.setdefault((f"r{number}", site), []).append((position, value))
        columns = [int64(*column) for column in zip(*blocks, strict=True)]
        head = RowsHead(0, "float32", WIDTH, SITE_SETS, *columns)
        data = np.array(payload, "<f4").view(np.uint8)
        return self.take(self.merger.feed(head, data if copied else memoryview(data)))

    def take(self, events: Iterable[Event]) -> list[Event]:
        """Notes the rows of events."""
        events = [*events]
        for event in events:
            if isinstance(event, Rows):
                assert event.data.flags.c_contiguous
                assert (np.diff(event.positions) > 0).all()
                for site, rows in zip(event.sites, event.data, strict=True):
                    came = self.came.setdefault((event.request_id, site), [])
                    came += zip(event.positions.tolist(), rows[:, 0].tolist(), strict=True)
        return events

    def later(self, seconds: float) -> list[Event]:
        """The events that are due after some seconds."""
        self.now += seconds
        return self.take(self.merger.take_due()) if self.merger.due == 0 else []


def decode(position: int, requests: int = MANY, which: int = 0) -> list[Block]:
    return [(number, which, position, 1) for number in range(requests)]


def test_rows_of_few_requests_leave_at_once() -> None:
    workers = Workers()
    assert len(workers.step(decode(4, REQUESTS_AT_ONCE))) == REQUESTS_AT_ONCE
    assert workers.merger.due is None


@pytest.mark.parametrize("which", [0, 1])
def test_rows_of_many_requests_leave_together(which: int) -> None:
    workers = Workers()
    for position in range(4):
        assert workers.step(decode(position, which=which)) == []
    due = workers.merger.due
    assert due is not None
    assert 0 < due < 0.25
    events = workers.later(1.0)
    assert len(events) == MANY
    assert {len(event.positions) for event in events if isinstance(event, Rows)} == {4}
    assert workers.came == workers.sent
    assert workers.merger.due is None


def test_the_newest_rows_wait_for_their_tokens() -> None:
    workers = Workers()
    workers.step(decode(0))
    delay = workers.merger.due
    assert delay is not None
    workers.later(0.9 * delay)
    workers.step(decode(1))
    events = workers.later(0.1 * delay)
    assert {event.positions.tolist()[-1] for event in events if isinstance(event, Rows)} == {0}
    assert len(workers.later(delay)) == MANY
    assert workers.came == workers.sent


def test_the_last_rows_of_a_request_leave_before_its_release() -> None:
    workers = Workers()
    workers.step(decode(0))
    workers.step(decode(1))
    rows, end = workers.take(workers.merger.feed(released("r3", number=3)))
    assert isinstance(rows, Rows)
    assert (rows.request_id, rows.positions.tolist()) == ("r3", [0, 1])
    assert isinstance(end, Released)
    assert len(workers.later(1.0)) == MANY - 1
    assert workers.came == workers.sent


def test_rows_leave_before_the_report_that_captures_were_updated() -> None:
    workers = Workers()
    workers.step(decode(0))
    rows, attached = workers.merger.feed(AttachedHead(0, 3, Attached("r3", 1, 1, "")))
    assert isinstance(rows, Rows)
    assert isinstance(attached, Attached)


def test_rows_wait_until_every_worker_has_the_request() -> None:
    workers = Workers(ranks=2)
    assert workers.step(decode(0)) == []
    assert workers.later(1.0) == []
    rows = workers.merger.feed(installed("r3", rank=1, number=3))[1]
    assert isinstance(rows, Rows)
    assert rows.positions.tolist() == [0]


def test_rows_of_other_sites_of_a_request_leave_in_order() -> None:
    workers = Workers()
    workers.step(decode(0))
    assert len(workers.step(decode(1, which=1))) == MANY
    workers.step(decode(2))
    workers.later(1.0)
    assert workers.came == workers.sent


def test_no_frame_is_kept_once_all_its_rows_have_left() -> None:
    workers = Workers()
    workers.step(decode(0))
    for number in range(MANY):
        workers.take(workers.merger.feed(released(f"r{number}", number=number)))
    assert workers.merger.due is None
    assert workers.came == workers.sent


def test_large_blocks_leave_at_once() -> None:
    width = (64 << 10) // 4 + 1
    head = RowsHead(
        0,
        "float32",
        width,
        [[3]],
        *(int64(*column) for column in zip(*decode(0), strict=True)),
    )
    data = np.zeros(4 * width * MANY, np.uint8)
    assert len(Workers().merger.feed(head, data)) == MANY


def test_rows_of_a_slow_reader_keep_no_other_rows_once_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = Workers()
    for position in range(2):
        workers.step(decode(position))
    monkeypatch.setattr(workers.frames, "empty", lambda _: None)
    events = workers.later(1.0)
    assert {len(event.data.base) for event in events if isinstance(event, Rows)} == {2}
    assert workers.came == workers.sent


def test_rows_that_no_memory_is_left_for_are_counted_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They end no thread, and the rows of later steps come."""
    workers = Workers()
    workers.step(decode(0))

    def full(_: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(workers.frames, "empty", full)
        assert workers.later(1.0) == []
    workers.step(decode(1))
    assert len(workers.later(1.0)) == MANY
    (end,) = workers.merger.feed(released("r3", number=3, captured={3: 2}))
    assert isinstance(end, Released)
    assert (end.captured, end.lost_rows) == ({3: 1}, 1)


def test_a_frame_of_an_unknown_request_leaves_nothing_behind() -> None:
    workers = Workers()
    with pytest.raises(LookupError):
        workers.step(decode(0, MANY + 1))
    assert workers.merger.due is None


def test_positions_that_exceed_32_bits_are_refused() -> None:
    columns = (int64(1), int64(0), int64(2**31 - 1), int64(1))
    with pytest.raises(OverflowError):
        RowBlocks(RowsHead(0, "float32", WIDTH, SITE_SETS, *columns))


@given(st.data())
def test_every_row_comes_once_and_in_order(data: st.DataObject) -> None:
    workers = Workers(2 * MANY)
    position = dict.fromkeys(range(2 * MANY), 0)
    for _ in range(data.draw(st.integers(1, 8))):
        blocks: list[Block] = []
        for number in data.draw(st.lists(st.sampled_from([*position]), max_size=2 * MANY)):
            count = data.draw(st.sampled_from([1, 1, 1, 1, 3]))
            blocks.append((number, data.draw(st.integers(0, 1)), position[number], count))
            position[number] += count
        if blocks:
            workers.step(blocks, copied=data.draw(st.integers(0, 9)) > 0)
        workers.later(data.draw(st.sampled_from([0.0, 0.005, 0.01, 0.3])))
        if len(position) > 2 and data.draw(st.booleans()):
            number = data.draw(st.sampled_from([*position]))
            del position[number]
            *_, end = workers.take(workers.merger.feed(released(f"r{number}", number=number)))
            assert isinstance(end, Released)
            sites = (site for site in (3, 5) if (f"r{number}", site) in workers.sent)
            for site in sites:
                assert workers.came[f"r{number}", site] == workers.sent[f"r{number}", site]
    workers.later(1.0)
    workers.later(1.0)
    assert workers.came == workers.sent
