"""Rows that wait in memory that two processes share are safe until they are taken, whoever dies."""

import gc
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rheostat_engine import EngineSettings, StagingError, WorkerChannel
from rheostat_engine.channel.staging import (
    ALIGNMENT,
    PAGE,
    StagingRange,
    StagingReader,
    StagingReport,
)
from rheostat_engine.worker.transport import staging_area as staging
from rheostat_engine.worker.transport.event_sender import EventSender
from rheostat_engine.worker.transport.row_sender import Group, RowSender
from rheostat_engine.worker.transport.staging_area import Ranges, StagingArea

from ...frames import rows
from ...tables import CPU

_SPAWNED = multiprocessing.get_context("spawn")
Start = Callable[..., tuple[BaseProcess, Connection]]


@given(
    size=st.integers(1, 40).map(lambda n: n * ALIGNMENT),
    steps=st.lists(st.one_of(st.integers(0, 3000), st.sampled_from(["take", "give back"]))),
)
def test_ranges_never_overlap_and_all_that_could_fit_does(
    size: int, steps: list[int | str]
) -> None:
    ranges, taken = Ranges(size), 0
    waiting: deque[StagingRange] = deque()
    for step in steps:
        if step == "take":
            if waiting:
                taken = waiting.popleft().end
            continue
        if step == "give back":
            if waiting:
                ranges.give_back(waiting.pop())
            continue
        assert isinstance(step, int)
        largest = ranges.largest(taken)
        assert largest == size or waiting
        staging_range = ranges.reserve(step, taken)
        assert (staging_range is not None) == (step <= largest)
        if staging_range is None:
            continue
        assert staging_range.size == step
        assert taken <= staging_range.position <= taken + 2 * size
        start = staging_range.position % size
        assert start % ALIGNMENT == 0
        assert start + step <= size
        for other in waiting:
            first = other.position % size
            assert start + step <= first or first + other.size <= start or not (step * other.size)
            assert other.position < staging_range.position or not other.size
        waiting.append(staging_range)


def test_a_range_that_is_given_back_gives_back_what_it_has_skipped() -> None:
    ranges = Ranges(10 * 64)
    first, second = ranges.reserve(400, 0), ranges.reserve(128, 0)
    assert first is not None
    assert second is not None
    for _ in range(2):
        third = ranges.reserve(129, first.end)
        assert third == StagingRange(640, 129)
        assert ranges.skipped_bytes == 64
        ranges.give_back(third)
        assert ranges.skipped_bytes == 0
    ranges.give_back(second)
    assert ranges.largest(first.end) == 640
    assert ranges.reserve(640, first.end) == StagingRange(640, 640)


def test_ranges_go_around_and_count_what_they_skip() -> None:
    ranges = Ranges(10 * 64)
    first, second = ranges.reserve(400, 0), ranges.reserve(64, 0)
    assert (first, second) == (StagingRange(0, 400), StagingRange(448, 64))
    assert first is not None
    assert ranges.reserve(129, 0) is None
    assert ranges.reserve(129, first.end) == StagingRange(640, 129)
    assert ranges.skipped_bytes == 128
    assert ranges.largest(first.end) == 448 - 192


def test_an_area_that_is_empty_begins_at_its_start_again() -> None:
    ranges = Ranges(10 * 64)
    staging_range = ranges.reserve(64, 0)
    for _ in range(50):
        assert staging_range is not None
        assert staging_range.position % 640 == 0
        staging_range = ranges.reserve(640, staging_range.end)
    assert ranges.skipped_bytes == 0


def test_the_reader_sees_what_was_written_and_gives_it_back_in_order() -> None:
    area = StagingArea(1, CPU)
    assert area.size == PAGE
    reader = StagingReader(area.report(3))
    for number in range(100):
        staging_range = area.reserve(1000 + number)
        assert staging_range is not None
        area[staging_range].fill_(number)
        assert area.free_bytes < PAGE
        with reader.taken(staging_range) as seen:
            assert bytes(seen) == bytes([number]) * (1000 + number)
            with pytest.raises(TypeError):
                seen[0] = 1
        assert area.free_bytes == PAGE
    area.close()


def _shrinkable() -> int:
    fd = os.memfd_create("other")
    os.ftruncate(fd, 2 * PAGE)
    return fd


def _empty() -> int:
    return os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


