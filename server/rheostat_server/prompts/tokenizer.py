"""What the server asks of a tokenizer, and Hugging Face's tokenizers behind it.

Offsets are code points [start, end) of the text; tokens that share a character have the same.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, cast

Offsets = tuple[tuple[int, int], ...]

_PIECE = 32 << 10
"""Characters of a long text that are counted at a time."""

_LOOKBACK = 6
"""Tokens of context with which the next ones are decoded."""


class Encoded(NamedTuple):
    """A text as tokens."""

    token_ids: tuple[int, ...]
    offsets: Offsets | None
    """One per token; None where the tokenizer cannot tell."""


class TooManyTokens(Exception):
    """A text has more tokens than it may."""


class ChatTemplateError(Exception):
    """The model's template does not render these messages."""


class Tokenizer(Protocol):
    """A model's tokenizer. Used from one thread at a time, its twin from another."""

    def twin(self) -> "Tokenizer":
        """The same tokenizer for another thread."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `render` works."""

    def encode(self, text: str, *, special: bool, most: int) -> Encoded:
        """The tokens of a text, with the usual special tokens around them if `special`.

        Raises:
            TooManyTokens: they are more than `most`. A text of many more is not gone over whole.
        """

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


class _Encoding(Protocol):
    """A text as tokens, in Rust: what is asked for is made into Python objects."""

    ids: list[int]
    offsets: list[tuple[int, int]]

    def __len__(self) -> int:
        """How many tokens."""


class _Backend(Protocol):
    """The parts of `tokenizers.Tokenizer` that are used."""

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> list[_Encoding]:
        """Encodes. Unlike `encode` it lets other threads run meanwhile."""

    def get_vocab(self, with_added_tokens: bool) -> dict[str, int]:
        """The texts of all tokens."""


class _HuggingFace(Protocol):
    """The parts of transformers' tokenizers that are used."""

    is_fast: bool
    backend_tokenizer: _Backend
    """Only of fast ones."""
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
        self._longest = 1
        if self._inner.is_fast:
            # A first call switches truncation and padding off, which `tokenizer.json` may ask for.
            self._inner("a", add_special_tokens=False, return_offsets_mapping=True)
            vocabulary = self._inner.backend_tokenizer.get_vocab(with_added_tokens=True)
            self._longest = max(map(len, vocabulary), default=1)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model comes with a chat template."""
        return bool(self._inner.chat_template)

    def twin(self) -> "HuggingFaceTokenizer":
        """Itself where it is fast: what is written in Rust may be used by several threads."""
        return self if self._inner.is_fast else HuggingFaceTokenizer(self._inner)

    def encode(self, text: str, *, special: bool, most: int) -> Encoded:
        """The tokens of a text."""
        if len(text) > max(most, _PIECE):
            self._check_pieces(text, most)
        if self._inner.is_fast:
            (found,) = self._inner.backend_tokenizer.encode_batch(
                [text], add_special_tokens=special
            )
            if len(found) > most:
                raise TooManyTokens
            return Encoded(tuple(found.ids), tuple(found.offsets))
        encoded = self._inner(text, add_special_tokens=special, return_offsets_mapping=False)
        ids = tuple(cast(Sequence[int], encoded["input_ids"]))
        if len(ids) > most:
            raise TooManyTokens
        return Encoded(ids, None)

    def _check_pieces(self, text: str, most: int) -> None:
        """Counts the tokens of a long text piece by piece until they are too many.

        The pieces' tokens are not the text's. But a cut changes little: it splits one token of the
        text, into no more tokens than it has characters. So many are allowed for each cut.

        Raises:
            TooManyTokens: the text has more tokens than `most`, wherever it is cut.
        """
        count = 0
        for start in range(0, len(text), _PIECE):
            piece = text[start : start + _PIECE]
            if self._inner.is_fast:
                (found,) = self._inner.backend_tokenizer.encode_batch(
                    [piece], add_special_tokens=False
                )
                count += len(found)
            else:
                encoded = self._inner(piece, add_special_tokens=False, return_offsets_mapping=False)
                count += len(encoded["input_ids"])
            if count > most:
                raise TooManyTokens
            most += self._longest

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
