"""Payloads of every encoding, written by hand, and what is refused of them."""

import struct
import tracemalloc
from itertools import islice

import google_crc32c
import lz4.frame
import numpy as np
import pytest

import rheostat
from rheostat import DataLoss, Encoding, InvalidRequest, RheostatError, ServerError
from rheostat._capture.activations import read_captured
from rheostat._capture.encodings import decoded, read_tensor
from rheostat_wire.v1 import capture_pb2, tensor_pb2, types_pb2

ENCODINGS = ("raw", "lz4_planes", "full8", "rp8", "topk8")


def floats(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def indices(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


# Two rows of two numbers each: scales, offsets, codes.
FULL8 = floats(0.5, 2.0) + floats(-1.0, 10.0) + bytes([0, 4, 255, 1])
TOPK8 = floats(1.0, 2.0) + floats(5.0, -3.0) + indices(0, 2, 1, 3) + bytes([0, 1, 0, 4])


def tensor(encoding: str, payload: bytes, shape: list[int], **fields: object) -> tensor_pb2.Tensor:
    number = tensor_pb2.Encoding.Value(f"ENCODING_{encoding.upper()}")
    given = {"dtype": tensor_pb2.DTYPE_FLOAT32, "crc32c": google_crc32c.value(payload), **fields}
    return tensor_pb2.Tensor(shape=shape, encoding=number, inline=payload, **given)


def said(**fields: int) -> tensor_pb2.Quantization:
    return tensor_pb2.Quantization(**fields)


def good(encoding: str) -> tensor_pb2.Tensor:
    """A tensor of two rows."""
    match encoding:
        case "raw":
            return tensor("raw", floats(1, 2, 3, 4), [2, 2])
        case "lz4_planes":
            planes = np.frombuffer(floats(1, 2, 3, 4), np.uint8).reshape(4, 4).T.tobytes()
            return tensor("lz4_planes", lz4.frame.compress(planes), [2, 2])
        case "full8":
            return tensor("full8", FULL8, [2, 2])
        case "rp8":
            return tensor("rp8", FULL8, [2, 2], quantization=said(kept=2, width=5, seed=9))
    return tensor("topk8", TOPK8, [2, 4], quantization=said(kept=2, width=4))


def changed(like: str, /, **fields: object) -> tensor_pb2.Tensor:
    """A good tensor with other fields, and a checksum that fits."""
    found = good(like)
    if "shape" in fields:
        found.ClearField("shape")
    found.MergeFrom(tensor_pb2.Tensor(**fields))
    found.crc32c = google_crc32c.value(found.inline)
    return found


@pytest.mark.parametrize("encoding", ["raw", "lz4_planes"])
def test_exact_encodings_give_the_numbers_and_no_error(encoding: str) -> None:
    values, how, error = read_tensor(good(encoding))
    assert values.tolist() == [[1, 2], [3, 4]]
    assert (how, how.exact, error) == (Encoding(encoding), True, None)


@pytest.mark.parametrize(
    ("dtype", "storage"), [("FLOAT32", "<u4"), ("FLOAT16", "<u2"), ("BFLOAT16", "<u2")]
)
def test_byte_planes_keep_every_bit_whatever_it_says(dtype: str, storage: str) -> None:
    elements = np.arange(2**16, dtype=np.uint32)
    bits = (elements * (0x10001 if storage == "<u4" else 1)).astype(storage)
    planes = bits.view(np.uint8).reshape(-1, bits.itemsize).T.tobytes()
    number = tensor_pb2.Dtype.Value(f"DTYPE_{dtype}")
    packed = tensor("lz4_planes", lz4.frame.compress(planes), [4, 2**14], dtype=number)
    raw = tensor("raw", bits.tobytes(), [4, 2**14], dtype=number)
    assert read_tensor(packed).values.tobytes() == read_tensor(raw).values.tobytes()


def test_full8_is_offset_plus_scale_times_code() -> None:
    values, how, error = read_tensor(good("full8"))
    assert values.tolist() == [[-1.0, 1.0], [520.0, 12.0]]
    assert (how, how.exact) == (Encoding("full8"), False)
    assert np.all(error > [0.25, 1.0])
    assert np.all(error < [0.2501, 1.0001])


def test_rp8_gives_the_projection_and_names_its_matrix() -> None:
    values, how, error = read_tensor(good("rp8"))
    assert values.tolist() == [[-1.0, 1.0], [520.0, 12.0]]
    assert how == Encoding("rp8", kept=2, width=5, seed=9)
    assert error.shape == (2,)


def test_topk8_puts_what_was_kept_in_its_place_and_0_elsewhere() -> None:
    values, how, error = read_tensor(good("topk8"))
    assert values.tolist() == [[5.0, 0.0, 6.0, 0.0], [0.0, -3.0, 0.0, 5.0]]
    assert how == Encoding("topk8", kept=2, width=4)
    assert np.all(error > [5.5, 4.0])  # the smallest kept number, and half its scale
    assert np.all(error < [5.5001, 4.0001])


def test_topk8_of_all_numbers_is_off_by_half_a_scale() -> None:
    payload = floats(1.0, 5.0) + indices(0, 1) + bytes([0, 1])
    kept_all = tensor("topk8", payload, [1, 2], quantization=said(kept=2, width=2))
    values, _, error = read_tensor(kept_all)
    assert values.tolist() == [[5.0, 6.0]]
    assert 0.5 < error[0] < 0.5001


def test_a_row_of_scale_0_is_exact_and_one_of_nan_says_so() -> None:
    payload = floats(0.0, np.nan, 7.5, np.nan) + bytes([0, 0, 0, 0])
    values, _, error = read_tensor(tensor("full8", payload, [2, 2]))
    assert values[0].tolist() == [7.5, 7.5]
    assert error[0] == 0
    assert np.isnan(values[1]).all()
    assert np.isnan(error[1])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_no_rows_are_no_rows(encoding: str) -> None:
    payload = lz4.frame.compress(b"") if encoding == "lz4_planes" else b""
    quantization = {
        "rp8": said(kept=4, width=8, seed=0),
        "topk8": said(kept=2, width=4),
    }.get(encoding)
    values, _, error = read_tensor(tensor(encoding, payload, [2, 0, 4], quantization=quantization))
    assert values.shape == (2, 0, 4)
    assert error is None or error.shape == (2, 0)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_truncated_payload_is_refused(encoding: str) -> None:
    whole = good(encoding)
    for length in range(len(whole.inline)):
        cut = changed(encoding, inline=whole.inline[:length])
        with pytest.raises(ServerError):
            read_tensor(cut)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_payload_that_goes_on_is_refused(encoding: str) -> None:
    with pytest.raises(ServerError):
        read_tensor(changed(encoding, inline=good(encoding).inline + b"\0"))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_any_damaged_byte_is_lost_data(encoding: str) -> None:
    whole = good(encoding)
    for place in range(len(whole.inline)):
        damaged = bytearray(whole.inline)
        damaged[place] ^= 0x10
        with pytest.raises(DataLoss, match="came damaged"):
            decoded(whole, bytes(damaged))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_damage_without_a_checksum_is_other_numbers_or_an_error_of_ours(encoding: str) -> None:
    whole = good(encoding)
    whole.ClearField("crc32c")
    for place in range(len(whole.inline)):
        for flip in (0x01, 0x10, 0x80, 0xFF):
            damaged = bytearray(whole.inline)
            damaged[place] ^= flip
            try:
                values = decoded(whole, bytes(damaged)).values
            except RheostatError:
                continue
            assert values.shape == tuple(whole.shape)


@pytest.mark.parametrize(
    ("encoding", "fields"),
    [
        ("raw", {"shape": [3, 2]}),
        ("raw", {"shape": [2**32 - 1] * 8}),
        ("raw", {"shape": [2**32 - 1] * 7 + [0]}),
        ("raw", {"shape": [1] * 9}),
        ("raw", {"dtype": tensor_pb2.DTYPE_INT32}),
        ("lz4_planes", {"shape": [3, 2]}),
        ("lz4_planes", {"shape": [1, 2]}),
        ("lz4_planes", {"inline": b"no frame"}),
        ("lz4_planes", {"dtype": tensor_pb2.DTYPE_FLOAT16}),
        ("full8", {"shape": []}),
        ("full8", {"shape": [1, 4]}),
        ("rp8", {"quantization": said(kept=3)}),
        ("rp8", {"quantization": said(width=1)}),
        ("topk8", {"quantization": said(kept=5)}),
        ("topk8", {"quantization": said(width=5)}),
        ("topk8", {"inline": TOPK8[:16] + indices(2, 0, 1, 3) + TOPK8[-4:]}),
        ("topk8", {"inline": TOPK8[:16] + indices(2, 2, 1, 3) + TOPK8[-4:]}),
        ("topk8", {"inline": TOPK8[:16] + indices(0, 2, 1, 4) + TOPK8[-4:]}),
        ("topk8", {"inline": TOPK8[:16] + indices(0, 2, 1, 2**32 - 1) + TOPK8[-4:]}),
        ("full8", {"encoding": 99}),
        ("full8", {"shm": tensor_pb2.ShmRef()}),
    ],
)
def test_parts_that_do_not_fit_together_are_an_error_of_the_server(encoding, fields) -> None:
    with pytest.raises(ServerError):
        read_tensor(changed(encoding, **fields))


@pytest.mark.parametrize("encoding", ["rp8", "topk8"])
def test_an_encoding_that_needs_a_quantization_is_refused_without(encoding: str) -> None:
    bare = good(encoding)
    bare.ClearField("quantization")
    with pytest.raises(ServerError, match="kept 0, width 0, no seed"):
        read_tensor(bare)


@pytest.mark.parametrize("store_size", [True, False])
def test_a_frame_that_holds_more_than_the_shape_is_refused_without_being_unpacked(
    store_size: bool,
) -> None:
    bomb = lz4.frame.compress(bytes(256 << 20), store_size=store_size)
    small = tensor("lz4_planes", bomb, [1 << 10, 1 << 10])  # 4 MiB
    tracemalloc.start()
    try:
        with pytest.raises(ServerError):
            read_tensor(small)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


def test_a_shape_that_no_frame_of_this_length_can_hold_is_refused_at_once() -> None:
    frame = lz4.frame.compress(bytes(1000))
    with pytest.raises(ServerError, match="another length"):
        read_tensor(tensor("lz4_planes", frame, [1 << 20, 1 << 20]))


def captured(*tensors: tensor_pb2.Tensor) -> rheostat.Activations:
    """Rows of positions 0 and 1 at resid_post[3], once per tensor."""
    parts = []
    for sent in tensors:
        shaped = tensor_pb2.Tensor()
        shaped.CopyFrom(sent)
        shaped.ClearField("shape")
        shaped.shape.extend([1, *sent.shape])
        message = capture_pb2.Captured(
            sites=[types_pb2.Site(point=types_pb2.POINT_RESID_POST, layer=3)],
            positions=[types_pb2.PositionRun(start=0, count=2)],
            token_ids=[5, 6],
            tensor=shaped,
        )
        parts += read_captured(message)
    return rheostat.Activations({rheostat.Site(rheostat.Point.RESID_POST, 3): parts})


def test_captured_rows_say_how_they_travelled_and_how_far_off_they_can_be() -> None:
    found = captured(good("full8"))
    assert found["resid_post", 3].tolist() == [[-1.0, 1.0], [520.0, 12.0]]
    assert found.encoding("resid_post", 3) == Encoding("full8")
    error = read_tensor(good("full8")).max_error
    assert np.array_equal(found.max_error("resid_post", 3), error)


def test_exact_rows_are_off_by_nothing() -> None:
    found = captured(good("lz4_planes"))
    assert found.encoding("resid_post", 3).exact
    assert found.max_error("resid_post", 3).tolist() == [0, 0]


def test_exact_encodings_of_one_site_join_as_do_two_captures_in_one_encoding() -> None:
    exact = captured(good("raw"), good("lz4_planes"))
    assert exact["resid_post", 3].tolist() == [[1, 2], [3, 4]]
    twice = captured(good("full8"), good("full8"))
    assert twice["resid_post", 3].tolist() == [[-1.0, 1.0], [520.0, 12.0]]
    assert twice.max_error("resid_post", 3).shape == (2,)


def test_rows_of_one_site_in_two_encodings_are_not_mixed() -> None:
    found = captured(good("raw"), good("rp8"))
    assert repr(found) == "Activations(resid_post[3]: [2, 2], resid_post[3]: [2, 2])"
    with pytest.raises(InvalidRequest, match="raw of width 2 and rp8 of width 2"):
        _ = found["resid_post", 3]


def splitmix64(seed: int):
    """The generator as its authors wrote it, on whole numbers."""
    mask = 2**64 - 1
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        z = ((seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        yield z ^ (z >> 31)


@pytest.mark.parametrize(("kept", "width", "seed"), [(1, 1, 0), (4, 9, 7), (3, 5, 2**64 - 1)])
def test_the_matrix_follows_the_lowest_bits_of_splitmix64(kept, width, seed) -> None:
    assert list(islice(splitmix64(1234567), 2)) == [6457827717110365317, 3203168211198807973]
    bits = [number & 1 for number in islice(splitmix64(seed), kept * width)]
    size = np.float32(1 / np.sqrt(kept))
    expected = np.where(np.array(bits) == 0, size, -size).reshape(kept, width)
    found = rheostat.projection_matrix(kept, width, seed)
    assert found.dtype == np.float32
    assert np.array_equal(found, expected)


def test_a_matrix_of_impossible_numbers_is_refused() -> None:
    for kept, width, seed in ((0, 4, 0), (2, 0, 0), (2, 4, -1), (2, 4, 2**64)):
        with pytest.raises(InvalidRequest):
            rheostat.projection_matrix(kept, width, seed)


def test_an_estimate_is_right_on_average_and_off_by_what_it_says() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(3, 40)).astype(np.float32)
    estimates = []
    for seed in range(2000):
        matrix = rheostat.projection_matrix(16, 40, seed)
        estimates.append(rheostat.back_projected(rows @ matrix.T, matrix))
    assert np.allclose(np.mean(estimates, axis=0), rows, atol=0.2)
    off = np.linalg.norm(np.array(estimates) - rows, axis=2) / np.linalg.norm(rows, axis=1)
    assert np.sqrt((off**2).mean()) == pytest.approx(np.sqrt(39 / 16), rel=0.03)


def test_projections_of_another_matrix_are_refused() -> None:
    matrix = rheostat.projection_matrix(4, 8)
    with pytest.raises(InvalidRequest):
        rheostat.back_projected(np.zeros((2, 5), np.float32), matrix)
