"""Log-probabilities without texts and history, in the process that reads the engine's answers.

vLLM decodes every token of a list of log-probabilities on the event loop. That takes 6 to 16
microseconds per token, so a prompt of 3,000 tokens with 20 alternatives each stops every stream for
0.8 seconds. The server decodes the tokens itself: each token id once, and long lists on a thread.

vLLM keeps the log-probabilities of all tokens until a sample ends, although it gives each of them
out once when the output kind is DELTA. With 20 alternatives that is 4 KB per token, so 64 samples
of 10,000 tokens would hold 2.7 GB, whether their client reads or not.
"""

from typing import cast

from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, output_processor
from vllm.v1.engine.logprobs import LogprobsProcessor

_PROCESSOR = "LogprobsProcessor"

_HISTORY = 32
"""Tokens whose log-probabilities a sample keeps after they were given out. vLLM takes those of an
output from the end of the list, so the list may begin anywhere before."""


class UndecodedLogprobs(LogprobsProcessor):
    """Reads log-probabilities, leaves `Logprob.decoded_token` None, and forgets old ones."""

    _delta = False
    """Whether each output has the log-probabilities of its own tokens alone."""

    @classmethod
    def from_new_request(
        cls, tokenizer: TokenizerLike | None, request: EngineCoreRequest
    ) -> LogprobsProcessor:
        """A processor without a tokenizer."""
        processor = cast(UndecodedLogprobs, super().from_new_request(None, request))
        params = request.sampling_params
        processor._delta = params is not None and params.output_kind is RequestOutputKind.DELTA
        return processor

    def update_from_output(self, output: EngineCoreOutput) -> None:
        """Reads the log-probabilities of an output."""
        if self._delta and self.logprobs is not None and len(self.logprobs) > 2 * _HISTORY:
            self.logprobs = self.logprobs[-_HISTORY:]
        super().update_from_output(output)


def leave_logprobs_undecoded() -> None:
    """Makes the engines of this process give log-probabilities without texts."""
    setattr(output_processor, _PROCESSOR, UndecodedLogprobs)
