"""Log-probabilities without texts, in the process that reads the engine's answers.

vLLM decodes every token of a list of log-probabilities on the event loop. That takes 6 to 16
microseconds per token, so a prompt of 3,000 tokens with 20 alternatives each stops every stream for
0.8 seconds. The server decodes the tokens itself: each token id once, and long lists on a thread.
"""

from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreRequest, output_processor
from vllm.v1.engine.logprobs import LogprobsProcessor

_PROCESSOR = "LogprobsProcessor"


class UndecodedLogprobs(LogprobsProcessor):
    """Reads log-probabilities and leaves `Logprob.decoded_token` None."""

    @classmethod
    def from_new_request(
        cls, tokenizer: TokenizerLike | None, request: EngineCoreRequest
    ) -> LogprobsProcessor:
        """A processor without a tokenizer."""
        return super().from_new_request(None, request)


def leave_logprobs_undecoded() -> None:
    """From now on the engines of this process give log-probabilities without texts."""
    setattr(output_processor, _PROCESSOR, UndecodedLogprobs)
