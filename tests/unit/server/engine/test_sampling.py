"""Cached sampling settings equal those of a first message."""

from dataclasses import replace

import pytest

from rheostat_server.engine.sampling import SamplingSettings, resolve_sampling
from rheostat_server.errors import InvalidValue, NoTokenizer, PromptTooLong
from rheostat_wire.v1.generation_pb2 import Sampling

from ..fakes import INFO


def resolved(sampling: Sampling, prompt_len: int = 3, *, has_tokenizer: bool = True, model=INFO):
    return resolve_sampling(
        sampling,
        prompt_len=prompt_len,
        prompt_field="token_ids",
        model=model,
        has_tokenizer=has_tokenizer,
    )


def test_settings_of_equal_messages_are_equal() -> None:
    found = [resolved(Sampling(max_tokens=5, temperature=0.5, stop=["x"])) for _ in range(2)]
    assert found[0] == SamplingSettings(max_tokens=5, temperature=0.5, stop=("x",))
    assert found[1] is found[0]


def test_another_prompt_length_or_model_gives_other_settings() -> None:
    assert resolved(Sampling(), 3).max_tokens == INFO.model_tokens - 3
    assert resolved(Sampling(), 4).max_tokens == INFO.model_tokens - 4
    longer = replace(INFO, model_tokens=INFO.model_tokens + 1)
    assert resolved(Sampling(), 3, model=longer).max_tokens == INFO.model_tokens - 2


def test_a_refusal_comes_each_time() -> None:
    for _ in range(2):
        with pytest.raises(InvalidValue, match="top_p must be above 0"):
            resolved(Sampling(top_p=0))
        with pytest.raises(PromptTooLong):
            resolved(Sampling(), INFO.model_tokens)
    resolved(Sampling(stop=["y"]))
    with pytest.raises(NoTokenizer):
        resolved(Sampling(stop=["y"]), has_tokenizer=False)


def test_seeds_and_long_messages_are_read_each_time() -> None:
    assert [resolved(Sampling(seed=seed)).seed for seed in (0, 7)] == [0, 7]
    long = Sampling(stop=["x" * 200, "y" * 200])
    assert resolved(long).stop == ("x" * 200, "y" * 200)
    assert resolved(long) is not resolved(long)
