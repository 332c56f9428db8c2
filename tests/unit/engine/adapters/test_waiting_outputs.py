"""Tokens that wait for later ones, against the outputs that vLLM makes of the same tokens."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import cached_get_tokenizer
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists

from rheostat_engine.adapters import outputs
from rheostat_engine.async_llm import receive_outputs
from rheostat_engine.output import Output
from rheostat_server.engine.vllm_engine import DEMO_MODEL

RELIES = "rheostat_engine.adapters.outputs relies on it"

TOKENIZER = cached_get_tokenizer(str(DEMO_MODEL))


class Clock:
    """A pace, and the time that it goes by."""

    def __init__(self, interval: float = 1.0) -> None:
        self.interval = interval
        self.now = 100.0
        self.later: list[Callable[[], None]] = []

    def monotonic(self) -> float:
        return self.now

    def call_later(self, call: Callable[[], None]) -> None:
        self.later.append(call)

    def call(self) -> None:
        """Calls what waits to be called."""
        calls, self.later = self.later, []
        for call in calls:
            call()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(outputs, "time", clock)
    return clock


class Stream:
    """A request in an output processor of vLLM."""

    def __init__(self, pace: Clock | None = None, **params: Any) -> None:
        self.logprobs = "logprobs" in params
        self.processor = OutputProcessor(TOKENIZER, log_stats=False)
        sampling = SamplingParams(output_kind=RequestOutputKind.DELTA, max_tokens=999, **params)
        request = EngineCoreRequest(
            request_id="internal",
            external_req_id="r",
            prompt_token_ids=TOKENIZER.encode("Once upon a time"),
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.collector = RequestOutputCollector(sampling.output_kind, "internal")
        self.processor.add_request(request, None, None, 0, self.collector)
        self.received: list[Output] = []
        self.errors: list[Exception] = []
        if pace is not None:
            llm: Any = SimpleNamespace(output_processor=self.processor)
            receive_outputs(llm, self.collector, self.received.append, self.errors.append, pace)

    def step(
        self, *tokens: int, reason: FinishReason | None = None, stop: int | None = None
    ) -> bool:
        """Reports tokens. Returns whether the request has ended."""
        output = EngineCoreOutput("internal", list(tokens), finish_reason=reason, stop_reason=stop)
        if self.logprobs:
            ids = np.array(tokens, np.int32)
            output.new_logprobs = LogprobsLists(
                ids[:, None], ids[:, None] / np.float32(-8), np.ones_like(ids)
            )
        self.processor.process_outputs([output])
        return not self.processor.has_unfinished_requests()

    @property
    def waiting(self) -> list[int]:
        """The tokens of each output that was received."""
        return [len(output.token_ids) for output in self.received]


def test_the_first_token_does_not_wait_and_later_ones_wait_for_the_interval(clock) -> None:
    stream = Stream(clock)
    for token in range(60, 63):
        stream.step(token)
        clock.now += 0.4
    assert stream.waiting == [1]
    stream.step(63)
    assert stream.waiting == [1, 3]
    assert [token for output in stream.received for token in output.token_ids] == [60, 61, 62, 63]


def test_the_last_token_brings_those_that_wait(clock) -> None:
    stream = Stream(clock)
    for token in range(60, 63):
        stream.step(token)
    stream.step(63, reason=FinishReason.LENGTH)
    assert stream.waiting == [1, 3]
    assert stream.received[-1].finish_reason == "length"
    clock.now += 9
    clock.call()
    assert stream.waiting == [1, 3]


def test_an_abort_brings_those_that_wait(clock) -> None:
    stream = Stream(clock)
    stream.step(60)
    stream.step(61)
    stream.processor.abort_requests(["r"], internal=False)
    assert stream.waiting == [1, 1]
    assert [output.finish_reason for output in stream.received] == [None, "abort"], RELIES


def test_tokens_do_not_wait_for_ever_if_no_more_come(clock) -> None:
    stream = Stream(clock)
    for token in range(60, 63):
        stream.step(token)
    assert len(clock.later) == 1
    clock.now += 0.5
    clock.call()
    assert stream.waiting == [1], "it was called too early, and asks to be called again"
    clock.now += 1.5
    clock.call()
    assert stream.waiting == [1, 2]
    assert not clock.later


def test_no_pause_no_wait(clock) -> None:
    clock.interval = 0.0
    stream = Stream(clock)
    for token in range(60, 63):
        stream.step(token)
    assert stream.waiting == [1, 1, 1]


def test_few_tokens_wait_at_most(clock) -> None:
    clock.interval = 1e9
    stream = Stream(clock, logprobs=0)
    for token in range(60, 160):
        stream.step(token)
    assert max(stream.waiting) <= 32, "the engine forgets older log-probabilities"
    read = [next(iter(one)) for output in stream.received for one in output.logprobs or ()]
    assert read == [token for output in stream.received for token in output.token_ids]


def test_tokens_that_wait_are_not_decoded(clock, monkeypatch) -> None:
    stream = Stream(clock)
    stream.step(60)
    detokenizer: Any = stream.processor.request_states["internal"].detokenizer
    assert detokenizer.num_output_tokens() == 1
    stream.step(61)
    assert detokenizer.num_output_tokens() == 2
    assert detokenizer._detokenizer.num_output_tokens() == 1


def test_an_error_fails_the_request_alone(clock, monkeypatch) -> None:
    stream, other = Stream(clock), Stream(clock)

    def broken(output: Output) -> None:
        raise KeyError(output.text)

    llm: Any = SimpleNamespace(output_processor=stream.processor)
    receive_outputs(llm, stream.collector, broken, stream.errors.append, clock)
    stream.step(60)
    other.step(60)
    assert [type(error) for error in stream.errors] == [KeyError]
    assert other.waiting == [1]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"logprobs": 0},
    {"stop": ["the", "zz"]},
    {"stop": ["a"], "include_stop_str_in_output": True},
    {"stop": ["e"], "min_tokens": 12},
    {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    {"detokenize": False},
]


@pytest.mark.parametrize("params", SETTINGS, ids=str)
@pytest.mark.parametrize("reason", list(FinishReason)[:3], ids=str)
@pytest.mark.parametrize("interval", [0.0, 1.0])
def test_what_is_received_is_what_vllm_makes(clock, params, reason, interval) -> None:
    rng = np.random.default_rng(crc32(f"{params} {reason} {interval}".encode()))
    clock.interval = interval
    for _ in range(20):
        ours, stock = Stream(clock, **params), Stream(**params)
        made = []
        for number in range(40):
            tokens = rng.integers(0, len(TOKENIZER), rng.integers(1, 3)).tolist()
            last = reason if number == 39 else None
            stop = tokens[-1] if last is FinishReason.STOP else None
            ended = ours.step(*tokens, reason=last, stop=stop)
            assert stock.step(*tokens, reason=last, stop=stop) == ended, RELIES
            made.append(stock.collector.get_nowait())
            clock.now += float(rng.random())
            if rng.random() < 0.1:
                clock.call()
            if ended:
                break
        completions = [output.outputs[0] for output in made if output is not None]
        assert [token for output in ours.received for token in output.token_ids] == [
            token for completion in completions for token in completion.token_ids
        ]
        text = "".join(output.text for output in ours.received)
        assert text == "".join(completion.text for completion in completions), RELIES
        last_one, last_stock = ours.received[-1], completions[-1]
        assert last_one.finish_reason == last_stock.finish_reason is not None
        assert last_one.stop_reason == last_stock.stop_reason
        if "logprobs" in params:
            assert [one for output in ours.received for one in output.logprobs or ()] == [
                one for completion in completions for one in completion.logprobs or ()
            ]
        assert not ours.errors
