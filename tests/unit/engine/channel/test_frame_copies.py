"""Copies of whole frames: bounded in size and in number, and freed with their last row."""

import numpy as np
import pytest

from rheostat_engine.channel import frame_copies
from rheostat_engine.channel.events import Installed, InstalledHead, Rows, RowsHead
from rheostat_engine.channel.frame_copies import FrameCopies
from rheostat_engine.channel.worker_channel import EventMerger

FRAME = 64


def frame(first: int = 0) -> memoryview:
    return memoryview(bytes(range(first, first + FRAME)))


@pytest.fixture
def few(monkeypatch) -> FrameCopies:
    """Room for two frames."""
    monkeypatch.setattr(frame_copies, "FRAME_BYTES", FRAME)
    monkeypatch.setattr(frame_copies, "ALL_FRAMES_BYTES", 2 * FRAME)
    return FrameCopies()


def test_a_copy_stays_when_the_worker_writes_again() -> None:
    memory = bytearray(frame())
    copied = FrameCopies().copy(memoryview(memory))
    assert copied is not None
    memory[:] = bytes(FRAME)
    assert copied.tobytes() == bytes(frame())


def test_large_frames_are_not_copied_as_a_whole(few) -> None:
    assert few.copy(memoryview(bytes(FRAME + 1))) is None
    assert few.copy(frame()) is not None


def test_frames_in_use_are_bounded_and_a_view_keeps_its_frame(few) -> None:
    first, second = few.copy(frame()), few.copy(frame(1))
    assert first is not None
    assert second is not None
    assert few.copy(frame()) is None
    view = first[3:4]
    del first
    assert few.copy(frame()) is None
    assert view[0] == 3
    del view
    assert few.copy(frame()) is not None


def test_the_rows_of_a_copied_frame_are_views_of_it() -> None:
    merger = EventMerger(1)
    for number in (1, 2):
        merger.feed(InstalledHead(0, number, Installed(f"r{number}", "")))
    numbers = np.array([1, 2], "<i8")
    ones = np.ones(2, "<i8")
    head = RowsHead(
        0, "bfloat16", 4, [[7]], numbers.tobytes(), (0 * ones).tobytes(),
        (5 * ones).tobytes(), ones.tobytes(),
    )  # fmt: skip
    copied = FrameCopies().copy(memoryview(np.arange(8, dtype="<u2").tobytes()))
    assert copied is not None
    rows = [one for one in merger.feed(head, copied) if isinstance(one, Rows)]
    assert [one.data.tolist() for one in rows] == [[[[0, 1, 2, 3]]], [[[4, 5, 6, 7]]]]
    assert all(np.shares_memory(one.data, copied) for one in rows)
    alone = [one for one in merger.feed(head, memoryview(copied)) if isinstance(one, Rows)]
    assert not any(np.shares_memory(one.data, copied) for one in alone)
