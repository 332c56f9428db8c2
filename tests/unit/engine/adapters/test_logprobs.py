"""vLLM reads log-probabilities without decoding or keeping them; generated text stays decoded."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, output_processor
from vllm.v1.engine import detokenizer as vllm_detokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors

from rheostat_engine.adapters.detokenizer import LastTokensDetokenizer
from rheostat_engine.async_llm import prepare_async_llm
from rheostat_server.engine.vllm_engine import DEMO_MODEL

RELIES = "rheostat_engine.adapters.logprobs relies on it"


@pytest.fixture(autouse=True)
def _prepared() -> Iterator[None]:
    stock = output_processor.LogprobsProcessor
    assert stock is LogprobsProcessor, RELIES
    decoder = vllm_detokenizer.FastIncrementalDetokenizer
    prepare_async_llm()
    assert vllm_detokenizer.FastIncrementalDetokenizer is LastTokensDetokenizer
    yield
    output_processor.LogprobsProcessor = stock
    vllm_detokenizer.FastIncrementalDetokenizer = decoder


class Counting:
    """A tokenizer that counts how often it decodes."""

    def __init__(self) -> None:
        self.inner = AutoTokenizer.from_pretrained(DEMO_MODEL)
        self.decodes = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def decode(self, *args: object, **kwargs: object) -> str:
        self.decodes += 1
        return self.inner.decode(*args, **kwargs)


def asked(prompt: list[int], params: SamplingParams) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r",
        external_req_id="r",
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def test_nothing_of_a_list_of_logprobs_is_decoded() -> None:
    tokenizer = Counting()
    prompt = tokenizer.inner("The Eiffel Tower is in")["input_ids"]
    (paris,) = tokenizer.inner(" Paris", add_special_tokens=False)["input_ids"]
    params = SamplingParams(logprobs=2, prompt_logprobs=2, flat_logprobs=True, max_tokens=1)
    request = asked(prompt, params)
    processor = OutputProcessor(tokenizer, log_stats=False)
    processor.add_request(request, prompt=None)
    rows = len(prompt) - 1
    listed = np.arange(3 * rows, dtype=np.int32).reshape(rows, 3)
    listed[:, 0] = prompt[1:]
    output = EngineCoreOutput(
        request_id="r",
        new_token_ids=[paris],
        new_logprobs=LogprobsLists(
            np.array([[paris, 7, 8]]), np.array([[-0.1, -1.0, -2.0]]), np.array([1])
        ),
        new_prompt_logprobs_tensors=LogprobsTensors(
            torch.from_numpy(listed), torch.zeros(rows, 3), torch.ones(rows, dtype=torch.int32)
        ),
        finish_reason="length",
    )
    tokenizer.decodes = 0
    (answer,) = processor.process_outputs([output]).request_outputs
    assert answer.outputs[0].text == " Paris"
    assert tokenizer.decodes == 0, RELIES
    generated, reading = answer.outputs[0].logprobs[0], answer.prompt_logprobs[1]
    assert {one: entry.decoded_token for one, entry in generated.items()} == dict.fromkeys(
        (paris, 7, 8)
    )
    assert {entry.decoded_token for entry in reading.values()} == {None}
    assert generated[paris].logprob == pytest.approx(-0.1)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
def test_logprobs_that_were_given_out_are_not_kept(flat: bool, kind: RequestOutputKind) -> None:
    delta = kind is RequestOutputKind.DELTA
    params = SamplingParams(logprobs=2, flat_logprobs=flat, max_tokens=1000, output_kind=kind)
    processor = OutputProcessor(Counting(), log_stats=False)
    processor.add_request(asked([1, 2], params), prompt=None)
    made, given, most = 0, 0, 0
    while made < 600:
        count = 1 + made % 5  # several tokens in a step, as with speculative decoding
        new = [3 + (made + k) % 100 for k in range(count)]
        lists = LogprobsLists(
            np.array([[one, 7 + 100, 8 + 100] for one in new]),
            np.array([[-0.5, -1.0, -2.0]] * count),
            np.ones(count, dtype=np.int64),
        )
        output = EngineCoreOutput(request_id="r", new_token_ids=new, new_logprobs=lists)
        (answer,) = processor.process_outputs([output]).request_outputs
        made += count
        listed = answer.outputs[0].logprobs
        assert [next(iter(one)) for one in listed][-count:] == new, RELIES
        given += len(listed) if delta else count
        most = max(most, len(processor.request_states["r"].logprobs_processor.logprobs))
        assert answer.outputs[0].cumulative_logprob == pytest.approx(-0.5 * made)
    assert given == made
    assert (most < 100) is delta, RELIES
