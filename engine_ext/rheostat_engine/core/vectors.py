"""Rows and unit vectors made of the vectors that clients sent.

Invariant: what comes out is finite in the dtype in which the device holds it; nothing else goes
there.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.composition import Direction, RowKey

Vectors = Mapping[bytes, npt.NDArray[np.float32]]
"""float32 [rows, W] by digest."""


class BankError(Exception):
    """Something can't be put into the bank; the request that wants it must fail."""


class Exhausted(BankError):
    """There is no room; what nobody uses any more may have to be let go of."""


class Sums(NamedTuple):
    """Rows that are added."""

    rows: npt.NDArray[np.float32]
    """[n, W]: sums that the stream's dtype can hold once they are rounded to it."""
    zero: npt.NDArray[np.bool_]
    """[n]: whether nothing of a row is left then."""


def sums_of(keys: Sequence[RowKey], vectors: Vectors, width: int, dtype: torch.dtype) -> Sums:
    """The float32 sums of scale * vector over the addends of each key.

    Raises:
        BankError: a vector is missing or of another shape, or a sum isn't finite in `dtype`.
    """
    totals = np.empty((len(keys), width), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for total, key in zip(totals, keys, strict=True):
            digest, row, scale = key[0]
            np.multiply(_row(digest, row, vectors, width), np.float32(scale), out=total)
            for digest, row, scale in key[1:]:
                total += np.float32(scale) * _row(digest, row, vectors, width)
    # Rounding keeps order: what becomes of the largest magnitude says it of the whole row.
    largest = np.maximum(totals.max(axis=1), -totals.min(axis=1))
    rounded = torch.from_numpy(largest).to(dtype).float().numpy()
    if not np.isfinite(rounded).all():
        raise BankError(f"the sum of the vectors is not finite in {dtype}")
    return Sums(totals, rounded == 0)


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
