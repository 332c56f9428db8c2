"""Full garbage collections wait until no request runs, unless they are short."""

import asyncio
import gc
from collections import deque
from collections.abc import Iterator

import pytest

from rheostat_server.tasks import garbage


class Cycle:
    """Garbage that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


def aged_cycle() -> None:
    """Leaves a cycle that only a full collection frees."""
    cycle = Cycle()
    gc.collect(0)
    gc.collect(1)
    del cycle


def cycles() -> int:
    return sum(isinstance(item, Cycle) for item in gc.get_objects())


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threshold = gc.get_threshold()
    monkeypatch.setattr(garbage._Start, "blocks", None)  # so that its later value ends with a test
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()
    gc.collect()


def test_objects_of_the_start_are_excluded_and_many_new_ones_make_no_full_collection() -> None:
    garbage.collect_rarely()
    assert gc.get_freeze_count() > 50_000
    full = gc.get_stats()[2]["collections"]
    plans = [[number] for number in range(1_000_000)]
    assert gc.get_stats()[1]["collections"] > 0
    assert gc.get_stats()[2]["collections"] == full
    assert len(plans) == 1_000_000


def test_no_collection_of_objects_that_stay_visits_many() -> None:
    garbage.collect_rarely()
    most = 0

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal most
        if phase == "start":
            visited = range(info["generation"] + 1)
            most = max(most, sum(len(gc.get_objects(generation)) for generation in visited))

    gc.callbacks.append(count)
    try:
        plans = [[number] for number in range(300_000)]
    finally:
        gc.callbacks.remove(count)
    assert len(plans) == 300_000
    assert 0 < most < 20_000  # 120,000 with ten collections of the youngest generation for each


async def test_garbage_is_collected_once_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_INTERVAL", 0.001)
    monkeypatch.setattr(garbage, "_BUSY_BLOCKS", -(10**9))
    monkeypatch.setattr(garbage, "_AGED", 1)
    garbage.collect_rarely()
    idle = False
    collecting = asyncio.create_task(garbage.collect_in_time(lambda: idle))
    aged_cycle()
    await asyncio.sleep(0.02)
    assert cycles() == 1
    idle = True
    async with asyncio.timeout(30):
        while cycles():
            await asyncio.sleep(0.01)
    full = gc.get_stats()[2]["collections"]
    await asyncio.sleep(0.02)
    assert gc.get_stats()[2]["collections"] == full, "nothing has aged since"
    collecting.cancel()


async def test_garbage_beside_a_request_that_never_ends_is_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage, "_INTERVAL", 0.001)
    monkeypatch.setattr(garbage, "_YOUNG", 100)
    monkeypatch.setattr(garbage, "_REST", 0)
    garbage.collect_rarely()
    collecting = asyncio.create_task(garbage.collect_in_time(lambda: False))
    # The loop must not call this: it visits all frozen objects, 150 ms after vLLM was loaded.
    monkeypatch.delattr(gc, "get_freeze_count")
    running = deque[Cycle](maxlen=1500)  # each grows old before it ends
    most = 0
    for _ in range(100):
        running.extend(Cycle() for _ in range(200))
        await asyncio.sleep(0.002)
        most = max(most, cycles() - len(running))
    collecting.cancel()
    assert most < 6_000  # of 18,500 that ended


async def test_no_full_collection_of_many_objects_beside_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage, "_INTERVAL", 0.001)
    garbage.collect_rarely()
    plans = [[number] for number in range(400_000)]  # as the plans of a large sweep
    collecting = asyncio.create_task(garbage.collect_in_time(lambda: False))
    full = gc.get_stats()[2]["collections"]
    await asyncio.sleep(0.05)
    assert gc.get_count()[2] >= garbage._AGED
    assert gc.get_stats()[2]["collections"] == full
    plans.clear()
    async with asyncio.timeout(30):
        while gc.get_stats()[2]["collections"] == full:
            await asyncio.sleep(0.01)
    collecting.cancel()


async def test_collections_beside_requests_stay_away_from_sizes_that_took_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage, "_INTERVAL", 0.001)
    garbage.collect_rarely()
    seconds = 0.1
    collected: list[int] = []

    def collect() -> None:
        nonlocal clock
        clock += seconds
        collected.append(blocks)
        middle[0] = 0

    monkeypatch.setattr(garbage, "_REST", 0)
    clock, blocks, middle = 0.0, 0, [0]
    start = 1_000_000
    monkeypatch.setattr(garbage._Start, "blocks", start)
    monkeypatch.setattr(garbage.time, "thread_time", lambda: clock)
    monkeypatch.setattr(garbage.sys, "getallocatedblocks", lambda: start + blocks)
    monkeypatch.setattr(garbage.gc, "get_count", lambda: (0, 0, middle[0]))
    monkeypatch.setattr(garbage.gc, "collect", collect)

    async def pass_time(size: int) -> None:
        nonlocal blocks
        blocks, middle[0] = size, garbage._AGED
        await asyncio.sleep(0.01)

    idle = False
    collecting = asyncio.create_task(garbage.collect_in_time(lambda: idle))
    await pass_time(200_000)
    assert collected == [200_000], "the first one may take long"
    seconds = 0.01
    for size in (200_000, 50_001):
        await pass_time(size)
    assert collected == [200_000], "as long per block, these would take more than 25 ms"
    for size in (50_000, 55_000, 60_500, 70_000):
        await pass_time(size)
    assert collected == [200_000, 50_000, 55_000, 60_500]
    idle = True
    await pass_time(70_000)
    assert collected[-1] == 70_000
    seconds = 0.05
    await pass_time(4_000_000)
    assert collected[-1] == 4_000_000
    idle = False
    await pass_time(garbage._BUSY_BLOCKS + 1)
    assert collected[-1] == 4_000_000, "a slow collection of many blocks raises no limit"
    collecting.cancel()


async def test_collections_beside_requests_take_little_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage, "_INTERVAL", 0.001)
    garbage.collect_rarely()
    cpu, now = 0.0, 0.0
    collected: list[float] = []

    def collect() -> None:
        nonlocal cpu
        cpu += 0.02
        collected.append(now)

    monkeypatch.setattr(garbage.time, "thread_time", lambda: cpu)
    monkeypatch.setattr(garbage.time, "perf_counter", lambda: now)
    monkeypatch.setattr(garbage.gc, "get_count", lambda: (0, 0, garbage._AGED))
    monkeypatch.setattr(garbage.gc, "collect", collect)
    idle = False
    collecting = asyncio.create_task(garbage.collect_in_time(lambda: idle))
    await asyncio.sleep(0.02)
    assert collected == [0.0]
    now = 9.9
    await asyncio.sleep(0.02)
    assert collected == [0.0], "0.02 s of 10 s"
    now = 10.1
    await asyncio.sleep(0.02)
    assert collected == [0.0, 10.1]
    idle = True
    await asyncio.sleep(0.02)
    assert len(collected) > 2
    collecting.cancel()
