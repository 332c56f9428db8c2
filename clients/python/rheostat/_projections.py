"""The random projection of ``rp8``: its matrix from the seed, and rows estimated from it.

Invariant: the matrix depends on kept, width and seed alone, and is the one that the server used;
`Quantization` in tensor.proto defines it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from rheostat._arrays import FloatArray
from rheostat._errors import invalid
from rheostat._fields import UINT64, whole_number

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def projection_matrix(kept: int, width: int, seed: int = 0) -> FloatArray:
    """The matrix of ``rp8``, float32 [kept, width], of +1/sqrt(kept) and -1/sqrt(kept).

    Rows x come as ``x @ matrix.T``. Scalar products are kept on average, with a standard deviation
    of at most ``sqrt(2 / kept) * |x| * |y|``. Making one takes time: keep it for all rows of a
    capture. Raises InvalidRequest for numbers out of range.
    """
    whole_number(kept, "kept", "how many numbers are kept", least=1)
    whole_number(width, "width", "a width", least=1)
    whole_number(seed, "seed", "a seed", most=UINT64)
    signs = 1.0 - 2.0 * (_splitmix64(seed, kept * width) & np.uint64(1)).astype(np.float64)
    matrix: FloatArray = (signs / math.sqrt(kept)).astype(np.float32).reshape(kept, width)
    return matrix


def back_projected(projections: FloatArray, matrix: FloatArray) -> FloatArray:
    """Estimates of the rows that ``projections`` [..., kept] came of, float32 [..., width].

    ``matrix`` is that of `projection_matrix`. Each estimate is right on average over seeds, and off
    by about ``sqrt((width - 1) / kept)`` times the row's norm: good for sums over many rows or
    numbers, not for single ones.
    """
    if matrix.ndim != 2 or projections.shape[-1:] != matrix.shape[:1]:
        raise invalid(
            "matrix",
            f"projections {list(projections.shape)} are not of a matrix {list(matrix.shape)}",
        )
    return np.asarray(projections @ matrix, np.float32)


def _splitmix64(seed: int, count: int) -> npt.NDArray[np.uint64]:
    """The first outputs of splitmix64 (Steele, Lea, Flood 2014), [count]."""
    state = np.arange(1, count + 1, dtype=np.uint64)
    state *= _GOLDEN
    state += np.uint64(seed)
    state ^= state >> np.uint64(30)
    state *= _FIRST
    state ^= state >> np.uint64(27)
    state *= _SECOND
    state ^= state >> np.uint64(31)
    return state
