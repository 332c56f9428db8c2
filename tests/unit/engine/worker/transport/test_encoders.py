"""The device's encoders make the bytes that the server's make, row by row."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rheostat._capture.encodings import read_tensor
from rheostat_engine import Codec, RowEncoding
from rheostat_engine.worker.transport import encoders
from rheostat_server.capture.encodings import Form
from rheostat_server.tensors import FloatType, converted
from rheostat_wire.projection import projection_matrix
from rheostat_wire.quantization import encode_full8, encode_topk8, join_rows
from rheostat_wire.v1 import tensor_pb2

LARGEST = float(np.finfo(np.float32).max)
TINY = 2.0**-149
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CODED = {
    tensor_pb2.ENCODING_FULL8: Codec.FULL8,
    tensor_pb2.ENCODING_RP8: Codec.RP8,
    tensor_pb2.ENCODING_TOPK8: Codec.TOPK8,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

shapes = hnp.array_shapes(min_dims=2, max_dims=2, max_side=9)
any_rows = st.one_of(
    hnp.arrays(np.float32, shapes, elements=st.floats(width=32)),
    hnp.arrays(np.float32, shapes, elements=st.integers(0, 700).map(lambda k: k * TINY)),
    hnp.arrays(np.float32, shapes, elements=st.integers(-3, 3).map(float)),  # many alike
    hnp.arrays(np.float32, shapes, elements=st.sampled_from([-LARGEST, LARGEST, -0.0, 0.0])),
)


def block(made: torch.Tensor, kept: int = 0) -> bytes:
    """Rows as tensor.proto lays them out: all scales, all offsets, all indices, all codes."""
    assert made.dtype == torch.uint8
    return join_rows(made.cpu().numpy(), kept)


def held(rows: torch.Tensor) -> np.ndarray:
    """The rows as the server's encoders take them."""
    return rows.float().cpu().numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@given(any_rows)
def test_full8_is_the_server_s_to_the_byte(dtype: torch.dtype, rows: np.ndarray) -> None:
    on_device = torch.from_numpy(rows).to(DEVICE, dtype)
    packed = block(encoders.full8(on_device))
    assert len(packed) == rows.shape[0] * (8 + rows.shape[1])
    assert packed == encode_full8(held(on_device))


