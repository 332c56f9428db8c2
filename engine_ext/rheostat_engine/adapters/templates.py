"""Adds requests whose sampling parameters vLLM has already validated.

Why
    For each request, `AsyncLLM.add_request` validates the parameters and completes them from the
    model's files, even if hundreds of requests have equal ones. It also validates the prompt, which
    the server has done. In a profile this took a quarter of the time of `add_request`.
How
    vLLM validates the first request of a template and makes an `EngineCoreRequest`. Each request is
    a copy of it with its own id, prompt, seed and plan. vLLM's own methods add the copy.
"""

import time
from collections.abc import Mapping, Sequence
from copy import copy

from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from rheostat_engine.adapters.request_copies import RequestCopy, with_copies
from rheostat_engine.plan.plan import Window

Params = SamplingParams
Lora = LoRARequest


class RequestTemplate:
    """Adds requests to an engine that differ only in id, prompt, seed and plan."""

    def __init__(
        self, params: SamplingParams, lora: LoRARequest | None = None, priority: int = 0
    ) -> None:
        """No request was added yet.

        Args:
            params: the requests' parameters, with `n=1`, `skip_clone` and `max_tokens`.
            lora: the requests' LoRA adapter.
            priority: the requests' priority in the scheduler.
        """
        self._params = params
        self._lora = lora
        self._priority = priority
        self._validated: EngineCoreRequest | None = None

    async def add(
        self,
        llm: AsyncLLM,
        request_id: str,
        token_ids: list[int],
        seed: int | None,
        extra_args: Mapping[str, object] | None,
        copies: Sequence[tuple[str, Window]] = (),
    ) -> list[RequestOutputCollector]:
        """Adds a request, as `AsyncLLM.add_request`.

        Args:
            llm: the engine, always the same one.
            request_id: its id.
            token_ids: its prompt. It must be valid: vLLM checks only the template's first prompt.
            seed: its seed.
            extra_args: its `SamplingParams.extra_args`.
            copies: the ids and plan windows of further requests, which otherwise equal this one.
                The same message adds them; see `request_copies`.

        Returns:
            The collectors of the request and of its copies, in this order. With copies, all
            collectors are empty, unless the message had to wait.

        Raises:
            EngineDeadError: the engine has died.
            VLLMValidationError: vLLM does not accept the parameters.
        """
        if llm.errored:
            raise EngineDeadError
        if self._validated is None:
            self._validated = llm.input_processor.process_inputs(
                request_id,
                tokens_input(token_ids),
                self._params,
                supported_tasks=await llm.get_supported_tasks(),
                lora_request=self._lora,
                priority=self._priority,
            )
            self._validated.prompt_token_ids = None  # a long prompt takes megabytes
        request = copy(self._validated)
        params = copy(request.sampling_params)
        assert params is not None  # only pooling requests have none
        params.seed = seed
        params.extra_args = None if extra_args is None else {**extra_args}
        request.sampling_params = params
        request.request_id = request_id
        request.prompt_token_ids = token_ids
        request.arrival_time = time.time()
        others = [copy(request) for _ in copies]  # the next call changes the request's ids
        llm.input_processor.assign_request_id(request)
        llm._run_output_handler()
        collectors = [RequestOutputCollector(params.output_kind, request.request_id)]
        sent_copies: list[RequestCopy] = []
        for other, (other_id, window) in zip(others, copies, strict=True):
            other.request_id = other_id
            llm.input_processor.assign_request_id(other)
            collector = RequestOutputCollector(params.output_kind, other.request_id)
            llm.output_processor.add_request(other, None, None, 0, collector)
            collectors.append(collector)
            sent_copies.append(RequestCopy(other.request_id, other_id, window.start, window.end))
        if sent_copies:
            request = with_copies(request, sent_copies)
        try:
            await llm._add_request(request, None, None, 0, collectors[0])
        except Exception:  # otherwise vLLM's output processor would keep them
            ids = [collector.request_id for collector in collectors]
            llm.output_processor.abort_requests(ids, internal=True)
            raise
        return collectors
