"""Rows through every encoding and back: exactly, or within the error that is stated."""

from fractions import Fraction

import google_crc32c
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import rheostat
from rheostat._capture.encodings import Decoded, read_tensor
from rheostat_server.capture.encodings import Form
from rheostat_server.tensors import FloatType
from rheostat_wire.v1 import tensor_pb2

LARGEST = float(np.finfo(np.float32).max)
TINY = 2.0**-149
SLACK = 1 + Fraction(1, 2**40)
"""Codes are chosen in float64."""

FULL8 = tensor_pb2.ENCODING_FULL8
PLANES = tensor_pb2.ENCODING_LZ4_PLANES
RP8 = tensor_pb2.ENCODING_RP8
TOPK8 = tensor_pb2.ENCODING_TOPK8

shapes = hnp.array_shapes(min_dims=2, max_dims=2, max_side=9)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
rows_of = st.one_of(
    hnp.arrays(np.float32, shapes, elements=finite),
    hnp.arrays(np.float32, shapes, elements=st.integers(0, 700).map(lambda k: k * TINY)),
    # Rows whose range is some hundred of their last places.
    st.floats(-(2.0**126), 2.0**126, width=32).flatmap(
        lambda low: hnp.arrays(
            np.float32,
            shapes,
            elements=st.integers(0, 600).map(lambda k: float(np.float32(low * (1 + k * 2.0**-23)))),
        )
    ),
)


def sent(rows: np.ndarray, encoding: int, **how: int) -> tensor_pb2.Tensor:
    encode = Form(encoding, **how).encode
    return encode(rows, row_type=FloatType.FLOAT32, wanted=FloatType.FLOAT32)


def back(rows: np.ndarray, encoding: int, **how: int) -> Decoded:
    return read_tensor(sent(rows, encoding, **how))


def parts(payload: bytes, count: int) -> tuple[list[Fraction], list[Fraction]]:
    both = np.frombuffer(payload, "<f4", 2 * count)
    numbers = [Fraction(float(number)) for number in both]
    return numbers[:count], numbers[count:]


@given(rows_of)
@example(np.array([[-LARGEST, LARGEST, 0, 1]], np.float32))
@example(np.array([[0, TINY]], np.float32))
@example(np.array([[0, TINY, 100 * TINY, 255 * TINY, 256 * TINY, 383 * TINY]], np.float32))
@example(np.array([[2.0**-126, 0, TINY]], np.float32))
@example(np.array([[-0.0, 0.0]], np.float32))
@example(np.array([[5.5]], np.float32))
def test_full8_is_within_half_a_scale_before_rounding(rows: np.ndarray) -> None:
    count, width = rows.shape
    payload = sent(rows, FULL8).inline
    assert len(payload) == count * (8 + width)
    scales, offsets = parts(payload, count)
    codes = np.frombuffer(payload, np.uint8, offset=8 * count).reshape(count, width)
    for row in range(count):
        for number in range(width):
            found = offsets[row] + scales[row] * int(codes[row, number])
            error = abs(found - Fraction(float(rows[row, number])))
            assert error <= scales[row] / 2 * SLACK


@given(rows_of)
@example(np.array([[-LARGEST, LARGEST]], np.float32))
@example(np.array([[0, TINY]], np.float32))
@example(np.array([[1e6, 1e6 + 0.125]], np.float32))
def test_full8_read_back_is_finite_and_within_the_stated_error(rows: np.ndarray) -> None:
    values, _, error = back(rows, FULL8)
    assert np.isfinite(values).all()
    off = np.abs(values.astype(np.float64) - rows)
    assert (off <= error[:, None]).all()


def test_no_range_that_float32_holds_is_read_back_as_infinite() -> None:
    lows = -np.float32(LARGEST) * (1 - np.arange(1000) * 2.0**-24)
    rows = np.stack([lows.astype(np.float32), np.full(1000, LARGEST, np.float32)], axis=1)
    values, _, error = back(rows, FULL8)
    assert np.isfinite(values).all()
    assert (np.abs(values.astype(np.float64) - rows) <= error[:, None]).all()


@given(rows_of, st.data())
def test_topk8_keeps_the_largest_and_is_within_the_stated_error(rows, data) -> None:
    count, width = rows.shape
    kept = data.draw(st.integers(1, width))
    whole = sent(rows, TOPK8, kept=kept)
    assert len(whole.inline) == count * (8 + 5 * kept)
    values, how, error = read_tensor(whole)
    assert how == rheostat.Encoding("topk8", kept=kept, width=width)
    at = np.frombuffer(whole.inline, "<u4", count * kept, 8 * count).reshape(count, kept)
    scales, offsets = parts(whole.inline, count)
    codes = np.frombuffer(whole.inline, np.uint8, offset=(8 + 4 * kept) * count)
    for row in range(count):
        chosen = at[row].tolist()
        left = [abs(rows[row, number]) for number in range(width) if number not in chosen]
        assert chosen == sorted(set(chosen))
        assert max(left, default=0) <= min(abs(rows[row, chosen]))
        for number, code in zip(chosen, codes.reshape(count, kept)[row].tolist(), strict=True):
            found = offsets[row] + scales[row] * code
            exact = Fraction(float(rows[row, number]))
            assert abs(found - exact) <= scales[row] / 2 * SLACK
    off = np.abs(values.astype(np.float64) - rows)
    assert (off <= error[:, None].astype(np.float64)).all()


