"""Rows and unit vectors made of the vectors that clients sent.

Invariant: what comes out is finite in the dtype in which the device holds it; nothing else goes
there.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.composition import Direction, RowKey

Vectors = Mapping[bytes, npt.NDArray[np.float32]]
"""float32 [rows, W] by digest."""


class BankError(Exception):
    """Something can't be put into the bank; the request that wants it must fail."""


def sum_of(key: RowKey, vectors: Vectors, width: int, dtype: torch.dtype) -> torch.Tensor:
    """The float32 sum of scale * vector over the addends, rounded once to `dtype`, [W].

    Raises:
        BankError: a vector is missing or of another shape, or the sum isn't finite in `dtype`.
    """
    total = np.zeros(width, np.float32)
    for digest, row, scale in key:
        with np.errstate(over="ignore", invalid="ignore"):
            total += np.float32(scale) * _row(digest, row, vectors, width)
    composed = torch.from_numpy(total).to(dtype)
    if not bool(composed.isfinite().all()):
        raise BankError(f"the sum of the vectors is not finite in {dtype}")
    return composed


def unit_of(key: Direction, vectors: Vectors, width: int) -> torch.Tensor:
    """The last vector made orthogonal to those before it and a unit vector, float32 [W].

    Modified Gram-Schmidt in float64, run twice (Björck 1994): the result is orthogonal to the
    others up to the rounding to float32.

    Raises:
        BankError: a vector is missing or of another shape, or nothing of it is left.
    """
    basis: list[npt.NDArray[np.float64]] = []
    for digest, row in key:
        vector = _row(digest, row, vectors, width).astype(np.float64)
        norm = np.linalg.norm(vector)
        left = vector / norm if norm > 0 else vector
        for _ in range(2):
            for unit in basis:
                left = left - (left @ unit) * unit
        length = np.linalg.norm(left)
        if not length > 1e-6:
            raise BankError(f"vector {digest.hex()} has no direction of its own")
        basis.append(left / length)
    return torch.from_numpy(basis[-1].astype(np.float32))


def _row(digest: bytes, row: int, vectors: Vectors, width: int) -> npt.NDArray[np.float32]:
    vector = vectors.get(digest)
    if vector is None:
        raise BankError(f"vector {digest.hex()} is not in the worker")
    if not 0 <= row < vector.shape[0] or vector.shape[1] != width:
        raise BankError(f"vector {digest.hex()} has no row {row} of width {width}")
    found: npt.NDArray[np.float32] = vector[row]
    return found
