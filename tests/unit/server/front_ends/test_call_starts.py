"""Calls that arrive together start first; everything else waits for a short time."""

import asyncio
import gc
from collections.abc import Callable

import pytest

from rheostat_server.front_ends import call_starts
from rheostat_server.front_ends.call_starts import CallStarts
from rheostat_server.tasks import garbage


async def iterations(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def starter(starts: CallStarts, log: list[str]) -> Callable[[int], None]:
    """A function that starts a call: it stands back once it has begun."""

    async def answer(number: int) -> None:
        log.append(f"begins {number}")
        await starts.stand_back()
        log.append(f"goes on {number}")

    running: set[asyncio.Task[None]] = set()

    def start(number: int) -> None:
        starts.call(lambda: running.add(asyncio.create_task(answer(number))))

    return start


async def test_a_single_call_does_not_stand_back() -> None:
    log: list[str] = []
    starter(CallStarts(2), log)(0)
    await iterations(1)
    assert log == ["begins 0", "goes on 0"]


async def test_calls_go_on_once_all_that_arrived_together_have_begun() -> None:
    log: list[str] = []
    start = starter(CallStarts(2), log)
    for number in range(9):
        start(number)
    await iterations(20)
    assert log == [*(f"begins {n}" for n in range(9)), *(f"goes on {n}" for n in range(9))]


async def test_few_calls_go_on_in_an_iteration() -> None:
    log: list[str] = []
    start = starter(CallStarts(2), log)
    for number in range(9):
        start(number)
    counts = []
    for _ in range(20):
        await iterations(1)
        counts.append(sum(line.startswith("goes on") for line in log))
    assert max(b - a for a, b in zip([0, *counts], counts, strict=False)) == 2


async def test_a_client_that_begins_calls_without_end_does_not_stop_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_starts, "_LONGEST", 0.0)
    log: list[str] = []
    start = starter(CallStarts(1), log)
    start(0)
    start(1)
    for number in range(2, 40):
        start(number)  # one more than can start
        start(-number)
        await iterations(1)
    went_on = [line for line in log if line.startswith("goes on")]
    assert went_on[:3] == ["goes on 0", "goes on 1", "goes on 2"]
    assert len(went_on) > 20
    await iterations(100)  # the calls that still wait


async def test_no_call_stands_back_longer_because_others_take_long_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, now, waits = asyncio.get_running_loop(), 0.0, list[float]()
    monkeypatch.setattr(loop, "time", lambda: now)
    starts = CallStarts(2)
    tasks: set[asyncio.Task[None]] = set()

    async def answer() -> None:
        begun = now
        await starts.stand_back()
        waits.append(now - begun)

    for number in range(150):
        for _ in range(3):  # one more than can start
            starts.call(lambda: tasks.add(asyncio.create_task(answer())))
        await iterations(1)
        now += 0.001 if number < 100 else 0.02
    await iterations(200)  # the calls that still wait
    assert len(waits) == 450
    assert max(waits) < 0.05 + 3 * 0.02


async def test_calls_that_may_go_on_do_so_in_order_and_before_later_calls() -> None:
    log: list[str] = []
    start = starter(CallStarts(2), log)
    for number in range(9):
        start(number)
    while "goes on 0" not in log:
        await iterations(1)
    assert "goes on 8" not in log
    start(9)
    await iterations(20)
    assert [line for line in log if line.startswith("goes on")] == [
        f"goes on {n}" for n in range(10)
    ]


async def test_a_call_that_was_cancelled_holds_up_no_other() -> None:
    starts, log = CallStarts(1), list[str]()
    start = starter(starts, log)
    gone = asyncio.create_task(starts.stand_back())
    for number in range(4):
        start(number)
    stands_back = asyncio.create_task(starts.stand_back())
    await iterations(2)
    stands_back.cancel()
    await iterations(20)
    assert gone.done()
    assert stands_back.cancelled()
    went_on = [line for line in log if line.startswith("goes on")]
    assert went_on == [f"goes on {n}" for n in range(4)]


@pytest.fixture
def collected_rarely(monkeypatch: pytest.MonkeyPatch):
    """As after `collect_rarely`, without its effect on this process."""
    monkeypatch.setattr(garbage._Start, "blocks", 0)
    yield
    gc.enable()


@pytest.mark.usefixtures("collected_rarely")
async def test_no_garbage_is_collected_while_calls_wait_to_start() -> None:
    starts, enabled = CallStarts(2), list[bool]()
    for _ in range(7):
        starts.call(lambda: enabled.append(gc.isenabled()))
    await iterations(10)
    assert enabled == [True, True, False, False, False, False, False]
    assert gc.isenabled()


@pytest.mark.usefixtures("collected_rarely")
async def test_too_many_new_objects_are_collected_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage, "_POSTPONED", 0)
    starts, enabled = CallStarts(1), list[bool]()
    for _ in range(4):
        starts.call(lambda: enabled.append(gc.isenabled()))
    await iterations(10)
    assert enabled == [True, True, True, True]


async def test_collections_of_other_programs_are_left_alone() -> None:
    starts, enabled = CallStarts(1), list[bool]()
    for _ in range(4):
        starts.call(lambda: enabled.append(gc.isenabled()))
    await iterations(10)
    assert enabled == [True, True, True, True]
