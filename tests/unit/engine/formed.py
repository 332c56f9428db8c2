"""Rows in a form, said in the simplest way: with numpy, one row at a time."""

import numpy as np
import numpy.typing as npt

from rheostat_engine import Coding, RowForm
from rheostat_server.capture.encodings import Form
from rheostat_server.tensors import FloatType, converted, widened
from rheostat_wire.projection import projection_matrix
from rheostat_wire.v1 import tensor_pb2

from .tables import VECTORS

Row = npt.NDArray[np.float32]
_EXACT = (Coding.CAST, Coding.FULL8, Coding.TOPK8)


def check_formed(form: RowForm, row: Row, found: npt.NDArray[np.uint8]) -> None:
    """Whether bytes are a row in a form: to the bit, or where sums are made, up to float32."""
    assert len(found) == form.row_bytes(len(row))
    numbers = row
    if form.directions is not None:
        pairs = zip(form.directions.vectors, form.directions.rows, strict=True)
        numbers = np.array([row @ VECTORS[digest][at] for digest, at in pairs], np.float32)
    if form.directions is None and form.coding in _EXACT:
        assert found.tobytes() == made(form, numbers)
        return
    size = np.linalg.norm(row) * max(
        4.0, *(float(np.linalg.norm(vector, axis=1).max()) for vector in VECTORS.values())
    )
    if form.coding is Coding.CAST:
        kind = FloatType(form.dtype)
        read = widened(found.view(kind.numpy), kind)
        half = 2.0 ** -{"float32": 24, "float16": 11, "bfloat16": 8}[form.dtype]
        np.testing.assert_allclose(read, numbers, rtol=2 * half, atol=1e-6 * size)
        return
    if form.coding is Coding.RP8:
        numbers = projection_matrix(form.kept, len(numbers), form.seed) @ numbers
    scale, offset = found[:8].view("<f4")
    read = offset + scale * found[8:].astype(np.float64)
    np.testing.assert_allclose(read, numbers, rtol=0, atol=scale / 2 + 2e-6 * size)


def made(form: RowForm, numbers: Row) -> bytes:
    """The bytes of numbers that are not projected."""
    if form.coding is Coding.CAST:
        return converted(numbers, held=FloatType.FLOAT32, wanted=FloatType(form.dtype)).tobytes()
    encoding = {
        Coding.FULL8: tensor_pb2.ENCODING_FULL8,
        Coding.TOPK8: tensor_pb2.ENCODING_TOPK8,
    }[form.coding]
    return Form(encoding, form.kept).codes(numbers[None]).tobytes()
