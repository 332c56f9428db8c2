"""How soon a cancelled sweep has released everything, by a clock that counts iterations.

Each iteration of the event loop sets its clock forward by `TICK`. So `BOUND` limits the iterations
and the timers that a cancellation waits for. The machine's speed has no influence.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass, replace

import pytest

from rheostat_engine import Installed
from rheostat_server.api.sweeps import SweepService
from rheostat_server.engine.backend import Delta, Job, WorkerStats
from rheostat_wire.v1 import sweep_service_pb2

from ..conftest import Running
from ..fakes import INFO, sites_with
from .patched import PatchedBackend, order, pair, prompt

BOUND = 0.2
"""Seconds within which a cancelled sweep releases everything."""
TICK = 0.0001
"""Seconds that an iteration of the event loop counts as."""
STEP = 0.01
"""Seconds until a worker handles a message, because it ends its step first."""
CELLS = 64
"""Cells that run at a time."""
LENGTH = 32
"""Tokens of a prompt, so that cells fill all places."""


@dataclass
class SteppingBackend(PatchedBackend):
    """Its workers handle aborts and queries after their step. Cells do not end by themselves."""

    info: object = replace(INFO, running_samples=CELLS)
    scheduled: bool = False
    """Whether cells run. Otherwise the engine has them, but never schedules them."""

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        if job.plan.acts:
            await self._hang(job)
        async with aclosing(super().generate(job)) as deltas:
            async for delta in deltas:
                yield delta

    async def _hang(self, job: Job) -> None:
        """Runs a cell until it is aborted."""
        self.at_once += 1
        if self.scheduled:
            self.deliver(Installed(job.plan.request_id, ""))
        try:
            await asyncio.Event().wait()
        finally:
            self.at_once -= 1
            if self.scheduled:
                self._release(job, len(job.prompt))

    async def abort(self, plan_ids: Sequence[str]) -> None:
        await asyncio.sleep(STEP)
        await super().abort(plan_ids)

    async def worker_stats(self) -> WorkerStats:
        await asyncio.sleep(STEP)
        return await super().worker_stats()


class Clock:
    """The clock of the event loop, which the test sets forward.

    Threads do not follow it, so their work is done in the loop.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        patch.setattr(loop, "time", lambda: self.now)
        patch.setattr(loop, "run_in_executor", self._run)

    async def tick(self) -> None:
        """Runs an iteration of the event loop."""
        await asyncio.sleep(0)
        self.now += TICK

    async def until(self, condition: Callable[[], bool], at_most: float) -> float:
        """Runs the loop until the condition holds. Returns the seconds that this took."""
        begin = self.now
        while not condition() and self.now < begin + at_most:
            await self.tick()
        return self.now - begin

    @staticmethod
    def _run(_: Executor | None, work: Callable[[], object]) -> asyncio.Future[object]:
        done = asyncio.get_running_loop().create_future()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        return done


async def seconds_until_free(
    running: Running, request: sweep_service_pb2.SweepRequest, ready: Callable[[], bool]
) -> float:
    """Cancels a sweep once it is ready. Returns the seconds until everything is released."""
    manager, backend = running.manager, running.backend
    assert isinstance(backend, SteppingBackend)

    async def read() -> None:
        service = SweepService(running.server.readiness)
        async with aclosing(service.Sweep(request, None)) as events:
            async for _ in events:
                pass

    def held() -> bool:
        requests = manager.open_requests + manager.ledger.requests + manager.admission_queue.waiting
        return bool(requests or len(manager.runs) or backend.at_once or backend.tasks)

    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(patch)
        call = asyncio.create_task(read())
        await clock.until(lambda: call.done() or ready(), at_most=5)
        assert ready()
        assert held()
        call.cancel()
        seconds = await clock.until(lambda: not held(), at_most=10 * BOUND)
    assert call.cancelled()
    return seconds


def long_order() -> sweep_service_pb2.SweepRequest:
    """A sweep of `CELLS` cells at a time."""
    clean, corrupt = prompt(*range(5, 5 + LENGTH)), prompt(4, *range(6, 5 + LENGTH))
    return order(pair(prompt=clean, corrupt=corrupt), max_concurrent_cells=CELLS)


ROOMY = sites_with(slots=1000, bank_rows=1000, steps=1000)


@pytest.mark.parametrize("scheduled", [True, False], ids=["scheduled", "never_scheduled"])
async def test_a_cancelled_sweep_does_not_wait_for_its_cells(starter, scheduled: bool) -> None:
    backend = SteppingBackend(sites=ROOMY, scheduled=scheduled)
    running = await starter(backend)
    seconds = await seconds_until_free(running, long_order(), lambda: backend.at_once == CELLS)
    assert seconds <= BOUND


async def test_a_cancelled_sweep_does_not_wait_for_room(starter) -> None:
    backend = SteppingBackend()
    running = await starter(backend)
    waiting = running.manager.admission_queue
    seconds = await seconds_until_free(running, long_order(), lambda: waiting.waiting > 10)
    assert seconds <= BOUND


async def test_a_cancelled_sweep_does_not_wait_for_the_rows_of_its_prompts(starter) -> None:
    backend = SteppingBackend(sites=ROOMY, unscheduled=asyncio.Event())
    running = await starter(backend)
    request = order(*[pair() for _ in range(CELLS)], max_concurrent_cells=CELLS)
    seconds = await seconds_until_free(running, request, lambda: len(backend.jobs) == CELLS)
    assert seconds <= BOUND
