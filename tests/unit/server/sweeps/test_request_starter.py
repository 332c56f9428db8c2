"""When the requests of a sweep start: as many as it may run, and others first."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

import pytest

from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.engine.backend import Delta, Job, QueueStats
from rheostat_server.errors import QueueFull
from rheostat_server.requests import manager
from rheostat_server.requests.manager import RequestManager
from rheostat_server.sweeps import request_starter
from rheostat_wire.v1 import (
    sweep_pb2,
)

from ..conftest import rest
from ..fakes import (
    LAYERS,
    sites_with,
)
from ..messages import add, request, selector, window
from ..streams import kinds, settled, until
from .patched import (
    PatchedBackend,
    order,
    pair,
    swept,
)


@dataclass
class HeldBackend(PatchedBackend):
    """Begins no cell, as opposed to a prompt without a patch, until `free` is set."""

    free: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        self.room = self.free if job.plan.acts else None
        async for delta in super().generate(job):
            yield delta


async def test_no_more_than_so_many_cells_run_at_once(starter) -> None:
    backend = HeldBackend()
    running = await starter(backend)
    sweep = asyncio.create_task(swept(running, order(max_concurrent_cells=3)))
    await until(lambda: backend.at_once == 3)
    backend.free.set()
    await sweep
    assert backend.most_at_once == 3


@pytest.mark.parametrize("others", [0, 1])
async def test_few_cells_start_in_an_iteration_of_the_event_loop(
    running, monkeypatch, others: int
) -> None:
    monkeypatch.setattr(RequestManager, "client_requests", property(lambda _: others))
    starts = request_starter.RequestStarter(running.manager, background=False)
    begun: Counter[int] = Counter()
    iteration = 0

    async def ask(_: str, __: RequestManager) -> None:
        begun[iteration] += 1

    async def count() -> None:
        nonlocal iteration
        while True:
            await asyncio.sleep(0)
            iteration += 1

    counting = asyncio.create_task(count())
    await asyncio.gather(*(starts.run(ask) for _ in range(64)))
    counting.cancel()
    assert begun.total() == 64
    # Both tasks take turns, so that two groups of starts may fall between two counts.
    most = request_starter._STARTS if others else request_starter.STARTS_ALONE
    assert most <= max(begun.values()) <= 2 * most
    assert starts.at_once == (1 if others else most)


async def test_cells_in_the_background_wait_while_requests_wait(starter, monkeypatch) -> None:
    backend = PatchedBackend(waiting=1)
    running = await starter(backend)
    monkeypatch.setattr(RequestManager, "foreground_requests", property(lambda _: 1000))
    call = running.client.sweep.Sweep(order())
    await call.read()
    await asyncio.sleep(0.05)
    assert not backend.asked
    backend.waiting = 0
    assert len(await rest(call)) == LAYERS * 4 + 1
    backend.waiting = 1
    await swept(running, order(priority=sweep_pb2.SWEEP_PRIORITY_NORMAL))


async def test_cells_in_the_background_start_in_time_where_requests_always_wait(
    starter, monkeypatch
) -> None:
    monkeypatch.setattr(request_starter, "_LONGEST_WAIT", 0.02)
    running = await starter(PatchedBackend())
    monkeypatch.setattr(RequestManager, "foreground_requests", property(lambda _: 1000))
    monkeypatch.setattr(PatchedBackend, "queue_stats", lambda _: QueueStats(waiting=1))
    cells, _ = await swept(running, order(where=selector(window(0, 1))))
    assert len(cells) == LAYERS


async def test_an_old_report_of_an_idle_engine_stops_no_sweep(starter, monkeypatch) -> None:
    running = await starter(PatchedBackend(waiting=1))
    cells, _ = await swept(running, order())
    assert len(cells) == LAYERS * 4
    # Requests of others may stay open while the engine is idle, because nobody reads them.
    monkeypatch.setattr(request_starter, "_STALE", 0.02)
    monkeypatch.setattr(RequestManager, "foreground_requests", property(lambda _: 1000))
    old = QueueStats(waiting=1)
    monkeypatch.setattr(PatchedBackend, "queue_stats", lambda _: old)
    cells, _ = await swept(running, order(where=selector(window(0, 1))))
    assert len(cells) == LAYERS


@dataclass
class LateBackend(PatchedBackend):
    """Reports that it has released cells only when it is told to. Its queue is never empty."""

    late: list[tuple[Job, int]] = field(default_factory=list)
    asked_to_abort: list[str] = field(default_factory=list)

    def queue_stats(self) -> QueueStats:
        return QueueStats(waiting=1)

    def _release(self, job: Job, computed: int) -> None:
        if job.sampling.only_token is None:
            super()._release(job, computed)
        else:
            self.late.append((job, computed))

    async def abort(self, plan_ids: Sequence[str]) -> None:
        self.asked_to_abort += plan_ids
        await super().abort(plan_ids)

    def release(self) -> None:
        for job, computed in self.late:
            super()._release(job, computed)


async def test_cells_in_the_background_do_not_wait_for_one_another(starter) -> None:
    backend = LateBackend()
    running = await starter(backend)
    request = order(where=selector(window(1, 2)), max_concurrent_cells=1)
    async with asyncio.timeout(5):
        cells, _ = await swept(running, request)
    assert len(cells) == LAYERS
    assert running.manager.open_requests
    assert not backend.asked_to_abort  # the engine has ended them by itself
    backend.release()
    await settled(running)


async def test_beside_streams_a_cell_starts_in_each_step_and_the_engine_may_hold_it(
    starter, monkeypatch
) -> None:
    backend = HeldBackend()
    reports = [QueueStats(running=1)]
    running = await starter(backend)
    monkeypatch.setattr(RequestManager, "foreground_requests", property(lambda _: 1000))
    monkeypatch.setattr(RequestManager, "client_requests", property(lambda _: 1000))
    monkeypatch.setattr(PatchedBackend, "queue_stats", lambda _: reports[-1])
    monkeypatch.setattr(request_starter, "_LONGEST_STEP", 1000.0)
    request = order(where=selector(window(0, 2)), max_concurrent_cells=8)
    sweep = asyncio.create_task(swept(running, request))
    async with asyncio.timeout(10):
        while backend.at_once < LAYERS * 2:
            await asyncio.sleep(3 * request_starter._TURN)
            # On a busy machine several cells may be asked at once, but each had a step to itself.
            assert len(backend.asked) < len(reports)
            reports.append(QueueStats(running=1))
    monkeypatch.setattr(request_starter, "_LONGEST_STEP", 0.01)
    backend.free.set()
    cells, _ = await sweep
    assert len(cells) == LAYERS * 2
    assert all(job.background for job in backend.asked)
    first = len(backend.asked)
    await swept(running, order(max_concurrent_cells=8, priority=sweep_pb2.SWEEP_PRIORITY_NORMAL))
    assert not any(job.background for job in backend.asked[first:])


async def test_alone_cells_run_together(starter) -> None:
    backend = PatchedBackend(running=1)  # their own last step
    running = await starter(backend)
    await swept(running, order(max_concurrent_cells=8))
    assert backend.most_at_once > 1


async def test_cells_that_wait_take_turns_to_look_at_the_queue(starter, monkeypatch) -> None:
    looks = Counter[str]()

    def queue_stats(_: PatchedBackend) -> QueueStats:
        looks["looks"] += 1
        return QueueStats(waiting=1)

    running = await starter(PatchedBackend())
    monkeypatch.setattr(PatchedBackend, "queue_stats", queue_stats)
    monkeypatch.setattr(RequestManager, "foreground_requests", property(lambda _: 1000))
    pairs = [pair() for _ in range(16)]
    begin = time.monotonic()
    call = running.client.sweep.Sweep(order(*pairs, max_concurrent_cells=16))
    await call.read()
    while looks["looks"] < 10:
        await asyncio.sleep(0.01)
    turns = (time.monotonic() - begin) / request_starter._TURN
    assert looks["looks"] <= turns + 2
    call.cancel()


async def test_cells_that_the_engine_has_no_room_for_try_again_one_by_one(
    starter, monkeypatch
) -> None:
    backend = PatchedBackend()
    running = await starter(backend)
    attempts = Counter[str]()
    full = True
    check_queue = manager.check_queue

    def refuse(admitted: AdmittedRequest, *args: int, **counts: int) -> None:
        if full and admitted.sampling.only_token is not None:
            attempts["refused"] += 1
            raise QueueFull("full", retry_after=1.0)
        check_queue(admitted, *args, **counts)

    monkeypatch.setattr(manager, "check_queue", refuse)
    pairs = [pair() for _ in range(16)]
    request = order(*pairs, where=selector(window(0, 1)), max_concurrent_cells=16)
    call = running.client.sweep.Sweep(request)
    await call.read()
    await until(lambda: attempts["refused"] > 0)
    await asyncio.sleep(3 * request_starter._LATER)
    assert 2 <= attempts["refused"] <= 5
    full = False
    assert len(await rest(call)) == LAYERS + 1


async def test_requests_of_others_do_not_queue_behind_cells_that_wait_for_capacity(starter) -> None:
    backend = HeldBackend(sites=sites_with(bank_rows=2))
    running = await starter(backend)
    sweep = asyncio.create_task(swept(running, order(max_concurrent_cells=16)))
    queue = running.manager.admission_queue
    await until(lambda: backend.at_once == 2 and queue.waiting > 4)
    steered = request(steer=[add(scale=2.0)], request_id="other")
    other = asyncio.create_task(running.client.generate(steered))
    await until(lambda: len(queue._ordinary) == 1)
    cells = running.manager.ledger.requests
    backend.free.set()
    assert kinds(await other)[-1] == "receipt"
    results, _ = await sweep
    assert len(results) == LAYERS * 4
    patched = [job.plan.request_id.split("#")[0] for job in backend.jobs if job.plan.acts]
    assert patched.index("other") <= cells
