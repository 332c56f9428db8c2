from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rheostat_server.tokenizer import decode_with_offsets


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
