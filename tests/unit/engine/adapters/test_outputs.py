"""The outputs of a request reach a function, through vLLM's own classes."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from rheostat_engine.async_llm import receive_outputs
from rheostat_engine.output import Output

RELIES = "rheostat_engine.adapters.outputs relies on it"


class Core:
    """The engine's process, which does nothing by itself."""

    def __init__(self) -> None:
        self.resources = SimpleNamespace(engine_dead=False)
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.on_add: Callable[[EngineCoreRequest], None] = lambda request: None
        self.ended = asyncio.Event()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.added.append(request.request_id)
        self.on_add(request)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids

    async def get_output_async(self) -> object:
        await self.ended.wait()
        raise EngineDeadError

    def shutdown(self, timeout: float | None = None) -> None:
        """`AsyncLLM` calls it when it is garbage-collected."""


class Inputs:
    """vLLM's checks of a request, which need a model."""

    assign_request_id = staticmethod(lambda request: None)

    def process_inputs(
        self, request_id: str, prompt: dict[str, Any], params: SamplingParams, **_: object
    ) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id=f"{request_id}-internal",
            external_req_id=request_id,
            prompt_token_ids=prompt["prompt_token_ids"],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )


def engine(core: Core) -> Any:  # most of its parts are stand-ins
    """vLLM's class, with only what a request uses."""
    llm: Any = object.__new__(AsyncLLM)
    llm.output_handler = None
    llm.engine_core = core
    llm.output_processor = OutputProcessor(None, log_stats=False)
    llm.input_processor = Inputs()
    llm.log_stats = llm.log_requests = False
    llm.logger_manager = llm.admission_stats = None
    llm.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_sharing_fast_prefill=False))
    llm.observability_config = SimpleNamespace(otlp_traces_endpoint=None)
    llm.scheduler_config = SimpleNamespace(max_num_queued_reqs=None, max_num_queued_tokens=None)
    llm.model_config = SimpleNamespace(is_encoder_decoder=False)
    llm._supported_tasks = ("generate",)
    llm.renderer = SimpleNamespace(mm_processor_cache=None, shutdown=list)
    return llm


class Receiver:
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.errors: list[Exception] = []

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def reasons(self) -> list[str | None]:
        return [output.finish_reason for output in self.outputs]


async def added(llm: Any, name: str = "r") -> Receiver:
    receiver = Receiver()
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, detokenize=False)
    prompt = {"type": "token", "prompt_token_ids": [1, 2]}
    collector = await llm.add_request(name, prompt, params)
    assert isinstance(collector, RequestOutputCollector), RELIES
    receive_outputs(llm, collector, receiver.outputs.append, receiver.errors.append)
    return receiver


def step(llm: Any, *tokens: int, name: str = "r", reason: FinishReason | None = None) -> None:
    output = EngineCoreOutput(f"{name}-internal", list(tokens), finish_reason=reason)
    llm.output_processor.process_outputs([output])


async def test_each_output_is_passed_on_at_once() -> None:
    core = Core()
    llm = engine(core)
    receiver = await added(llm)
    assert core.added == ["r-internal"]
    step(llm, 3)
    assert receiver.token_ids == [3], RELIES
    step(llm, 4, 5)
    step(llm, 6, reason=FinishReason.LENGTH)
    assert receiver.token_ids == [3, 4, 5, 6]
    assert receiver.reasons == [None, None, "length"]
    assert not llm.output_processor.has_unfinished_requests()


async def test_a_request_that_runs_has_no_task() -> None:
    llm = engine(Core())
    await added(llm, "first")
    before = asyncio.all_tasks()
    assert llm.output_handler in before
    for number in range(8):
        await added(llm, str(number))
    assert asyncio.all_tasks() == before


async def test_an_output_that_came_while_the_request_was_sent_is_passed_on() -> None:
    core = Core()
    llm = engine(core)
    core.on_add = lambda request: [step(llm, token) for token in (3, 4)]
    receiver = await added(llm)
    step(llm, 5)
    assert receiver.token_ids == [3, 4, 5], RELIES


async def test_an_abort_ends_the_request_by_the_id_of_its_caller() -> None:
    core = Core()
    llm = engine(core)
    receiver, other = await added(llm), await added(llm, "other")
    step(llm, 3)
    await llm.abort(["r", "never added"])
    assert core.aborted == ["r-internal"], RELIES
    assert receiver.reasons == [None, "abort"], RELIES
    step(llm, 4, name="other")
    assert other.token_ids == [4]


async def test_an_engine_that_dies_fails_every_request() -> None:
    core = Core()
    llm = engine(core)
    receivers = [await added(llm, name) for name in ("a", "b")]
    core.ended.set()
    await asyncio.wait([llm.output_handler])
    for receiver in receivers:
        (error,) = receiver.errors
        assert isinstance(error, EngineDeadError), RELIES


async def test_an_output_that_cannot_be_taken_fails_its_request_alone() -> None:
    llm = engine(Core())
    other = await added(llm, "other")
    errors: list[Exception] = []
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, detokenize=False)
    prompt = {"type": "token", "prompt_token_ids": [1]}
    collector = await llm.add_request("r", prompt, params)
    receive_outputs(llm, collector, lambda output: {}[output.text], errors.append)
    for name in ("r", "other"):
        step(llm, 3, name=name)
    assert [type(error) for error in errors] == [KeyError]
    assert other.token_ids == [3]


async def test_a_dead_engine_takes_no_request() -> None:
    core = Core()
    core.resources.engine_dead = True
    with pytest.raises(EngineDeadError):
        await added(engine(core))
