"""How tokens are sampled: the request's settings with every default filled in."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rheostat_server import validation
from rheostat_server.config import ModelInfo
from rheostat_server.errors import InvalidValue, MissingField, NoTokenizer, PromptTooLong
from rheostat_server.limits import (
    PROMPT_LOGPROBS,
    SAMPLED_PROMPT_TOKENS,
    SAMPLES,
    STOP_TEXT_BYTES,
    STOP_TEXTS,
    STOP_TOKEN_IDS,
)
from rheostat_server.validation import field_path, optional_number
from rheostat_wire.v1 import generation_pb2

_PATH = "sampling"
_SEED_END = 2**63
_CACHED = 1024
"""The most settings in the cache, by message and length of the prompt."""
_CACHED_BYTES = 256
"""The most bytes of a message whose settings are cached."""
_LEAST_TEMPERATURE = 0.01
"""vLLM silently raises lower temperatures to this one."""
_LEAST_FLOAT32 = float(np.float32(_LEAST_TEMPERATURE))
"""The same as a message has it."""


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """Settings of every sample of a request; see `Sampling` in generation.proto."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    samples: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    ignore_eos: bool = False
    only_token: int | None = None
    """The only token that may be sampled. Its log-probability is that of the whole distribution."""
    text: bool = True
    """Whether deltas have text. For a cell of a sweep, decoding would take a tenth of the server's
    time. Most of it is for the end of the prompt, on which the first token's text depends."""

    def seed_of(self, sample: int) -> int | None:
        """Seed of one sample."""
        return None if self.seed is None else (self.seed + sample) % _SEED_END


def resolve_sampling(
    sampling: generation_pb2.Sampling,
    *,
    prompt_len: int,
    prompt_field: str,
    model: ModelInfo,
    has_tokenizer: bool,
) -> SamplingSettings:
    """The settings of a request.

    Args:
        sampling: the message; empty if absent.
        prompt_len: tokens of the prompt.
        prompt_field: the field of the prompt, for errors.
        model: its limits apply.
        has_tokenizer: whether stop texts can be used.

    Raises:
        InvalidArgument: a value is outside its limits.
        NoTokenizer: there are stop texts and no tokenizer.
    """
    if sampling.HasField("seed"):  # seeds mostly differ, so caching would not help
        return _resolved(sampling, prompt_len, prompt_field, model, has_tokenizer)
    encoded = sampling.SerializeToString()
    if len(encoded) > _CACHED_BYTES:
        return _resolved(sampling, prompt_len, prompt_field, model, has_tokenizer)
    return _cached(encoded, prompt_len, prompt_field, model, has_tokenizer)


@lru_cache(maxsize=_CACHED)
def _cached(
    encoded: bytes, prompt_len: int, prompt_field: str, model: ModelInfo, has_tokenizer: bool
) -> SamplingSettings:
    """The settings of an encoded message, from the cache if it was checked before."""
    sampling = generation_pb2.Sampling.FromString(encoded)
    return _resolved(sampling, prompt_len, prompt_field, model, has_tokenizer)


def _resolved(
    sampling: generation_pb2.Sampling,
    prompt_len: int,
    prompt_field: str,
    model: ModelInfo,
    has_tokenizer: bool,
) -> SamplingSettings:
    max_tokens = _max_tokens(sampling, prompt_len, prompt_field, model.model_tokens)
    temperature = _temperature(sampling)
    samples = _samples(sampling, prompt_len, temperature)
    if sampling.min_tokens > max_tokens:
        limits = f"at most max_tokens, which is {max_tokens}"
        raise _refused("min_tokens", limits, sampling.min_tokens)
    if sampling.seed >= _SEED_END:
        raise _refused("seed", "below 2^63", sampling.seed)
    top_p = optional_number(sampling, "top_p", _PATH, 1.0)
    if not 0 < top_p <= 1:
        raise _refused("top_p", "above 0 and at most 1", top_p)
    repetition = optional_number(sampling, "repetition_penalty", _PATH, 1.0)
    if repetition <= 0:
        raise _refused("repetition_penalty", "above 0", repetition)
    return SamplingSettings(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=sampling.top_k if sampling.top_k < model.vocabulary else 0,
        min_p=_within(sampling, "min_p", 0.0, 1.0),
        min_tokens=sampling.min_tokens,
        stop=_stop(sampling, has_tokenizer),
        stop_token_ids=_stop_token_ids(sampling, model.vocabulary),
        seed=sampling.seed if sampling.HasField("seed") else None,
        samples=samples,
        logprobs=_logprobs(sampling, "logprobs", model.logprobs),
        prompt_logprobs=_prompt_logprobs(sampling, prompt_len, model.logprobs),
        repetition_penalty=repetition,
        presence_penalty=_within(sampling, "presence_penalty", -2.0, 2.0),
        frequency_penalty=_within(sampling, "frequency_penalty", -2.0, 2.0),
        ignore_eos=sampling.ignore_eos,
    )


