"""The pairs and cells of a sweep begin without making the event loop wait."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import pytest

from rheostat_server.engine.backend import Delta, Job
from rheostat_server.sweeps import running_sweep
from rheostat_wire.v1 import sweep_pb2

from .patched import PatchedBackend, grade, order, swept


async def test_few_calls_start_in_an_iteration_of_the_event_loop() -> None:
    begun: Counter[int] = Counter()
    iteration = 0

    async def count() -> None:
        nonlocal iteration
        while True:
            await asyncio.sleep(0)
            iteration += 1

    async def work() -> None:
        begun[iteration] += 1

    counting = asyncio.create_task(count())
    await running_sweep._together(work, 64)
    counting.cancel()
    assert begun.total() == 64
    assert max(begun.values()) <= 2  # both tasks take turns, so two may fall between two counts


async def test_the_first_error_ends_the_calls_that_have_started() -> None:
    started = 0

    async def fail() -> None:
        nonlocal started
        started += 1
        raise ValueError(started)

    with pytest.raises(ValueError, match="1"):
        await running_sweep._together(fail, 64)
    assert started < 64


@dataclass
class LateCaptures(PatchedBackend):
    """Captures rows only once questions have been asked."""

    awaited: int = 0
    """How many questions."""
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    started: int = 0
    running_jobs: int = 0
    most_jobs: int = 0

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        self.running_jobs += 1
        self.most_jobs = max(self.most_jobs, self.running_jobs)
        try:
            if job.sampling.only_token is not None:
                self.started += 1
            if self.started >= self.awaited:
                self.enough.set()
            if job.sampling.only_token is None:
                await self.enough.wait()
            async for delta in super().generate(job):
                yield delta
        finally:
            self.running_jobs -= 1


@pytest.mark.parametrize(
    ("grades", "awaited"), [([grade("LOGPROB")], 1), ([grade("KL"), grade("LOGPROB")], 2)]
)
async def test_prompts_are_measured_while_their_rows_are_captured(
    starter, grades: list[sweep_pb2.Grade], awaited: int
) -> None:
    backend = LateCaptures(awaited=awaited)
    running = await starter(backend)
    async with asyncio.timeout(5):
        cells, _ = await swept(running, order(grades=grades))
    assert all(len(cell.values) == len(grades) for cell in cells.values())


async def test_no_more_prompts_than_cells_run_at_once(starter) -> None:
    backend = LateCaptures()
    running = await starter(backend)
    await swept(running, order(max_concurrent_cells=1))
    assert backend.most_jobs == 1
