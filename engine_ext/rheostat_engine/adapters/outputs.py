"""Passes the outputs of a request to a function: no task, and no object of vLLM for each token.

Why
    `AsyncLLM.generate` needs a task for each request, and vLLM makes a `RequestOutput` with a
    `CompletionOutput` and the text of each token, even if hundreds of streams send the tokens of
    several steps in one message.
How
    `AsyncLLM.add_request` validates and sends the request. Then the request's state in the output
    processor gets another `make_request_output`, which calls the function in place of making a
    `RequestOutput`. Everything else is vLLM's: the output handler, the detokenizer, and `abort`.
Tokens that wait
    With a `Pace`, tokens wait for later ones. Unless the request has stop texts, they are decoded
    only once they are passed on. The first token, the last one and an error never wait.
What the function must not do
    The output processor calls it while iterating over the running requests. So it must not abort a
    request before it returns.
"""

import time
from collections.abc import Callable
from typing import Protocol, cast

from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.v1.engine import FinishReason
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, IncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector, RequestState

from rheostat_engine.output import Output, Pace, Receive

Collector = RequestOutputCollector


class Client(Protocol):
    """The part of `AsyncLLM` that is used here."""

    output_processor: OutputProcessor


_MOST_WAITING = 16
"""Tokens that may wait. The engine keeps the log-probabilities of the last 32."""


def receive_outputs(
    llm: Client,
    collector: Collector,
    receive: Receive,
    fail: Callable[[Exception], None],
    pace: Pace | None = None,
) -> None:
    """Calls a function with each output of a request, including already queued outputs.

    Args:
        llm: runs the request.
        collector: from `AsyncLLM.add_request`. No `await` may come between the two calls.
        receive: called with each output. Its exceptions are passed to `fail`.
        fail: called with an exception of the engine. It must not raise.
        pace: lets tokens wait for later ones. None: every token is passed on at once.
    """

    def put(output: RequestOutput | PoolingRequestOutput | Exception) -> None:
        if isinstance(output, Exception):
            fail(output)
        else:
            _call(receive, fail, _read(cast(RequestOutput, output)))

    before = collector.output
    collector.output = None
    collector.put = put
    state = llm.output_processor.request_states.get(collector.request_id)
    if state is not None:
        _Reader(state, receive, fail, pace)
    if before is not None:
        put(before)


class _Reader:
    """Passes on what the output processor reports about a request."""

    def __init__(
        self,
        state: RequestState,
        receive: Receive,
        fail: Callable[[Exception], None],
        pace: Pace | None,
    ) -> None:
        """Takes the place of the `make_request_output` of a request's state."""
        self._receive = receive
        self._fail = fail
        self._pace = pace
        self._waiting: list[int] = []
        """Tokens that wait for later ones."""
        self._passed_on = float("-inf")
        """When tokens were passed on last."""
        self._called_later = False
        """Whether the pace will call `_pass_on_late`."""
        self._state: RequestState | None = state
        detokenizer = state.detokenizer
        stops = isinstance(detokenizer, BaseIncrementalDetokenizer) and detokenizer.stop
        if pace is not None and detokenizer is not None and not stops:
            state.detokenizer = _LateDetokenizer(detokenizer)
        state.make_request_output = self._take

    def _take(
        self,
        new_token_ids: list[int],
        pooling_output: object,
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
        kv_transfer_params: object = None,
        ec_transfer_params: object = None,
        error: object = None,
    ) -> None:
        """Takes new tokens. Called by the output processor, which makes no output then."""
        pace = self._pace
        if pace is not None and finish_reason is None and pace.interval:
            now = time.monotonic()
            if now < self._passed_on + pace.interval and len(self._waiting) < _MOST_WAITING:
                self._waiting += new_token_ids
                if not self._called_later:
                    self._called_later = True
                    pace.call_later(self._pass_on_late)
                return
            self._passed_on = now
        if self._waiting:
            new_token_ids = self._waiting + new_token_ids
            self._waiting = []
        self._pass_on(new_token_ids, finish_reason, stop_reason)

    def _pass_on_late(self) -> None:
        """Passes on the tokens that still wait, because none has come for a while."""
        self._called_later = False
        if not self._waiting or self._pace is None:
            return
        if time.monotonic() < self._passed_on + self._pace.interval:
            self._called_later = True
            self._pace.call_later(self._pass_on_late)
            return
        self._passed_on = time.monotonic()
        token_ids, self._waiting = self._waiting, []
        self._pass_on(token_ids, None, None)

    def _pass_on(
        self,
        token_ids: list[int],
        finish_reason: FinishReason | None,
        stop_reason: int | str | None,
    ) -> None:
        state = self._state
        if state is None:
            return
        try:
            output = _output(state, token_ids, finish_reason, stop_reason)
        except Exception as error:  # any error, as in `_call`
            self._fail(error)
            return
        if finish_reason is not None:
            self._state = None  # it refers to this object
        _call(self._receive, self._fail, output)


class _LateDetokenizer(IncrementalDetokenizer):
    """Decodes the tokens of a request without stop texts only when their text is asked for."""

    def __init__(self, detokenizer: IncrementalDetokenizer) -> None:
        """Takes the place of a detokenizer of vLLM."""
        super().__init__()
        self._detokenizer = detokenizer
        self._count = detokenizer.num_output_tokens()
        """Generated tokens. The output processor asks for their number in every step."""
        self._undecoded: list[int] = []
        self._stopped = False
        """Whether the last token is a stop token, which has no text."""

    def num_output_tokens(self) -> int:
        """Number of generated tokens."""
        return self._count

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> None:
        """Adds tokens. Returns None, because no stop text can be found."""
        self._count += len(new_token_ids)
        self._undecoded += new_token_ids
        self._stopped = stop_terminated

    def get_next_output_text(self, finished: bool, delta: bool) -> str:
        """The text of the tokens since the last call."""
        if self._undecoded:
            self._detokenizer.update(self._undecoded, self._stopped)
            self._undecoded = []
        return self._detokenizer.get_next_output_text(finished, delta)


def _output(
    state: RequestState,
    token_ids: list[int],
    finish_reason: FinishReason | None,
    stop_reason: int | str | None,
) -> Output:
    """The same as vLLM's `make_request_output` for deltas."""
    finished = finish_reason is not None
    detokenizer, processor = state.detokenizer, state.logprobs_processor
    assert detokenizer is not None  # only pooling requests have none
    assert processor is not None
    logprobs = processor.logprobs
    if logprobs:
        logprobs = logprobs[-len(token_ids) :] if token_ids else logprobs[:0]
    prompt_logprobs = processor.pop_prompt_logprobs() if processor.prompt_logprobs else None
    return Output(
        token_ids,
        detokenizer.get_next_output_text(finished, delta=True),
        logprobs,
        prompt_logprobs,
        state.num_cached_tokens,
        str(finish_reason) if finished else None,
        stop_reason if finished else None,
    )


def _read(output: RequestOutput) -> Output:
    """The content of an output that vLLM made before this module took over."""
    completion = output.outputs[0]
    return Output(
        list(completion.token_ids),
        completion.text,
        completion.logprobs,
        output.prompt_logprobs,
        output.num_cached_tokens or 0,
        completion.finish_reason,
        completion.stop_reason,
    )


def _call(receive: Receive, fail: Callable[[Exception], None], output: Output) -> None:
    try:
        receive(output)
    except Exception as error:  # any error would end the output handler, and so all requests
        fail(error)
