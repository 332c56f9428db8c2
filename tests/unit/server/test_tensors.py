import google_crc32c
import lz4.frame
import numpy as np
import pytest

from rheostat_server.errors import (
    InvalidValue,
    MessageTooLarge,
    MissingField,
    TensorPayload,
    UnknownEnum,
)
from rheostat_server.limits import INLINE_VECTOR_BYTES
from rheostat_server.steering.vector_lookup import inline_vector
from rheostat_server.tensors import (
    FloatType,
    checked_payload,
    converted,
    float_type,
    widen,
)
from rheostat_wire import byte_planes
from rheostat_wire.v1 import tensor_pb2


def message(**fields: object) -> tensor_pb2.Tensor:
    values = {
        "dtype": tensor_pb2.DTYPE_FLOAT32,
        "shape": [2],
        "encoding": tensor_pb2.ENCODING_RAW,
        "inline": b"12345678",
        **fields,
    }
    return tensor_pb2.Tensor(**values)


def test_a_payload_that_fits_comes_back_as_it_is() -> None:
    good = message(crc32c=google_crc32c.value(b"12345678"))
    assert checked_payload(good, "t", kind=FloatType.FLOAT32) == b"12345678"


@pytest.mark.parametrize(
    ("fields", "error", "field"),
    [
        ({"inline": b"1234567"}, TensorPayload, "t.inline"),
        ({"inline": b""}, TensorPayload, "t.inline"),
        ({"shape": [3]}, TensorPayload, "t.inline"),
        ({"shape": [1] * 9}, InvalidValue, "t.shape"),
        ({"shape": [2**32 - 1] * 8}, TensorPayload, "t.inline"),
        ({"crc32c": 1}, TensorPayload, "t.crc32c"),
        ({"encoding": 0}, UnknownEnum, "t.encoding"),
        ({"encoding": 99}, UnknownEnum, "t.encoding"),
        ({"encoding": tensor_pb2.ENCODING_FULL8}, InvalidValue, "t.encoding"),
        ({"encoding": tensor_pb2.ENCODING_LZ4_PLANES}, TensorPayload, "t.inline"),
        ({"inline": None}, MissingField, "t.inline"),
        ({"inline": None, "shm": tensor_pb2.ShmRef()}, InvalidValue, "t.shm"),
    ],
)
def test_a_payload_that_does_not_fit_is_refused_by_field(fields, error, field) -> None:
    with pytest.raises(error) as caught:
        checked_payload(message(**fields), "t", kind=FloatType.FLOAT32)
    assert caught.value.field == field


def test_byte_planes_come_back_as_the_elements() -> None:
    elements = np.array([1.5, -2.0], np.float32)
    frame = byte_planes.compress(elements.tobytes(), 4)
    good = message(encoding=tensor_pb2.ENCODING_LZ4_PLANES, inline=frame)
    assert checked_payload(good, "t", kind=FloatType.FLOAT32) == elements.tobytes()


@pytest.mark.parametrize("shape", [[1], [3], [2**20, 2**20], [0]])
@pytest.mark.parametrize("store_size", [True, False])
def test_a_frame_of_another_length_than_the_shape_is_refused(shape, store_size) -> None:
    frame = lz4.frame.compress(bytes(8), store_size=store_size)
    for inline in (frame, lz4.frame.compress(bytes(64 << 20), store_size=store_size), frame + b"!"):
        bad = message(encoding=tensor_pb2.ENCODING_LZ4_PLANES, inline=inline, shape=shape)
        with pytest.raises(TensorPayload):
            checked_payload(bad, "t", kind=FloatType.FLOAT32)


def test_an_inline_vector_may_come_in_byte_planes() -> None:
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    frame = byte_planes.compress(rows.tobytes(), 4)
    packed = message(encoding=tensor_pb2.ENCODING_LZ4_PLANES, shape=[2, 4], inline=frame)
    raw = message(shape=[2, 4], inline=rows.tobytes())
    assert inline_vector(packed, 4, "t") == inline_vector(raw, 4, "t")


def test_an_inline_vector_is_as_large_as_it_is_unpacked() -> None:
    frame = byte_planes.compress(bytes(INLINE_VECTOR_BYTES + 4 * 4096), 4)
    rows = INLINE_VECTOR_BYTES // (4 * 4096) + 1
    packed = message(encoding=tensor_pb2.ENCODING_LZ4_PLANES, shape=[rows, 4096], inline=frame)
    with pytest.raises(MessageTooLarge):
        inline_vector(packed, 4096, "t")


def test_only_float_types_can_be_rows() -> None:
    assert float_type(tensor_pb2.DTYPE_BFLOAT16, "d") is FloatType.BFLOAT16
    with pytest.raises(InvalidValue):
        float_type(tensor_pb2.DTYPE_INT32, "d")
    with pytest.raises(UnknownEnum):
        float_type(0, "d")


def test_bfloat16_widens_to_the_float32_with_the_same_upper_half() -> None:
    values = np.array([1.0, -2.5, 3.0e38, 0.0], dtype=np.float32)
    bits = (values.view(np.uint32) >> 16).astype("<u2")
    expected = (bits.astype(np.uint32) << 16).view(np.float32)
    assert widen(bits.tobytes(), FloatType.BFLOAT16).tolist() == expected.tolist()


def test_rows_in_their_own_type_keep_every_bit() -> None:
    rows = np.array([[0x7FC1, 0x8000, 0x3F80]], dtype=np.uint16)
    sent = converted(rows, row_type=FloatType.BFLOAT16, wanted=FloatType.BFLOAT16)
    assert sent.tobytes() == rows.astype("<u2").tobytes()


def test_narrowing_to_bfloat16_rounds_to_nearest_and_ties_to_even() -> None:
    step = 2.0**-7
    exact = np.array(
        [1.0, 1 + step / 2, 1 + 3 * step / 2, 1 + step * 0.51, -1 - step * 0.49, np.inf, np.nan],
        dtype=np.float32,
    )
    sent = converted(exact[None], row_type=FloatType.FLOAT32, wanted=FloatType.BFLOAT16)
    got = widen(sent.tobytes(), FloatType.BFLOAT16)
    expected = [1.0, 1.0, 1 + 2 * step, 1 + step, -1.0, np.inf, np.nan]
    np.testing.assert_array_equal(got, np.array(expected, dtype=np.float32))


def test_narrowing_to_float16_is_what_numpy_does() -> None:
    rows = np.array([[1e-8, 65504.0, 70000.0, 1 / 3]], dtype=np.float32)
    sent = converted(rows, row_type=FloatType.FLOAT32, wanted=FloatType.FLOAT16)
    got = np.frombuffer(sent.tobytes(), dtype="<f2")
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got, rows[0].astype(np.float16))


@pytest.mark.parametrize("kind", list(FloatType))
def test_the_limit_of_a_type_is_where_rounding_gives_infinity(kind: FloatType) -> None:
    below = np.float64(np.nextafter(kind.largest, 0))
    if kind is FloatType.FLOAT32:
        assert np.isfinite(np.float32(below))
        with np.errstate(over="ignore"):
            assert np.isinf(np.float32(kind.largest))
        return
    rows = np.array([[np.float32(kind.largest), np.nextafter(np.float32(kind.largest), 0)]])
    sent = converted(rows.astype(np.float32), row_type=FloatType.FLOAT32, wanted=kind)
    assert np.isinf(widen(sent.tobytes(), kind)).tolist() == [True, False]
