"""What the server asks of a tokenizer, and Hugging Face's tokenizers behind it.

Offsets are code points [start, end) of the text; tokens that share a character have the same.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, cast

Offsets = tuple[tuple[int, int], ...]

_LOOKBACK = 6
"""Tokens of context with which the next ones are decoded."""


class Encoded(NamedTuple):
    """A text as tokens."""

    token_ids: tuple[int, ...]
    offsets: Offsets | None
    """One per token; None where the tokenizer cannot tell."""


class ChatTemplateError(Exception):
    """The model's template does not render these messages."""


class Tokenizer(Protocol):
    """A model's tokenizer. Used from one thread at a time."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `render` works."""

    def encode(self, text: str, *, special: bool) -> Encoded:
        """The tokens of a text, with the usual special tokens around them if `special`."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included, invalid UTF-8 replaced."""

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, object],
    ) -> str:
        """Messages through the model's chat template.

        Raises:
            ChatTemplateError: the template refuses them.
        """


class _HuggingFace(Protocol):
    """The parts of transformers' tokenizers that are used."""

    is_fast: bool
    chat_template: str | Mapping[str, str] | None

    def __call__(
        self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool
    ) -> Mapping[str, Sequence[object]]:
        """Encodes."""

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """Decodes."""

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        continue_final_message: bool,
        **variables: object,
    ) -> str:
        """Renders."""


class HuggingFaceTokenizer:
    """A tokenizer of transformers: a copy, since the engine uses the original itself."""

    def __init__(self, tokenizer: object) -> None:
        """Copies `tokenizer`."""
        self._inner = cast(_HuggingFace, copy.deepcopy(tokenizer))

    @property
    def has_chat_template(self) -> bool:
        """Whether the model comes with a chat template."""
        return bool(self._inner.chat_template)

    def encode(self, text: str, *, special: bool) -> Encoded:
        """The tokens of a text."""
        fast = self._inner.is_fast
        found = self._inner(text, add_special_tokens=special, return_offsets_mapping=fast)
        ids = tuple(cast(Sequence[int], found["input_ids"]))
        if not fast:
            return Encoded(ids, None)
        pairs = cast(Sequence[tuple[int, int]], found["offset_mapping"])
        return Encoded(ids, tuple((start, end) for start, end in pairs))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens."""
        return self._inner.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, object],
    ) -> str:
        """Messages through the chat template."""
        try:
            return self._inner.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
        except Exception as error:  # a template is a program of the model's: it may raise anything
            raise ChatTemplateError(str(error)) from error


def decode_with_offsets(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[str, Offsets]:
    """The text of tokens and where each of them stands in it.

    Tokens are decoded a few at a time behind some context, so that the cost is linear. Tokens that
    only together make a character share its place.
    """
    text: list[str] = []
    offsets: list[tuple[int, int]] = []
    length = 0
    context, done = 0, 0
    for stop in range(1, len(token_ids) + 1):
        before = tokenizer.decode(token_ids[context:done])
        after = tokenizer.decode(token_ids[context:stop])
        unfinished = after.endswith("\ufffd") and stop < len(token_ids)
        if unfinished and stop - done < _LOOKBACK:
            continue
        piece = after[len(before) :]
        offsets += [(length, length + len(piece))] * (stop - done)
        text.append(piece)
        length += len(piece)
        context, done = max(0, stop - _LOOKBACK), stop
    return "".join(text), tuple(offsets)
