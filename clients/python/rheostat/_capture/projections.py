"""The random projection of ``rp8``: its matrix, and estimates of rows from their projections.

The matrix depends on kept, width and seed alone, so client and server make the same matrix;
`Quantization` in tensor.proto defines it.
"""

from __future__ import annotations

import numpy as np

from rheostat._errors import invalid
from rheostat._fields import UINT64, whole_number
from rheostat_wire import projection
from rheostat_wire.dtypes import FloatArray


def projection_matrix(kept: int, width: int, seed: int = 0) -> FloatArray:
    """The matrix of ``rp8``, float32 [kept, width], of +1/sqrt(kept) and -1/sqrt(kept).

    The server sends a row x as ``x @ matrix.T``. Scalar products of projections are unbiased, with
    a standard deviation of at most ``sqrt(2 / kept) * |x| * |y|``. Making the matrix takes time, so
    use one matrix for all rows of a capture. Raises InvalidRequest for numbers out of range.
    """
    whole_number(kept, "kept", "how many numbers are kept", least=1)
    whole_number(width, "width", "a width", least=1)
    whole_number(seed, "seed", "a seed", most=UINT64)
    return projection.projection_matrix(kept, width, seed)


def back_projected(projections: FloatArray, matrix: FloatArray) -> FloatArray:
    """Estimates of the rows of ``projections`` [..., kept], float32 [..., width].

    ``matrix`` is made by `projection_matrix`. An estimate is unbiased over seeds. Its error is
    about ``sqrt((width - 1) / kept)`` times the row's norm, so use it for sums over many rows, not
    for single numbers.
    """
    if matrix.ndim != 2 or projections.shape[-1:] != matrix.shape[:1]:
        raise invalid(
            "matrix",
            f"projections {list(projections.shape)} are not of a matrix {list(matrix.shape)}",
        )
    return np.asarray(projections @ matrix, np.float32)
