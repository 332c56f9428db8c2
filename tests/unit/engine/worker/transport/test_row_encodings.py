"""Forms are shared by content, take no more memory than they were given, and fail softly."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rheostat_engine import Codec, Directions, RowEncoding
from rheostat_engine.worker.transport.row_encodings import MAX_ENCODINGS, REFUSED, RowEncodings

WIDTH = 16
A, B = b"a" * 32, b"b" * 32
VECTORS = {A: np.eye(3, WIDTH, dtype=np.float32), B: np.ones((1, WIDTH), np.float32)}
ROW = 4 * WIDTH
"""Bytes of a direction."""


def encodings(limit: int = 1 << 20) -> RowEncodings:
    return RowEncodings(width=WIDTH, itemsize=4, vectors=VECTORS, limit=limit)


def along(count: int, first: int = 0) -> RowEncoding:
    return RowEncoding(Codec.CAST, "float32", directions=Directions((A,) * count, (first,) * count))


def test_equal_forms_are_one() -> None:
    held = encodings()
    one, other = held.acquire(along(2)), held.acquire(along(2))
    assert one == other > REFUSED
    assert held.acquire(None) == 0
    assert (len(held), held.bytes) == (1, 2 * ROW)
    held.release(one)
    assert len(held) == 1
    held.release(other)
    assert (len(held), held.bytes) == (0, 2 * ROW)


def test_what_is_not_in_use_goes_where_others_need_its_room() -> None:
    held = encodings(4 * ROW)
    held.release(held.acquire(along(2)))
    held.release(held.acquire(along(1)))
    assert held.acquire(along(2, 1)) > REFUSED
    assert held.bytes == 3 * ROW
    assert held.acquire(along(2)) > REFUSED
    assert held.bytes == 4 * ROW
    assert held.acquire(along(1)) == REFUSED


@pytest.mark.parametrize(
    "encoding",
    [
        RowEncoding(Codec.TOPK8, kept=0),
        RowEncoding(Codec.TOPK8, kept=WIDTH + 1),
        RowEncoding(Codec.TOPK8, kept=WIDTH),
        RowEncoding(Codec.RP8, kept=WIDTH + 1),
        RowEncoding(Codec.CAST, "float32", directions=Directions((b"?" * 32,), (0,))),
        RowEncoding(Codec.CAST, "float32", directions=Directions((A,), (3,))),
        along(WIDTH + 1),
    ],
    ids=str,
)
def test_a_form_that_cannot_be_or_saves_nothing_is_refused(encoding: RowEncoding) -> None:
    held = encodings()
    assert held.acquire(encoding) == REFUSED
    assert held[REFUSED] is None
    assert (len(held), held.bytes) == (0, 0)
    held.release(REFUSED)


def test_there_are_so_many_forms_and_no_more() -> None:
    held = encodings()
    many = [
        held.acquire(RowEncoding(Codec.RP8, kept=1, seed=seed)) for seed in range(MAX_ENCODINGS)
    ]
    assert REFUSED not in many
    last = RowEncoding(Codec.RP8, kept=1, seed=MAX_ENCODINGS)
    assert held.acquire(last) == REFUSED
    held.release(many[3])
    assert held.acquire(last) == many[3]


def test_a_form_outlives_its_vectors() -> None:
    vectors = dict(VECTORS)
    held = RowEncodings(width=WIDTH, itemsize=4, vectors=vectors, limit=1 << 20)
    made = held[held.acquire(along(2, 1))]
    vectors.clear()
    assert made is not None
    rows = torch.arange(2 * WIDTH, dtype=torch.float32).view(2, WIDTH)
    assert made.encode(rows).view(torch.float32).tolist() == [[1.0, 1.0], [17.0, 17.0]]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6), st.integers(0, 2)), max_size=30))
def test_memory_stays_within_its_limit(steps: list[tuple[bool, int, int]]) -> None:
    held = encodings(8 * ROW)
    taken: list[int] = []
    for take, count, first in steps:
        if take:
            taken.append(held.acquire(along(count, first)))
        elif taken:
            held.release(taken.pop(0))
        assert held.bytes <= 8 * ROW
        assert len(held) == len({number for number in taken if number > REFUSED})


def test_keys_tell_forms_apart() -> None:
    several = [
        RowEncoding(Codec.FULL8),
        RowEncoding(Codec.CAST, "float16"),
        RowEncoding(Codec.CAST, "bfloat16"),
        RowEncoding(Codec.RP8, kept=2),
        RowEncoding(Codec.RP8, kept=2, seed=1),
        RowEncoding(Codec.TOPK8, kept=2),
        along(1),
        along(1, 1),
        along(2),
        RowEncoding(Codec.FULL8, directions=Directions((A,), (0,))),
        RowEncoding(Codec.FULL8, directions=Directions((B,), (0,))),
    ]
    assert len({encoding.key for encoding in several}) == len(several)
    assert RowEncoding(Codec.FULL8).key == RowEncoding(Codec.FULL8).key != b""
