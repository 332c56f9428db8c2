"""Statistics of the scheduler alone reach a function, through vLLM's own classes."""

import asyncio

import pytest
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import SchedulerStats

from rheostat_engine.adapters.scheduler_stats import watch_scheduler

from .test_outputs import Core, added, engine

RELIES = "rheostat_engine.adapters.scheduler_stats relies on it"


class Stepping(Core):
    """An engine whose steps come from a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self.steps.get()


def step(running: int) -> EngineCoreOutputs:
    output = EngineCoreOutput("r-internal", [3], finish_reason=FinishReason.LENGTH)
    stats = SchedulerStats(num_running_reqs=running)
    return EngineCoreOutputs(outputs=[output], scheduler_stats=stats)


async def test_the_schedulers_statistics_come_and_no_others_are_kept() -> None:
    core, seen = Stepping(), asyncio.Queue()
    llm = engine(core)
    llm.log_stats = llm.output_processor.log_stats = True  # as vLLM starts it
    llm.renderer.stat_mm_cache = lambda: None
    watch_scheduler(llm, seen.put_nowait)
    receiver = await added(llm)
    assert llm.output_processor.request_states["r-internal"].stats is None, RELIES
    core.steps.put_nowait(step(7))
    async with asyncio.timeout(10):
        stats = await seen.get()
    assert stats.num_running_reqs == 7, RELIES
    assert receiver.reasons == ["length"], RELIES
    assert not receiver.errors
    llm.logger_manager.log()  # as vLLM may, with no logger to call
    llm.output_handler.cancel()


async def test_a_handler_that_runs_is_too_late() -> None:
    llm = engine(Core())
    await added(llm)
    with pytest.raises(RuntimeError, match="before the first request"):
        watch_scheduler(llm, lambda stats: None)
