"""Keeps a `RequestTemplate` for each combination of sampling settings, adapter and priority."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

from rheostat_engine import request_template
from rheostat_server.engine.backend import Job
from rheostat_server.engine.loras import Lora
from rheostat_server.engine.sampling import SamplingSettings

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.exceptions import EngineDeadError

    from rheostat_engine import RequestTemplate

_MOST_TEMPLATES = 256
"""The most `RequestTemplate`s that are kept. The least recently used is dropped first."""


class RequestTemplates:
    """Makes a template when it is first needed, and keeps at most `_MOST_TEMPLATES`."""

    def __init__(self, loras: Mapping[str, Lora], *, has_tokenizer: bool) -> None:
        """Starts without templates.

        Args:
            loras: the engine's adapters, by name.
            has_tokenizer: whether tokens can be decoded.
        """
        self._loras = loras
        self._has_tokenizer = has_tokenizer
        self._template = lru_cache(_MOST_TEMPLATES)(self._make)

    def of(self, job: Job) -> "RequestTemplate":
        """The template for requests with the same settings, adapter and priority as a sample."""
        sampling = job.sampling
        if sampling.seed is not None or sampling.samples != 1:
            # Such requests share a template: `RequestTemplate.add` sets the seed of each, and
            # each sample is a vLLM request. vLLM itself reads only whether there is a seed.
            sampling = replace(sampling, seed=None if sampling.seed is None else 0, samples=1)
        first = job.sample == 0 and sampling.prompt_logprobs is not None
        return self._template(sampling, first, job.lora, job.background)

    def _make(
        self, sampling: SamplingSettings, first: bool, lora: str, background: bool
    ) -> "RequestTemplate":
        """Makes a template for requests that are equal in all arguments.

        `first`: whether they get log-probabilities of the prompt. Only a first sample does.
        """
        params = _sampling_params(sampling, first, sampling.text and self._has_tokenizer)
        adapter = lora_request(self._loras[lora]) if lora else None
        return request_template(params, adapter, int(background))


def _sampling_params(settings: SamplingSettings, first: bool, detokenize: bool) -> "SamplingParams":
    """The parameters of a sample, without its plan."""
    vllm = _vllm_names()
    return vllm.SamplingParams(
        n=1,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=settings.min_p,
        max_tokens=settings.max_tokens,
        min_tokens=settings.min_tokens,
        stop=list(settings.stop),
        stop_token_ids=list(settings.stop_token_ids),
        seed=settings.seed,
        logprobs=settings.logprobs,
        prompt_logprobs=settings.prompt_logprobs if first else None,
        repetition_penalty=settings.repetition_penalty,
        presence_penalty=settings.presence_penalty,
        frequency_penalty=settings.frequency_penalty,
        ignore_eos=settings.ignore_eos,
        allowed_token_ids=None if settings.only_token is None else [settings.only_token],
        detokenize=detokenize,
        output_kind=vllm.RequestOutputKind.DELTA,
        flat_logprobs=settings.prompt_logprobs is not None,
        skip_clone=True,
    )


def lora_request(lora: Lora) -> "LoRARequest":
    """vLLM's object for an adapter: its name, number and path."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora.name, lora.number, lora.path)


def engine_dead_error() -> "type[EngineDeadError]":
    """The class of the error that vLLM raises if the engine has died."""
    return _vllm_names().EngineDeadError


class _VllmNames(NamedTuple):
    """The classes of vLLM that each request needs."""

    SamplingParams: "type[SamplingParams]"
    RequestOutputKind: "type[RequestOutputKind]"
    EngineDeadError: "type[EngineDeadError]"


@cache
def _vllm_names() -> _VllmNames:
    """Imports these classes once, because importing a name from vLLM is a slow look-up."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.exceptions import EngineDeadError

    return _VllmNames(SamplingParams, RequestOutputKind, EngineDeadError)