WRONG: dict[str, Callable[[StagingReport], StagingReport]] = {
    "another nonce": lambda report: {**report, "nonce": "00" * 16},
    "another file": lambda report: {**report, "fd": 0},
    "memory that can shrink": lambda report: {**report, "fd": _shrinkable()},
    "no memory": lambda report: {**report, "fd": _empty()},
    "no such file": lambda report: {**report, "fd": 1 << 20},
    "no such process": lambda report: {**report, "pid": 1 << 30},
}


@pytest.mark.parametrize("name", WRONG)
def test_other_memory_is_refused_and_the_message_says_what_to_do(tmp_path: Path, name: str) -> None:
    area = StagingArea(PAGE, CPU)
    report = WRONG[name](area.report(0))
    channel = WorkerChannel(EngineSettings(channel=f"ipc://{tmp_path}/channel"), ranks=1)
    with pytest.raises(StagingError, match=r"must run on one machine, as one user"):
        channel.attach([{"staging": report}])
    channel.close()
    area.close()


def test_memory_that_cannot_be_pinned_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Runtime:
        def cudaHostRegister(self, *args: int) -> int:  # CUDA's name
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(
        torch.cuda, "check_error", lambda code: (_ for _ in ()).throw(RuntimeError("no memory"))
    )
    monkeypatch.setattr(staging.torch, "ones", lambda *_, **__: None)
    area = StagingArea(3 << 20, torch.device("cuda"))
    assert not area.pinned
    assert [one.getMessage() for one in caplog.records] == [
        "the 3 MiB of staging memory could not be pinned (no memory); captured rows are copied "
        "slowly. A smaller --staging-mib may help"
    ]
    area.close()


def _named() -> set[str]:
    """What of ours has a name where shared memory usually has one."""
    return {name for name in os.listdir("/dev/shm") if "staging" in name}


def _mappings() -> int:
    return Path("/proc/self/maps").read_text().count("rheostat-staging")


@pytest.fixture
def other(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Start]:
    """Starts a function of this module in a process of its own, with a pipe to it."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3])  # type: ignore[no-untyped-call]  # pytest has no type for it
    started: list[BaseProcess] = []

    def start(work: Callable[..., None], *args: object) -> tuple[BaseProcess, Connection]:
        ours, theirs = _SPAWNED.Pipe()
        process = _SPAWNED.Process(target=work, args=(theirs, *args), daemon=True)
        process.start()
        started.append(process)
        return process, ours

    yield start
    for process in started:
        process.kill()
        process.join()


def _work(told: Connection) -> None:
    """A worker that leaves rows."""
    area = StagingArea(1 << 20, CPU)
    staging_range = area.reserve(1000)
    assert staging_range is not None
    area[staging_range].fill_(7)
    told.send((area.report(0), staging_range))
    told.recv()


def test_what_a_killed_worker_left_can_still_be_read_and_goes_with_the_reader(
    other: Start,
) -> None:
    before, held = _named(), _mappings()
    worker, told = other(_work)
    report, staging_range = told.recv()
    reader = StagingReader(report)
    worker.kill()
    worker.join()
    with reader.taken(staging_range) as seen:
        assert bytes(seen) == bytes([7]) * 1000
    assert _mappings() == held + 1
    del reader, seen
    gc.collect()
    assert _mappings() == held
    assert _named() == before


def _serve(told: Connection, address: str) -> None:
    """A server that attaches and never reads."""
    channel = WorkerChannel(EngineSettings(channel=address), ranks=1)
    channel.attach([{"staging": told.recv()}])
    told.send("attached")
    told.recv()


def test_a_worker_whose_server_was_killed_goes_on_loses_what_has_no_room_and_stops(
    other: Start, tmp_path: Path
) -> None:
    before = _named()
    address = f"ipc://{tmp_path}/channel"
    server, told = other(_serve, address)
    area = StagingArea(1 << 20, CPU)
    told.send(area.report(0))
    assert told.recv() == "attached"
    server.kill()
    server.join()
    row_sender = RowSender(EventSender(address), CPU, area, scratch=1)
    groups = [Group(None, 2)]
    fences = [row_sender.send_rows(rows(), torch.ones(2, 2), groups) for _ in range(20_000)]
    fences[-1].synchronize()
    assert row_sender.lost_rows == 2 * (20_000 - area.size // ALIGNMENT)
    assert row_sender.free_bytes == 0
    row_sender.close()
    assert _named() == before
