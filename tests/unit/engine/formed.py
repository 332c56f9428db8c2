"""Rows in a form, said in the simplest way: with numpy, one row at a time."""

import numpy as np
import numpy.typing as npt

from rheostat_engine import Codec, RowEncoding
from rheostat_server.capture.encodings import Form
from rheostat_server.tensors import FloatType, converted, widened
from rheostat_wire.projection import projection_matrix
from rheostat_wire.v1 import tensor_pb2

from .tables import VECTORS

Row = npt.NDArray[np.float32]
_EXACT = (Codec.CAST, Codec.FULL8, Codec.TOPK8)


def check_formed(encoding: RowEncoding, row: Row, found: npt.NDArray[np.uint8]) -> None:
    """Whether bytes are a row in a form: to the bit, or where sums are made, up to float32."""
    assert len(found) == encoding.row_bytes(len(row))
    numbers = row
    if encoding.directions is not None:
        pairs = zip(encoding.directions.vectors, encoding.directions.rows, strict=True)
        numbers = np.array([row @ VECTORS[digest][at] for digest, at in pairs], np.float32)
    if encoding.directions is None and encoding.codec in _EXACT:
        assert found.tobytes() == made(encoding, numbers)
        return
    size = np.linalg.norm(row) * max(
        4.0, *(float(np.linalg.norm(vector, axis=1).max()) for vector in VECTORS.values())
    )
    if encoding.codec is Codec.CAST:
        kind = FloatType(encoding.dtype)
        read = widened(found.view(kind.numpy), kind)
        half = 2.0 ** -{"float32": 24, "float16": 11, "bfloat16": 8}[encoding.dtype]
        np.testing.assert_allclose(read, numbers, rtol=2 * half, atol=1e-6 * size)
        return
    if encoding.codec is Codec.RP8:
        numbers = projection_matrix(encoding.kept, len(numbers), encoding.seed) @ numbers
    scale, offset = found[:8].view("<f4")
    read = offset + scale * found[8:].astype(np.float64)
    np.testing.assert_allclose(read, numbers, rtol=0, atol=scale / 2 + 2e-6 * size)


def made(encoding: RowEncoding, numbers: Row) -> bytes:
    """The bytes of numbers that are not projected."""
    if encoding.codec is Codec.CAST:
        return converted(
            numbers, row_type=FloatType.FLOAT32, wanted=FloatType(encoding.dtype)
        ).tobytes()
    message = {
        Codec.FULL8: tensor_pb2.ENCODING_FULL8,
        Codec.TOPK8: tensor_pb2.ENCODING_TOPK8,
    }[encoding.codec]
    return Form(message, encoding.kept).codes(numbers[None]).tobytes()
