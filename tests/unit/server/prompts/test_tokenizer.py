"""Tokens of a text and their places, and how much of a long text is gone over."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from rheostat_server.engine.vllm_engine import DEMO_MODEL
from rheostat_server.prompts import tokenizer as tokenizers
from rheostat_server.prompts.tokenizer import (
    HuggingFaceTokenizer,
    TooManyTokens,
    decode_with_offsets,
)


class ByteTokenizer:
    """Each byte of UTF-8 is a token, so that most characters take several."""

    has_chat_template = False

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    ("text", "offsets"),
    [
        ("ab", ((0, 1), (1, 2))),
        ("é", ((0, 1), (0, 1))),
        ("a€b", ((0, 1), (1, 2), (1, 2), (1, 2), (2, 3))),
    ],
)
def test_tokens_of_one_character_share_its_place(text, offsets) -> None:
    assert decode_with_offsets(ByteTokenizer(), text.encode()) == (text, offsets)


@given(st.text(max_size=40))
def test_the_text_is_whole_and_every_token_stands_where_its_character_is(text: str) -> None:
    decoded, offsets = decode_with_offsets(ByteTokenizer(), text.encode())
    expected = [(i, i + 1) for i, char in enumerate(text) for _ in char.encode()]
    assert (decoded, list(offsets)) == (text, expected)


@given(st.binary(max_size=40))
def test_tokens_that_are_no_text_still_get_places(ids: bytes) -> None:
    decoded, offsets = decode_with_offsets(ByteTokenizer(), ids)
    assert len(offsets) == len(ids)
    assert all(0 <= start <= end <= len(decoded) for start, end in offsets)


@pytest.fixture(scope="module")
def inner():
    """The demo model's tokenizer."""
    return AutoTokenizer.from_pretrained(DEMO_MODEL)


class Counting:
    """A backend that counts the characters that it tokenises."""

    def __init__(self, backend) -> None:
        self.backend = backend
        self.characters = 0

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool):
        self.characters += sum(map(len, texts))
        return self.backend.encode_batch(texts, add_special_tokens=add_special_tokens)


class Fast:
    """A tokenizer of transformers around a backend."""

    is_fast = True

    def __init__(self, backend) -> None:
        self.backend_tokenizer = backend


def counting(inner) -> HuggingFaceTokenizer:
    made = HuggingFaceTokenizer(inner)
    made._inner = Fast(Counting(inner.backend_tokenizer))
    return made


@settings(deadline=None)
@given(st.text(max_size=60), st.booleans())
def test_a_text_is_tokenised_as_transformers_does(inner, text: str, special: bool) -> None:
    found = HuggingFaceTokenizer(inner).encode(text, special=special, most=1000)
    expected = inner(text, add_special_tokens=special, return_offsets_mapping=True)
    assert list(found.token_ids) == expected["input_ids"]
    assert list(found.offsets) == expected["offset_mapping"]


def test_a_text_of_one_token_too_many_is_refused(inner) -> None:
    ours = HuggingFaceTokenizer(inner)
    count = len(ours.encode("My day was long", special=True, most=100).token_ids)
    assert len(ours.encode("My day was long", special=True, most=count).token_ids) == count
    with pytest.raises(TooManyTokens):
        ours.encode("My day was long", special=True, most=count - 1)


def test_a_text_that_cannot_fit_is_refused_after_about_as_many_tokens_as_fit(
    inner, monkeypatch
) -> None:
    monkeypatch.setattr(tokenizers, "_PIECE", 1000)
    ours = counting(inner)
    rare = "8a$Q" * 50_000
    with pytest.raises(TooManyTokens):
        ours.encode(rare, special=True, most=2000)
    assert ours._inner.backend_tokenizer.characters < 5000 < len(rare)


@pytest.mark.parametrize("text", ["My day was long. ", "8a$Q", "a", " ", "\n\n", "\u20ac"])
def test_a_long_text_that_fits_is_tokenised_as_a_whole(inner, monkeypatch, text) -> None:
    monkeypatch.setattr(tokenizers, "_PIECE", 100)
    ours = HuggingFaceTokenizer(inner)
    long = text * 3000
    expected = inner(long, add_special_tokens=True)["input_ids"]
    found = ours.encode(long, special=True, most=len(expected))
    assert list(found.token_ids) == expected
    with pytest.raises(TooManyTokens):
        ours.encode(long, special=True, most=len(expected) - 1)
