"""The device's encoders make the bytes that the server's make, which the client reads."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rheostat._encodings import read_tensor
from rheostat._proto.v1 import tensor_pb2
from rheostat_engine.core import encoders
from rheostat_server import encodings

LARGEST = float(np.finfo(np.float32).max)
TINY = 2.0**-149
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

shapes = hnp.array_shapes(min_dims=2, max_dims=2, max_side=9)
any_rows = st.one_of(
    hnp.arrays(np.float32, shapes, elements=st.floats(width=32)),
    hnp.arrays(np.float32, shapes, elements=st.integers(0, 700).map(lambda k: k * TINY)),
    hnp.arrays(np.float32, shapes, elements=st.integers(-3, 3).map(float)),  # many alike
    hnp.arrays(np.float32, shapes, elements=st.sampled_from([-LARGEST, LARGEST, -0.0, 0.0])),
)


def block(packed: torch.Tensor) -> bytes:
    assert packed.dtype == torch.uint8
    assert packed.ndim == 1
    return packed.cpu().numpy().tobytes()


def held(rows: torch.Tensor) -> np.ndarray:
    """The rows as the server's encoders take them."""
    return rows.float().cpu().numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@given(any_rows)
def test_full8_is_the_server_s_to_the_byte(dtype: torch.dtype, rows: np.ndarray) -> None:
    on_device = torch.from_numpy(rows).to(DEVICE, dtype)
    packed = block(encoders.full8(on_device))
    assert len(packed) == rows.shape[0] * (8 + rows.shape[1])
    assert packed == encodings.full8(held(on_device))


@pytest.mark.parametrize("dtype", DTYPES)
@given(any_rows, st.data())
def test_topk8_is_the_server_s_to_the_byte(dtype: torch.dtype, rows: np.ndarray, data) -> None:
    kept = data.draw(st.integers(1, rows.shape[1]))
    on_device = torch.from_numpy(rows).to(DEVICE, dtype)
    packed = block(encoders.topk8(on_device, kept))
    assert len(packed) == rows.shape[0] * (8 + 5 * kept)
    assert packed == encodings.topk8(held(on_device), kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rp8_read_back_is_within_the_stated_error_of_the_exact_projection(dtype) -> None:
    torch.manual_seed(0)
    rows = (torch.randn(50, 96) * torch.logspace(-3, 3, 50)[:, None]).to(DEVICE, dtype)
    matrix = encodings.projection_matrix(24, 96, 5)
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
    matrix = encodings.projection_matrix(24, 96, 5)
    ours = block(encoders.rp8(rows, torch.from_numpy(matrix).to(DEVICE)))
    theirs = encodings.full8(held(rows) @ matrix.T)
    codes = [np.frombuffer(one, np.uint8, offset=1600).astype(int) for one in (ours, theirs)]
    heads = [np.frombuffer(one, "<f4", 400) for one in (ours, theirs)]
    assert np.abs(codes[0] - codes[1]).max() <= 1
    assert np.allclose(*heads, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_projection_is_the_scalar_products_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    rows, directions = torch.randn(10, 96).to(DEVICE, dtype).split([7, 3])
    found = encoders.projected(rows, directions)
    assert found.dtype == torch.float32
    exact = rows.double() @ directions.double().T
    assert torch.allclose(found.double(), exact, rtol=1e-5, atol=1e-4)


def test_rows_that_lie_apart_in_memory_are_read_as_rows() -> None:
    wide = torch.randn(10, 64, device=DEVICE)
    rows = wide[::2, 8:40]
    assert block(encoders.full8(rows)) == block(encoders.full8(rows.clone()))
    assert block(encoders.topk8(rows, 5)) == block(encoders.topk8(rows.clone(), 5))


def test_no_rows_are_a_block_of_no_bytes() -> None:
    none = torch.empty(0, 16, dtype=torch.bfloat16)
    assert encoders.full8(none).shape == (0,)
    assert encoders.topk8(none, 3).shape == (0,)
    assert encoders.rp8(none, torch.ones(4, 16)).shape == (0,)


@pytest.mark.parametrize("encoder", ["full8", "rp8", "topk8"])
def test_sizes_follow_from_shapes_alone(encoder: str) -> None:
    """On the meta device there are no numbers to wait for."""
    rows = torch.empty(5, 16, dtype=torch.bfloat16, device="meta")
    match encoder:
        case "full8":
            assert encoders.full8(rows).shape == (5 * 24,)
        case "rp8":
            matrix = torch.empty(4, 16, device="meta")
            assert encoders.rp8(rows, matrix).shape == (5 * 12,)
        case _:
            assert encoders.topk8(rows, 4).shape == (5 * 28,)