def _max_tokens(
    sampling: generation_pb2.Sampling, prompt_len: int, prompt_field: str, limit: int
) -> int:
    left = limit - prompt_len
    if left < 1:
        raise PromptTooLong(
            f"the prompt has {prompt_len} tokens; the context holds {limit}, and one must be left "
            "to generate",
            field=prompt_field,
        )
    if not sampling.HasField("max_tokens"):
        return left
    field = field_path(_PATH, "max_tokens")
    if sampling.max_tokens < 1:
        raise _refused("max_tokens", "at least 1", sampling.max_tokens)
    if sampling.max_tokens > left:
        raise PromptTooLong(
            f"the prompt has {prompt_len} tokens and the context holds {limit}: at most {left} "
            "can be generated",
            field=field,
        )
    return sampling.max_tokens


def _samples(sampling: generation_pb2.Sampling, prompt_len: int, temperature: float) -> int:
    field = field_path(_PATH, "n")
    samples = sampling.n if sampling.HasField("n") else 1
    if not 1 <= samples <= SAMPLES:
        raise _refused("n", f"1 to {SAMPLES}", samples)
    if samples > 1 and temperature == 0:
        raise InvalidValue("greedy sampling gives one sample only", field=field)
    copied = samples * prompt_len
    if samples > 1 and copied > SAMPLED_PROMPT_TOKENS:
        raise InvalidValue(
            f"{samples} samples of a prompt of {prompt_len} tokens are {copied} tokens; at most "
            f"{SAMPLED_PROMPT_TOKENS} are allowed",
            field=field,
        )
    return samples


def _temperature(sampling: generation_pb2.Sampling) -> float:
    temperature = optional_number(sampling, "temperature", _PATH, 1.0)
    if temperature != 0 and not _LEAST_FLOAT32 <= temperature <= 2:
        limits = f"0, which is greedy, or {_LEAST_TEMPERATURE:g} to 2"
        raise _refused("temperature", limits, temperature)
    return max(temperature, _LEAST_TEMPERATURE) if temperature else 0.0


def _refused(name: str, limits: str, value: float) -> InvalidValue:
    """The error of a number that is outside its limits."""
    given = f"{value:g}" if isinstance(value, float) else str(value)
    return InvalidValue(f"{name} must be {limits}, not {given}", field=field_path(_PATH, name))


def _within(sampling: generation_pb2.Sampling, name: str, low: float, high: float) -> float:
    """A number from `low` to `high`; 0 if absent."""
    value = optional_number(sampling, name, _PATH, 0.0)
    if not low <= value <= high:
        raise _refused(name, f"{low:g} to {high:g}", value)
    return value


def _logprobs(sampling: generation_pb2.Sampling, name: str, limit: int) -> int | None:
    if not sampling.HasField(name):  # type: ignore[arg-type]  # the callers' names are fields
        return None
    value = int(getattr(sampling, name))
    if value > limit:
        raise _refused(name, f"at most {limit}", value)
    return value


def _prompt_logprobs(sampling: generation_pb2.Sampling, prompt_len: int, limit: int) -> int | None:
    name = "prompt_logprobs"
    wanted = _logprobs(sampling, name, limit)
    listed = prompt_len * ((wanted or 0) + 1)
    if wanted and listed > PROMPT_LOGPROBS:
        raise InvalidValue(
            f"{wanted + 1} log-probabilities for each of {prompt_len} tokens are {listed}; at most "
            f"{PROMPT_LOGPROBS} are allowed",
            field=field_path(_PATH, name),
        )
    return wanted


def _stop(sampling: generation_pb2.Sampling, has_tokenizer: bool) -> tuple[str, ...]:
    field = field_path(_PATH, "stop")
    validation.check_count(len(sampling.stop), STOP_TEXTS, field, "stop texts")
    for index, text in enumerate(sampling.stop):
        if not text:
            raise MissingField("a stop text may not be empty", field=f"{field}[{index}]")
        validation.text_bytes(text, STOP_TEXT_BYTES, f"{field}[{index}]")
    if sampling.stop and not has_tokenizer:
        raise NoTokenizer("this server has no tokenizer; send stop_token_ids", field=field)
    return tuple(sampling.stop)


def _stop_token_ids(sampling: generation_pb2.Sampling, vocabulary: int) -> tuple[int, ...]:
    field = field_path(_PATH, "stop_token_ids")
    validation.check_count(len(sampling.stop_token_ids), STOP_TOKEN_IDS, field, "stop tokens")
    if sampling.stop_token_ids:
        validation.token_ids(sampling.stop_token_ids, vocabulary, field)
    return tuple(sampling.stop_token_ids)