@pytest.mark.parametrize("dtype", DTYPES)
@given(any_rows, st.data())
def test_topk8_is_the_server_s_to_the_byte(dtype: torch.dtype, rows: np.ndarray, data) -> None:
    kept = data.draw(st.integers(1, rows.shape[1]))
    on_device = torch.from_numpy(rows).to(DEVICE, dtype)
    packed = block(encoders.topk8(on_device, kept), kept)
    assert len(packed) == rows.shape[0] * (8 + 5 * kept)
    assert packed == encode_topk8(held(on_device), kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rp8_read_back_is_within_the_stated_error_of_the_exact_projection(dtype) -> None:
    torch.manual_seed(0)
    rows = (torch.randn(50, 96) * torch.logspace(-3, 3, 50)[:, None]).to(DEVICE, dtype)
    matrix = projection_matrix(24, 96, 5)
    packed = block(encoders.rp8(rows, torch.from_numpy(matrix).to(DEVICE)))
    read = read_tensor(
        tensor_pb2.Tensor(
            dtype=tensor_pb2.DTYPE_FLOAT32,
            shape=[50, 24],
            encoding=tensor_pb2.ENCODING_RP8,
            inline=packed,
            quantization=tensor_pb2.Quantization(kept=24, width=96, seed=5),
        )
    )
    exact = held(rows).astype(np.float64) @ matrix.T
    # The sum is made in float32, in an order of its own.
    norms = np.linalg.norm(held(rows), axis=1, keepdims=True)
    assert (np.abs(read.values - exact) <= read.max_error[:, None] + 1e-6 * norms).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rp8_differs_from_the_server_s_by_one_code_at_most(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    rows = torch.randn(200, 96).to(DEVICE, dtype)
    matrix = projection_matrix(24, 96, 5)
    ours = block(encoders.rp8(rows, torch.from_numpy(matrix).to(DEVICE)))
    theirs = encode_full8(held(rows) @ matrix.T)
    codes = [np.frombuffer(one, np.uint8, offset=1600).astype(int) for one in (ours, theirs)]
    heads = [np.frombuffer(one, "<f4", 400) for one in (ours, theirs)]
    assert np.abs(codes[0] - codes[1]).max() <= 1
    assert np.allclose(*heads, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_projection_is_the_scalar_products_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    rows, directions = torch.randn(10, 96).to(DEVICE, dtype).split([7, 3])
    found = encoders.project(rows, directions)
    assert found.dtype == torch.float32
    exact = rows.double() @ directions.double().T
    assert torch.allclose(found.double(), exact, rtol=1e-5, atol=1e-4)


def test_rows_that_lie_apart_in_memory_are_read_as_rows() -> None:
    wide = torch.randn(10, 64, device=DEVICE)
    rows = wide[::2, 8:40]
    assert block(encoders.full8(rows)) == block(encoders.full8(rows.clone()))
    assert block(encoders.topk8(rows, 5), 5) == block(encoders.topk8(rows.clone(), 5), 5)


@pytest.mark.parametrize("wanted", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@given(any_rows)
def test_another_type_is_the_server_s_to_the_bit(dtype, wanted, rows: np.ndarray) -> None:
    numbers = np.nan_to_num(rows, nan=1.0)  # which NaN comes out is not said
    on_device = torch.from_numpy(numbers).to(DEVICE, dtype)
    kind = FloatType(str(wanted).removeprefix("torch."))
    expected = converted(held(on_device), row_type=FloatType.FLOAT32, wanted=kind)
    made = encoders.cast(on_device, wanted).cpu().numpy()
    assert made.tobytes() == expected.tobytes()
    assert len(made) == len(rows)


@pytest.mark.parametrize(
    ("kept", "width", "seed"), [(1, 1, 0), (24, 96, 5), (3, 7, 2**64 - 1), (600, 512, 2**63)]
)
def test_a_random_projection_is_the_server_s(kept: int, width: int, seed: int) -> None:
    made = encoders.random_signs(kept, width, seed, torch.device(DEVICE)).cpu().numpy()
    assert made.tobytes() == projection_matrix(kept, width, seed).tobytes()


@pytest.mark.parametrize("encoding", [*CODED])
@given(any_rows, st.data())
def test_the_server_makes_the_same_rows(encoding, rows: np.ndarray, data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, rows.shape[1]))
    made = Form(encoding, kept, 7).codes(rows)
    encoding = RowEncoding(CODED[encoding], kept=kept, seed=7)
    assert made.shape == (len(rows), encoding.row_bytes(rows.shape[1]))
    on_device = torch.from_numpy(rows).to(DEVICE)
    if encoding == tensor_pb2.ENCODING_FULL8:
        assert made.tobytes() == encoders.full8(on_device).cpu().numpy().tobytes()
    elif encoding == tensor_pb2.ENCODING_TOPK8:
        assert made.tobytes() == encoders.topk8(on_device, kept).cpu().numpy().tobytes()


def test_no_rows_are_no_bytes() -> None:
    none = torch.empty(0, 16, dtype=torch.bfloat16)
    assert encoders.full8(none).shape == (0, 24)
    assert encoders.topk8(none, 3).shape == (0, 23)
    assert encoders.rp8(none, torch.ones(4, 16)).shape == (0, 12)
    assert encoders.cast(none, torch.float16).shape == (0, 32)


@pytest.mark.parametrize("encoder", ["full8", "rp8", "topk8"])
def test_sizes_follow_from_shapes_alone(encoder: str) -> None:
    """On the meta device there are no numbers to wait for."""
    rows = torch.empty(5, 16, dtype=torch.bfloat16, device="meta")
    match encoder:
        case "full8":
            assert encoders.full8(rows).shape == (5, 24)
        case "rp8":
            matrix = torch.empty(4, 16, device="meta")
            assert encoders.rp8(rows, matrix).shape == (5, 12)
        case _:
            assert encoders.topk8(rows, 4).shape == (5, 28)
