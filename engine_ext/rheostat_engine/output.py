"""What the engine reports of a request in the process with the `AsyncLLM`; see `adapters.outputs`.

It is importable without vLLM.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class Output(NamedTuple):
    """New tokens of a request."""

    token_ids: list[int]
    text: str
    logprobs: Sequence[object] | None = None
    """If asked for, one entry per token: vLLM's `Logprob`, by token id."""
    prompt_logprobs: Sequence[object] | None = None
    """Set once, if asked for: one entry per prompt token, None for the first."""
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""
    finish_reason: str | None = None
    """Set with the last tokens."""
    stop_reason: int | str | None = None
    """The stop token or text that ended the request; None for the model's end token."""


Receive = Callable[[Output], None]


class Pace(Protocol):
    """How often the tokens of a request are passed on."""

    @property
    def interval(self) -> float:
        """Seconds between two calls of the function; 0: every token is passed on at once."""

    def call_later(self, call: Callable[[], None]) -> None:
        """Calls a function once no more tokens may wait, at least `interval` from now."""
