"""Keeps a `RequestTemplate` for each combination of sampling settings, adapter and priority."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from rheostat_engine import request_template
from rheostat_server.engine.backend import Job
from rheostat_server.engine.loras import Lora
from rheostat_server.engine.sampling import SamplingSettings

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError

    from rheostat_engine import RequestTemplate

_MOST_TEMPLATES = 256
"""The most `RequestTemplate`s that are kept. The oldest is dropped first."""


class RequestTemplates:
    """Makes a template when it is first needed, and keeps at most `_MOST_TEMPLATES`."""

    def __init__(self, llm: "AsyncLLM", loras: Mapping[str, Lora]) -> None:
        """Starts without templates.

        Args:
            llm: the engine.
            loras: its adapters, by name.
        """
        self._llm = llm
        self._loras = loras
        self._templates: dict[_TemplateKey, RequestTemplate] = {}

    def __len__(self) -> int:
        """Number of templates that are kept."""
        return len(self._templates)

    def of(self, job: Job) -> "RequestTemplate":
        """The template for requests with the same settings, adapter and priority as a sample."""
        sampling = job.sampling
        if sampling.seed is not None or sampling.samples != 1:
            # Such requests share a template: `RequestTemplate.add` sets the seed of each, and
            # each sample is a vLLM request. vLLM itself reads only whether there is a seed.
            sampling = replace(sampling, seed=None if sampling.seed is None else 0, samples=1)
        first = job.sample == 0 and sampling.prompt_logprobs is not None
        key = _TemplateKey(sampling, first, job.lora, job.background)
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) >= _MOST_TEMPLATES:
                del self._templates[next(iter(self._templates))]
            lora = lora_request(self._loras[job.lora]) if job.lora else None
            detokenize = sampling.text and self._llm.tokenizer is not None
            params = _sampling_params(sampling, key.first, detokenize)
            template = request_template(params, lora, int(job.background))
            self._templates[key] = template
        return template


class _TemplateKey(NamedTuple):
    """The fields in which all requests of a template are equal."""

    sampling: SamplingSettings
    first: bool
    """Whether they get log-probabilities of the prompt. Only a first sample does."""
    lora: str
    background: bool


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
