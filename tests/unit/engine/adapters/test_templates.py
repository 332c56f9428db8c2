"""A template makes the requests that vLLM would make, and adds them as vLLM does."""

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor

from rheostat_engine import EXTRA_ARG, Plan, Window
from rheostat_engine.async_llm import request_template

MODEL = Path(__file__).parents[4] / "server" / "rheostat_server" / "demo_model"
RELIES = "rheostat_engine.adapters.templates relies on it"


class Llm:
    """Stands in for `AsyncLLM`; it only records added requests."""

    def __init__(self, inputs: InputProcessor) -> None:
        self.input_processor = inputs
        self.errored = False
        self.output_processor = OutputProcessor(None, log_stats=False)
        self.added: list[EngineCoreRequest] = []
        self.refuses = False
        self.validated = 0
        process = inputs.process_inputs

        def process_inputs(*arguments: Any, **keywords: Any) -> EngineCoreRequest:
            self.validated += 1
            return process(*arguments, **keywords)

        setattr(inputs, "process_inputs", process_inputs)  # noqa: B010  (mypy forbids the assignment)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def _run_output_handler(self) -> None:
        """Nothing to handle."""

    async def _add_request(
        self, request: EngineCoreRequest, prompt: None, parent: None, index: int, queue: object
    ) -> None:
        assert (prompt, parent, index) == (None, None, 0)
        self.output_processor.add_request(request, prompt, parent, index, queue)
        if self.refuses:
            raise EngineDeadError
        self.added.append(request)


@pytest.fixture(scope="module")
def config() -> Any:
    return AsyncEngineArgs(model=str(MODEL), enable_lora=True).create_engine_config()


@pytest.fixture
def llm(config: Any) -> Llm:
    return Llm(InputProcessor(config))


def params(**more: Any) -> SamplingParams:
    return SamplingParams(
        n=1, max_tokens=5, output_kind=RequestOutputKind.DELTA, skip_clone=True, **more
    )


ARMS = {
    "plain": (params(), None, 0),
    "drawn": (params(temperature=0.7, top_p=0.9, top_k=5, min_tokens=2), None, 0),
    "stops": (params(stop=["\n", "end"], stop_token_ids=[7, 8]), None, 0),
    "logprobs": (params(logprobs=3, prompt_logprobs=2, flat_logprobs=True), None, 0),
    "one token": (params(allowed_token_ids=[4], ignore_eos=True), None, 1),
    "adapter": (params(), LoRARequest("poet", 1, "/nowhere"), 0),
}


@pytest.mark.parametrize("arm", ARMS)
async def test_each_request_is_the_one_that_vllm_makes(llm: Llm, arm: str) -> None:
    wanted, lora, priority = ARMS[arm]
    template = request_template(wanted, lora, priority)
    prompts = [1, 2, 3], [4, 5], [6]
    for number, prompt in enumerate(prompts):
        extra = {"plan": number} if number else None
        await template.add(llm, f"r{number}", prompt, number or None, extra)
    assert llm.validated == 1
    for number, (request, prompt) in enumerate(zip(llm.added, prompts, strict=True)):
        own = wanted.clone()
        own.seed, own.extra_args = number or None, {"plan": number} if number else None
        stock = llm.input_processor.process_inputs(
            f"r{number}",
            tokens_input(prompt),
            own,
            ("generate",),
            lora_request=lora,
            priority=priority,
        )
        llm.input_processor.assign_request_id(stock)
        for field in EngineCoreRequest.__struct_fields__:
            if field not in ("arrival_time", "request_id"):
                assert getattr(request, field) == getattr(stock, field), (field, RELIES)
        assert request.request_id.startswith(f"r{number}-"), RELIES
        assert request.sampling_params.sampling_type == stock.sampling_params.sampling_type


async def test_parameters_that_vllm_refuses_are_refused_each_time(llm: Llm) -> None:
    template = request_template(params(stop_token_ids=[1 << 30]), None, 0)
    for _ in range(2):
        with pytest.raises(VLLMValidationError, match="stop_token_ids"):
            await template.add(llm, "r", [1], None, None)
    assert not llm.added


PLAN = Plan("r0", (), measured=False, window=Window(0, 1, 0)).pack().to_wire()
COPIES = [("r1", Window(1, 2, 0)), ("r2", Window(2, 3, 0))]


async def test_copies_are_known_to_vllm_and_sent_with_the_first(llm: Llm) -> None:
    template = request_template(params(), None, 1)
    collectors = await template.add(llm, "r0", [1, 2], None, {EXTRA_ARG: PLAN}, COPIES)
    (request,) = llm.added
    sent = request.sampling_params.extra_args["rheostat_copies"]
    assert [one[1:] for one in sent] == [("r1", 1, 2), ("r2", 2, 3)]
    names = [request.request_id, *(one[0] for one in sent)]
    assert [collector.request_id for collector in collectors] == names
    states = llm.output_processor.request_states
    assert [states[name].external_req_id for name in names] == ["r0", "r1", "r2"], RELIES
    assert [states[name].queue for name in names] == collectors, RELIES


@pytest.mark.parametrize("copies", [[], COPIES])
async def test_a_request_that_is_not_sent_is_forgotten_with_its_copies(
    llm: Llm, copies: list[tuple[str, Window]]
) -> None:
    llm.refuses = True
    with pytest.raises(EngineDeadError):
        await request_template(params(), None, 1).add(
            llm, "r0", [1, 2], None, {EXTRA_ARG: PLAN}, copies
        )
    assert not llm.output_processor.request_states


async def test_copies_of_a_message_that_left_before_a_cancel_can_be_aborted(
    llm: Llm, monkeypatch
) -> None:
    sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    add = llm._add_request

    async def add_and_wait(*arguments: Any) -> None:
        await add(*arguments)
        await sent

    monkeypatch.setattr(llm, "_add_request", add_and_wait)
    template = request_template(params(), None, 1)
    adding = asyncio.create_task(template.add(llm, "r0", [1, 2], None, {EXTRA_ARG: PLAN}, COPIES))
    while not llm.added:
        await asyncio.sleep(0)
    sent.set_result(None)
    adding.cancel()
    await asyncio.wait([adding])
    assert adding.cancelled()
    assert len(llm.output_processor.abort_requests(["r0", "r1", "r2"], internal=False)) == 3


async def test_a_dead_engine_takes_no_request(llm: Llm) -> None:
    llm.errored = True
    with pytest.raises(EngineDeadError):
        await request_template(params(), None, 0).add(llm, "r", [1], None, None)


def test_vllm_adds_requests_by_the_same_calls() -> None:
    source = inspect.getsource(AsyncLLM.add_request)
    for call in (
        "if self.errored:",
        "self.input_processor.process_inputs(",
        "self.input_processor.assign_request_id(request)",
        "self._run_output_handler()",
        "RequestOutputCollector(params.output_kind, request.request_id)",
        "await self._add_request(request, prompt_text, None, 0, queue)",
    ):
        assert call in source, RELIES
