"""Requests whose parameters vLLM has checked before are the same as those that vLLM makes."""

from copy import copy
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.v1.engine.input_processor import InputProcessor

from rheostat_engine import check_params_once, mark_copy

_LENGTH = 64


class Counting(InputProcessor):
    """vLLM's input processor without a model, which counts the requests that it makes."""

    def __init__(self) -> None:
        self.made = 0
        self.model_config: Any = SimpleNamespace(max_model_len=_LENGTH)
        self.vllm_config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(
                data_parallel_size=1, data_parallel_size_local=1, local_engines_only=False
            ),
            watermark_config=None,
        )
        self.generation_config_fields = {"eos_token_id": [7, 8]}
        self.renderer: Any = SimpleNamespace(get_eos_token_id=lambda: 7, tokenizer=None)

    def _validate_params(self, params: Any, supported_tasks: Any) -> bool:
        self.made += 1
        return False

    def _validate_lora(self, lora_request: Any) -> None: ...

    def _validate_model_inputs(self, encoder_input: Any, decoder_input: Any) -> None: ...


def processors() -> tuple[Counting, Counting]:
    """One that checks parameters once, and a stock one."""
    once = Counting()
    check_params_once(SimpleNamespace(input_processor=once))
    return once, Counting()


def request(processor: Counting, params: SamplingParams, prompt: list[int], **others: Any) -> Any:
    given = {"supported_tasks": ("generate",), "lora_request": None, "priority": 0, **others}
    made = processor.process_inputs("a", tokens_input(prompt), params, **given)
    assert made.arrival_time > 0
    made.arrival_time = 0.0
    return made


def parts(made: Any) -> tuple[bytes, Any]:
    """What reaches the engine, and what vLLM keeps."""
    params = made.sampling_params
    return msgspec.msgpack.encode(made), (
        params.eos_token_id,
        params.all_stop_token_ids,
        params._watermarking_skipped,
    )


@pytest.mark.parametrize("ignore_eos", [True, False])
def test_later_requests_are_those_of_vllm(ignore_eos: bool) -> None:
    once, stock = processors()
    kept = SamplingParams(max_tokens=1, logprobs=1, ignore_eos=ignore_eos, skip_clone=True)
    for number in range(4):
        prompt, made = [*range(1, 3 + number)], []
        for processor in (once, stock):
            params = copy(kept)
            mark_copy(params, kept)
            params.extra_args = {"rheostat": bytes([number])} if number else None
            params.seed = number or None
            made.append(parts(request(processor, params, prompt, priority=number % 2)))
        assert made[0] == made[1]
    assert (once.made, stock.made) == (1, 4)


def test_parameters_of_a_request_are_its_own() -> None:
    once, _ = processors()
    kept = SamplingParams(max_tokens=1, skip_clone=True)
    made = []
    for number in range(3):
        params = copy(kept)
        mark_copy(params, kept)
        params.extra_args = {"rheostat": number}
        made.append(request(once, params, [1]).sampling_params)
    assert [one.extra_args["rheostat"] for one in made] == [0, 1, 2]


def test_vllm_makes_all_other_requests() -> None:
    once, _ = processors()
    kept = SamplingParams(max_tokens=1, skip_clone=True)
    for _ in range(2):  # not marked
        request(once, copy(kept), [1])
    assert once.made == 2
    for others in ({}, {}, {"lora_request": "x"}, {"lora_request": "x"}):
        params = copy(kept)
        mark_copy(params, kept)
        request(once, params, [1], **others)
    assert once.made == 5
    for length in (_LENGTH - 1, _LENGTH, _LENGTH + 1):
        params = copy(kept)
        mark_copy(params, kept)
        request(once, params, [1] * length)
    assert once.made == 7


def test_each_of_many_parameters_is_checked() -> None:
    once, _ = processors()
    for number in range(600):
        kept = SamplingParams(max_tokens=1 + number, skip_clone=True)
        for _ in range(2):
            params = copy(kept)
            mark_copy(params, kept)
            assert request(once, params, [1]).sampling_params.max_tokens == 1 + number
    assert once.made == 600