@given(rows_of.filter(lambda rows: abs(rows).max() < 1e30), st.data())
def test_rp8_is_within_the_stated_error_of_the_projection(rows, data) -> None:
    width = rows.shape[1]
    kept, seed = data.draw(st.integers(1, width)), data.draw(st.integers(0, 2**64 - 1))
    whole = sent(rows, RP8, kept=kept, seed=seed)
    values, how, error = read_tensor(whole)
    assert list(whole.shape) == [len(rows), kept]
    assert how == rheostat.Encoding("rp8", kept=kept, width=width, seed=seed)
    projection = rows @ rheostat.projection_matrix(kept, width, seed).T
    assert (np.abs(values.astype(np.float64) - projection) <= error[:, None]).all()


@pytest.mark.parametrize("kind", list(FloatType))
@given(st.data())
def test_byte_planes_are_exact_to_the_bits_of_nan(kind: FloatType, data) -> None:
    storage = np.dtype(f"<u{kind.itemsize}")
    bits = data.draw(hnp.arrays(storage, hnp.array_shapes(min_dims=3, max_dims=3, max_side=5)))
    rows = bits if kind is FloatType.BFLOAT16 else bits.view(f"<f{kind.itemsize}")
    encode = Form(PLANES).encode
    packed = encode(rows, row_type=kind, wanted=kind)
    raw = Form().encode(rows, row_type=kind, wanted=kind)
    assert raw == tensor_pb2.Tensor(
        dtype=kind.wire,
        shape=rows.shape,
        encoding=tensor_pb2.ENCODING_RAW,
        inline=bits.tobytes(),
        crc32c=google_crc32c.value(bits.tobytes()),
    )
    assert read_tensor(packed).values.tobytes() == read_tensor(raw).values.tobytes()


@pytest.mark.parametrize("encoding", [FULL8, RP8, TOPK8])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_reads_as_nan_and_leaves_the_others(encoding, bad) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    alone = back(rows, encoding, kept=2)
    rows[1, 2] = bad
    values, _, error = back(rows, encoding, kept=2)
    assert np.array_equal(values[[0, 2]], alone.values[[0, 2]])
    assert np.array_equal(error[[0, 2]], alone.max_error[[0, 2]])
    assert np.isnan(error[1])
    if encoding == TOPK8:  # what was not kept is finite and small
        assert np.isnan(values[1]).tolist() == [False, False, True, True]
    else:
        assert np.isnan(values[1]).all()


@pytest.mark.parametrize("encoding", [FULL8, RP8, TOPK8])
def test_constant_rows_have_scale_0_and_no_error(encoding: int) -> None:
    rows = np.array([[3.25] * 4, [0.0] * 4, [-LARGEST] * 4], np.float32)
    if encoding == RP8:
        rows = rows[:, :1]
    values, _, error = back(rows, encoding, kept=rows.shape[1])
    expected = rows if encoding != RP8 else rows * rheostat.projection_matrix(1, 1, 0)
    assert np.array_equal(values, expected)
    assert error.tolist() == [0, 0, 0]


def test_bfloat16_rows_are_encoded_as_the_numbers_that_they_are() -> None:
    rows = np.random.default_rng(0).normal(size=(2, 3, 16)).astype(np.float32)
    bits = (rows.view(np.uint32) >> 16).astype(np.uint16)
    exact = (bits.astype(np.uint32) << 16).view(np.float32)
    for encoding in (FULL8, RP8, TOPK8):
        encode = Form(encoding, kept=4, seed=3).encode
        ours = encode(bits, row_type=FloatType.BFLOAT16, wanted=FloatType.BFLOAT16)
        theirs = encode(exact, row_type=FloatType.FLOAT32, wanted=FloatType.BFLOAT16)
        assert ours == theirs
        assert ours.dtype == tensor_pb2.DTYPE_BFLOAT16
        assert list(ours.shape[:2]) == [2, 3]
        assert ours.crc32c == google_crc32c.value(ours.inline)


def test_blocks_that_are_larger_than_what_is_done_at_once_are_seamless() -> None:
    rows = np.random.default_rng(0).normal(size=(700, 128)).astype(np.float32)
    whole = back(rows, FULL8)
    pieces = [back(rows[start : start + 100], FULL8).values for start in range(0, 700, 100)]
    assert np.array_equal(whole.values, np.concatenate(pieces))


@pytest.mark.parametrize("encoding", [tensor_pb2.ENCODING_RAW, PLANES, FULL8, RP8, TOPK8])
def test_no_rows_are_encoded_as_none(encoding: int) -> None:
    values = back(np.empty((2, 0, 8), np.float32), encoding, kept=8).values
    assert values.shape == (2, 0, 8)
