"""Held requests leave vLLM's scheduler, and come back as after a preemption."""

import inspect
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from rheostat_engine.adapters.background import BackgroundPace, BackgroundQueue
from rheostat_engine.adapters.holds import HeldRequests, send_holds

from .scripted_engine import BLOCK, MODEL

RELIES = "rheostat_engine.adapters.holds relies on it"


@pytest.fixture(scope="module")
def config() -> VllmConfig:
    return EngineArgs(
        model=str(MODEL),
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        block_size=BLOCK,
        kv_cache_memory_bytes=1 << 24,
        enable_prefix_caching=False,
        enforce_eager=True,
    ).create_engine_config()


class Engine:
    """vLLM's scheduler, whose outputs come a step late if it schedules ahead."""

    def __init__(self, config: VllmConfig, *, ahead: bool) -> None:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config.cache_config.num_gpu_blocks = 100
        self.scheduler = (AsyncScheduler if ahead else Scheduler)(
            config,
            KVCacheConfig(100, [], [KVCacheGroupSpec(["layer"], spec)]),
            StructuredOutputManager(config),
            BLOCK,
            log_stats=True,
        )
        HeldRequests(self.scheduler)
        BackgroundQueue(self.scheduler, BackgroundPace())
        self.ahead = ahead
        self.outputs: deque[Any] = deque()
        self.generated: dict[str, int] = {}

    def add(self, name: str, priority: int = 0, tokens: int = 20) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        self.scheduler.add_request(Request(name, [1, 2, 3], params, None, priority=priority))

    def hold(self, *names: str, held: bool = True) -> None:
        """As vLLM calls the method that was added to its class."""
        method: Any = EngineCore.rheostat_hold  # type: ignore[attr-defined]  # added
        method(SimpleNamespace(scheduler=self.scheduler), list(names), held)

    def step(self) -> dict[str, int]:
        """Takes a step; the number of tokens that it computes, by request."""
        output = self.scheduler.schedule()
        self.outputs.append(output)
        if not self.ahead or len(self.outputs) > 1:
            self._take(self.outputs.popleft())
        return dict(output.num_scheduled_tokens)

    def drain(self) -> None:
        while self.outputs:
            self._take(self.outputs.popleft())

    def _take(self, output: Any) -> None:
        names = list(output.num_scheduled_tokens)
        answers = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: at for at, name in enumerate(names)},
                sampled_token_ids=[[7] for _ in names],
            ),
        )
        for answer in answers.values():
            for one in answer.outputs:
                count = self.generated.get(one.request_id, 0) + len(one.new_token_ids)
                self.generated[one.request_id] = count


def test_vllm_schedules_and_frees_requests_as_before() -> None:
    preempt = inspect.getsource(Scheduler._preempt_request)
    assert "self.waiting.prepend_request(request)" in preempt, RELIES
    assert "request.num_stale_output_tokens = request.num_in_flight_tokens" in preempt, RELIES
    finish = inspect.getsource(Scheduler.finish_requests)
    assert "self._free_request(request" in finish, RELIES
    assert "self._free_request(request)" in inspect.getsource(Scheduler.update_from_output), RELIES
    assert "connector is None" in inspect.getsource(Scheduler.has_finished_requests), RELIES


@pytest.mark.parametrize("ahead", [False, True])
def test_a_held_request_is_not_computed_and_keeps_no_blocks(config, ahead: bool) -> None:
    engine = Engine(config, ahead=ahead)
    engine.add("a", tokens=12)
    engine.add("b", tokens=12)
    for _ in range(4):
        engine.step()
    engine.hold("a")
    for _ in range(3):
        assert set(engine.step()) == {"b"}
    counted = engine.generated["a"]
    assert counted == 4  # what ran already arrives
    assert engine.scheduler.requests["a"].num_computed_tokens == 0
    assert engine.scheduler.get_request_counts() == (1, 0)
    engine.hold("a", held=False)
    assert engine.step()["a"] == 3 + counted  # computed again, with what it had generated
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    engine.drain()
    assert engine.generated == {"a": 12, "b": 12}
    assert not engine.scheduler.requests


@pytest.mark.parametrize("ahead", [False, True])
def test_an_engine_that_only_holds_requests_has_nothing_to_do(config, ahead: bool) -> None:
    engine = Engine(config, ahead=ahead)
    engine.add("a")
    engine.step()
    engine.hold("a")
    assert engine.scheduler.has_requests()  # so that the step comes in which it is preempted
    assert engine.step() == {}
    engine.drain()
    assert not engine.scheduler.has_requests()
    assert engine.scheduler.kv_cache_manager.usage == 0
    engine.hold("a", held=False)
    assert engine.scheduler.has_requests()
    assert engine.step()["a"] == 4


def test_requests_that_wait_are_held_too_and_come_back_in_order(config) -> None:
    engine = Engine(config, ahead=False)
    for name in ("a", "b", "c"):
        engine.add(name)
    engine.hold("a", "b")
    assert set(engine.step()) == {"c"}
    engine.add("d", tokens=1)
    engine.hold("a", "b", held=False)
    assert [one.request_id for one in engine.scheduler.waiting] == ["a", "b", "d"]


def test_a_hold_that_is_released_before_a_step_changes_nothing(config) -> None:
    engine = Engine(config, ahead=False)
    engine.add("a")
    engine.step()
    engine.hold("a")
    engine.hold("a", held=False)
    assert engine.step() == {"a": 1}


def test_a_background_request_is_held_before_it_begins(config) -> None:
    engine = Engine(config, ahead=False)
    engine.add("a")
    engine.step()
    engine.add("cell", priority=1, tokens=1)
    engine.hold("cell", "a")
    for _ in range(3):
        assert engine.step() == {}
    engine.hold("cell", "a", held=False)
    for _ in range(3):
        engine.step()
    assert engine.generated["cell"] == 1


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_that_ends_while_it_is_held_is_forgotten(config, ahead: bool) -> None:
    engine = Engine(config, ahead=ahead)
    engine.add("aborted")
    engine.add("last", tokens=1)
    engine.step()
    engine.hold("aborted", "last", "unknown")
    engine.step()
    engine.scheduler.finish_requests("aborted", RequestStatus.FINISHED_ABORTED)
    engine.step()
    engine.drain()
    engine.hold("aborted", "last", held=False)
    engine.step()
    holds = engine.scheduler.rheostat_holds  # type: ignore[attr-defined]  # added
    assert (holds._ids, holds._taken) == (set(), {})
    assert not engine.scheduler.requests
    assert not engine.scheduler.waiting


async def test_ids_are_translated_to_those_of_the_scheduler() -> None:
    calls: list[tuple[object, ...]] = []

    async def call(*arguments: object) -> None:
        calls.append(arguments)

    known = {"a": ["a-1"], "b": ["b-2"]}
    llm: Any = SimpleNamespace(
        engine_core=SimpleNamespace(call_utility_async=call),
        output_processor=SimpleNamespace(external_req_ids=known),
    )
    await send_holds(llm, ["a", "ended"], held=True)
    assert calls == [("rheostat_hold", ["a-1"], True)]
