"""Gains travel with the message of the next step, and the last one of a step acts."""

import inspect
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient

from rheostat_engine import GainsUpdate
from rheostat_engine.adapters import gains
from rheostat_engine.adapters.gains import carry_gains, gains_of, send_gains
from rheostat_engine.plan.gains import updates_to

RELIES = "rheostat_engine.adapters.gains relies on it"


class Core:
    """An engine's core with a scheduler, of which each step has an output of its own."""

    def __init__(self) -> None:
        self.scheduler: Any = SimpleNamespace(
            schedule=lambda throttle_prefills: SchedulerOutput.make_empty()
        )
        carry_gains(self.scheduler)

    def set(self, *updates: GainsUpdate) -> None:
        """As vLLM calls the method that was added to its class."""
        method: Any = EngineCore.rheostat_set_gains  # type: ignore[attr-defined]  # added
        method(self, updates_to(updates))

    def step(self) -> list[GainsUpdate]:
        """The gains of the next step, as another process gets them."""
        output = pickle.loads(pickle.dumps(self.scheduler.schedule()))
        return list(gains_of(output))


def test_vllm_calls_methods_of_its_core_by_name_between_two_steps() -> None:
    source = inspect.getsource(EngineCoreProc._handle_client_request)
    assert "getattr(self, method_name)" in source, RELIES
    assert "_handle_client_request(" in inspect.getsource(EngineCoreProc._process_input_queue), (
        RELIES
    )
    for step in (EngineCore.step, EngineCore.step_with_batch_queue):
        assert "scheduler_output = self.scheduler.schedule(" in inspect.getsource(step), RELIES
    assert inspect.iscoroutinefunction(AsyncMPClient.call_utility_async), RELIES
    assert "self.engine_core = " in inspect.getsource(AsyncLLM.__init__), RELIES
    assert "__slots__" not in vars(SchedulerOutput), RELIES


async def test_gains_are_sent_as_a_call_of_the_core() -> None:
    calls: list[tuple[object, ...]] = []

    async def call(*arguments: object) -> None:
        calls.append(arguments)

    llm: Any = SimpleNamespace(engine_core=SimpleNamespace(call_utility_async=call))
    update = GainsUpdate("a", 1, 3, {0: 0.5})
    await send_gains(llm, [update])
    assert calls == [("rheostat_set_gains", updates_to([update]))]


def test_the_next_step_carries_the_last_gains_of_each_sample() -> None:
    core = Core()
    assert core.step() == []
    core.set(GainsUpdate("a", 1, 3, {0: 0.5, 1: 2.0}), GainsUpdate("b", 4, 0, {0: 1.0}))
    core.set(GainsUpdate("a", 2, 3, {1: 3.0}))
    assert core.step() == [
        GainsUpdate("a", 2, 3, {0: 0.5, 1: 3.0}),
        GainsUpdate("b", 4, 0, {0: 1.0}),
    ]
    assert core.step() == []


def test_a_step_carries_only_so_many_and_the_next_the_rest(monkeypatch) -> None:
    monkeypatch.setattr(gains, "_STEP_GAINS", 5)
    core = Core()
    core.set(*(GainsUpdate(name, 1, 0, dict.fromkeys(range(3), 2.0)) for name in "abc"))
    core.set(GainsUpdate("d", 1, 0, dict.fromkeys(range(9), 2.0)), GainsUpdate("e", 1, 0, {}))
    core.set(GainsUpdate("a", 2, 0, {0: 4.0}))
    steps = [[update.name for update in core.step()] for _ in range(6)]
    assert steps == [["a"], ["b"], ["c"], ["d"], ["e"], []]


def test_what_are_no_gains_is_answered_with_an_error() -> None:
    core = Core()
    method: Any = EngineCore.rheostat_set_gains  # type: ignore[attr-defined]  # added
    with pytest.raises(ValueError, match=r"^these are no gains: "):
        method(core, b"\xc1")
    assert core.step() == []
