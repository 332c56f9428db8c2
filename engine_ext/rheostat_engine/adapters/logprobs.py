"""Log-probabilities without texts and history, in the process with the `AsyncLLM`.

Why without texts
    vLLM decodes every token of a list of log-probabilities on the event loop, which takes 6 to 16
    microseconds each. A prompt of 3,000 tokens with 20 alternatives blocks the loop for 0.8
    seconds. The server decodes each token id once, and long lists on a thread.
Why without history
    vLLM keeps the log-probabilities of all tokens until a sample ends, even if the output kind is
    DELTA. With 20 alternatives that is 4 KB per token: 2.7 GB for 64 samples of 10,000 tokens.
"""

from typing import cast

from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, output_processor
from vllm.v1.engine.logprobs import LogprobsProcessor

_PROCESSOR = "LogprobsProcessor"

_HISTORY = 32
"""Tokens whose log-probabilities a sample keeps. vLLM reads those of an output from the end of the
list, so earlier entries may be removed."""


class UndecodedLogprobs(LogprobsProcessor):
    """Collects log-probabilities without `Logprob.decoded_token`, and removes old ones."""

    _delta = False
    """Whether each output has only the log-probabilities of its own tokens."""

    @classmethod
    def from_new_request(
        cls, tokenizer: TokenizerLike | None, request: EngineCoreRequest
    ) -> LogprobsProcessor:
        """Creates a processor without a tokenizer, so that it decodes nothing."""
        processor = cast(UndecodedLogprobs, super().from_new_request(None, request))
        params = request.sampling_params
        processor._delta = params is not None and params.output_kind is RequestOutputKind.DELTA
        return processor

    def update_from_output(self, output: EngineCoreOutput) -> None:
        """Collects the log-probabilities of an output."""
        if self._delta and self.logprobs is not None and len(self.logprobs) > 2 * _HISTORY:
            self.logprobs = self.logprobs[-_HISTORY:]
        super().update_from_output(output)


def leave_logprobs_undecoded() -> None:
    """Makes the engines of this process return log-probabilities without texts."""
    setattr(output_processor, _PROCESSOR, UndecodedLogprobs)
