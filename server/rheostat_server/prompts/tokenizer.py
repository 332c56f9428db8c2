"""The interface of tokenizers, and its implementation with Hugging Face's tokenizers.

Offsets are code points [start, end) of the text. Tokens that share a character have equal offsets.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

Offsets = tuple[tuple[int, int], ...]

_PIECE = 32 << 10
"""Characters of a long text that are counted at a time."""

_LOOKBACK = 6
"""Number of earlier tokens with which the next tokens are decoded."""


class Encoded(NamedTuple):
    """A text as tokens."""

    token_ids: tuple[int, ...]
    offsets: Offsets | None
    """One per token; None if the tokenizer returns no offsets."""


class TooManyTokens(Exception):
    """A text has too many tokens."""


class ChatTemplateError(Exception):
    """The model's chat template cannot render these messages."""


class Tokenizer(Protocol):
    """A model's tokenizer. One thread at a time may use it; `twin` is for another thread."""

    def twin(self) -> "Tokenizer":
        """The same tokenizer for another thread."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `render` works."""

    def encode(self, text: str, *, special: bool, most: int) -> Encoded:
        """The tokens of a text, with the usual special tokens around them if `special`.

        Raises:
            TooManyTokens: there are more than `most`. Most of a much longer text is not tokenised.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, with special tokens. Invalid UTF-8 is replaced."""

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, object],
    ) -> str:
        """The text that the model's chat template makes of messages.

        Raises:
            ChatTemplateError: the template refuses the messages.
        """


class HuggingFaceTokenizer:
    """A copy of a tokenizer of transformers, because the engine uses the original itself."""

    def __init__(self, tokenizer: object) -> None:
        # Not typed, because the server does not import transformers.
        self._inner = cast(Any, copy.deepcopy(tokenizer))
        self._longest = 1
        if self._inner.is_fast:
            # The first call disables truncation and padding, which `tokenizer.json` may enable.
            self._inner("a", add_special_tokens=False, return_offsets_mapping=True)
            vocabulary = self._inner.backend_tokenizer.get_vocab(with_added_tokens=True)
            self._longest = max(map(len, vocabulary), default=1)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model comes with a chat template."""
        return bool(self._inner.chat_template)

    def twin(self) -> "HuggingFaceTokenizer":
        """Itself if it is fast, because several threads may use the Rust code."""
        return self if self._inner.is_fast else HuggingFaceTokenizer(self._inner)

    def encode(self, text: str, *, special: bool, most: int) -> Encoded:
        """The tokens of a text."""
        if len(text) > max(most, _PIECE):
            self._check_pieces(text, most)
        encoded = self._encode(text, special=special)
        if len(encoded) > most:
            raise TooManyTokens
        if self._inner.is_fast:
            return Encoded(tuple(encoded.ids), tuple(encoded.offsets))
        return Encoded(tuple(encoded), None)

    def _encode(self, text: str, *, special: bool) -> Any:
        """The `tokenizers.Encoding` of a text; the token ids if the tokenizer is not fast."""
        if self._inner.is_fast:
            # Unlike `encode`, `encode_batch` releases the GIL.
            backend = self._inner.backend_tokenizer
            (encoded,) = backend.encode_batch([text], add_special_tokens=special)
            return encoded
        encoded = self._inner(text, add_special_tokens=special, return_offsets_mapping=False)
        return encoded["input_ids"]

    def _check_pieces(self, text: str, most: int) -> None:
        """Counts the tokens of a long text piece by piece, until there are too many.

        A cut splits a token of the text into at most as many tokens as the token has characters. So
        each cut raises the limit by the length of the longest token.

        Raises:
            TooManyTokens: the text has more tokens than `most`, wherever it is cut.
        """
        count = 0
        for start in range(0, len(text), _PIECE):
            count += len(self._encode(text[start : start + _PIECE], special=False))
            if count > most:
                raise TooManyTokens
            most += self._longest

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens."""
        text = self._inner.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return cast(str, text)

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, object],
    ) -> str:
        """The text that the chat template makes of messages."""
        try:
            text = self._inner.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
            return cast(str, text)
        except Exception as error:  # a template is code, which may raise any error
            raise ChatTemplateError(str(error)) from error


def decode_with_offsets(tokenizer: Tokenizer, token_ids: Sequence[int]) -> tuple[str, Offsets]:
    """The text of tokens, and the offsets of each token.

    A few tokens are decoded at a time, after some earlier tokens, so that the cost is linear.
    Tokens that form a character together have the offsets of that character.
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
