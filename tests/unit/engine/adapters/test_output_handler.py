"""An engine that is ended on purpose is not reported as dead."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import async_llm
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rheostat_engine.async_llm import stop_async_llm

RELIES = "rheostat_engine.adapters.output_handler relies on it"


class Core:
    """Gives an answer once the engine has ended: that it is dead."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def get_output_async(self) -> object:
        await self.ended.wait()
        raise EngineDeadError

    def shutdown(self, timeout: float | None = None) -> None:
        """`AsyncLLM` calls it when it is garbage-collected."""


def reading(core: Core, errors: list[Exception]) -> Any:  # most of its parts are stand-ins
    """vLLM's class, with only what its task uses."""
    llm: Any = object.__new__(AsyncLLM)
    llm.output_handler = None
    llm.engine_core = core
    llm.output_processor = SimpleNamespace(propagate_error=errors.append)
    llm.log_stats = False
    llm.logger_manager = None
    llm.renderer = SimpleNamespace(mm_processor_cache=None, shutdown=list)
    llm._run_output_handler()
    assert llm.output_handler is not None, RELIES
    return llm


@pytest.mark.parametrize("stopped", [False, True])
async def test_a_task_that_was_stopped_does_not_report_the_end(
    stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(async_llm.logger, "exception", said.append)
    core, errors = Core(), list[Exception]()
    llm = reading(core, errors)
    await asyncio.sleep(0)
    if stopped:
        await stop_async_llm(llm)
    core.ended.set()
    await asyncio.wait([llm.output_handler])
    assert (len(said), len(errors)) == ((0, 0) if stopped else (1, 1)), RELIES


async def test_an_engine_that_has_run_nothing_has_no_such_task() -> None:
    llm = object.__new__(AsyncLLM)
    llm.output_handler = None
    await stop_async_llm(llm)
