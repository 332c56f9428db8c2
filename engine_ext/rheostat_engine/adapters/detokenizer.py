"""Detokenizes generated tokens without decoding the whole prompt, in the server's process.

Why
    vLLM passes the prompt to the tokenizer's `DecodeStream`. The stream's first step decodes the
    whole prompt on the event loop: 5 ms for 16,000 tokens. If the prompt is cached, all samples of
    a request get their first token in one step, and 64 samples block the loop for 0.4 seconds.
Why the last tokens suffice
    The decoder needs the prompt only to keep a leading space of the generated text, and to complete
    a character of several bytes. So it gets the prompt's last tokens. It gets more of them if these
    have no text or end within a character, because some tokenizers decode a run of bytes only as a
    whole, and the last tokens may begin within a run.
"""

from copy import copy
from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine import detokenizer as vllm_detokenizer
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

_NAME = "FastIncrementalDetokenizer"

_LAST_TOKENS = 16
"""The least tokens of the prompt to decode. A character takes at most four tokens."""

_SHORT_PROMPT = 2 * _LAST_TOKENS
"""Tokens of a prompt that is decoded as a whole, because looking for its end takes as long."""

_REPLACEMENT_CHARACTER = "\ufffd"
"""The replacement character for invalid UTF-8."""


class LastTokensDetokenizer(FastIncrementalDetokenizer):
    """Decodes generated tokens after the last tokens of their prompt."""

    def __init__(self, tokenizer: Any, request: EngineCoreRequest) -> None:  # vLLM's own
        prompt, params = request.prompt_token_ids, request.sampling_params
        if prompt is not None and params is not None and len(prompt) > _SHORT_PROMPT:
            skip = params.skip_special_tokens
            count = _LAST_TOKENS
            while count < len(prompt) and not _is_complete(tokenizer.decode(prompt[-count:], skip)):
                count *= 2
            request = copy(request)
            request.prompt_token_ids = prompt[-count:]
        super().__init__(tokenizer, request)


def _is_complete(text: str) -> bool:
    """Whether there is text that ends with a complete character."""
    return bool(text) and not text.endswith(_REPLACEMENT_CHARACTER)


def decode_last_tokens() -> None:
    """Makes the engines of this process decode only the last tokens of prompts."""
    setattr(vllm_detokenizer, _NAME, LastTokensDetokenizer)
