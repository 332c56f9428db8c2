"""Requests with equal sampling parameters, of which vLLM checks and completes only the first.

Why
    vLLM checks the parameters of each request against the model, copies them, and completes them
    from the model's generation config. This takes a sixth of `AsyncLLM.add_request`, and thousands
    of cells of a sweep differ only in their plans.
How
    The server copies parameters that it keeps, and marks the copy; see `kept_params`. A copy
    differs only in its seed and its extra arguments, which vLLM does not check. So its request
    gets a copy of the parameters that vLLM has completed for the first request.

Invariant: the request is the same as the one that vLLM would make. The server has checked the
tokens of prompts. Requests with an adapter, and prompts that may be too long, are vLLM's.
"""

import time
from collections.abc import Callable
from copy import copy
from typing import Any, cast

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM

from rheostat_engine.kept_params import KEPT_PARAMS

_PROCESS = "process_inputs"
_MOST = 256
"""The most completed parameters that are kept."""

_Process = Callable[..., EngineCoreRequest]  # as `InputProcessor.process_inputs`

Engine = AsyncLLM


def check_params_once(llm: Engine) -> None:
    """Makes an engine check parameters that are kept only once."""
    processor = llm.input_processor
    most_tokens = processor.model_config.max_model_len - 1
    setattr(processor, _PROCESS, _Checked(processor.process_inputs, most_tokens))


class _Checked:
    """Takes the place of `InputProcessor.process_inputs`."""

    def __init__(self, stock: _Process, most_tokens: int) -> None:
        """No parameters were checked. Longer prompts are vLLM's."""
        self._stock = stock
        self._most_tokens = most_tokens
        self._completed: dict[int, tuple[SamplingParams, SamplingParams]] = {}
        """By `id`, the parameters that are kept, and those that vLLM has completed."""

    def __call__(
        self,
        request_id: str,
        prompt: dict[str, Any],  # vLLM's own type
        params: SamplingParams,
        **others: Any,  # vLLM's own arguments
    ) -> EngineCoreRequest:
        """Makes a request."""
        kept = getattr(params, KEPT_PARAMS, None)
        token_ids = prompt.get("prompt_token_ids") if type(prompt) is dict else None
        if (
            kept is None
            or not token_ids
            or prompt["type"] != "token"
            or len(token_ids) > self._most_tokens
            or others.get("lora_request") is not None
        ):
            return self._stock(request_id, prompt, params, **others)
        completed = self._completed.get(id(kept))
        if completed is None:
            request = self._stock(request_id, prompt, params, **others)
            if len(self._completed) == _MOST:
                self._completed.clear()
            made = cast(SamplingParams, request.sampling_params)
            self._completed[id(kept)] = kept, copy(made)
            return request
        own = copy(completed[1])
        own.seed, own.extra_args = params.seed, params.extra_args
        return EngineCoreRequest(
            request_id,
            token_ids,
            None,
            own,
            None,
            prompt.get("arrival_time", time.time()),
            None,
            prompt.get("cache_salt"),
            None,
            priority=others["priority"],
        )
