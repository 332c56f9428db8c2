"""Rows and unit vectors, made of the vectors that clients sent.

Invariant: they are finite in the dtype in which the device stores them. Other rows raise.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.plan.composition import Direction, RowKey
from rheostat_engine.worker.state.id_allocators import BankError

Vectors = Mapping[bytes, npt.NDArray[np.float32]]
"""float32 [rows, W] by digest."""


class Sums(NamedTuple):
    """Rows that are added."""

    rows: npt.NDArray[np.float32]
    """[n, W]: sums that stay finite when they are rounded to the stream's dtype."""
    zero: npt.NDArray[np.bool_]
    """[n]: whether a row is zero after this rounding."""


def sums_of(keys: Sequence[RowKey], vectors: Vectors, width: int, dtype: torch.dtype) -> Sums:
    """The float32 sums of scale * vector over the addends of each key.

    Raises:
        BankError: a vector is missing or of another shape, or a sum isn't finite in `dtype`.
    """
    totals = np.empty((len(keys), width), np.float32)
    # The rows of a vector are copied at once, because numpy releases the GIL for each long copy.
    by_digest: dict[bytes, list[int]] = {}
    for index, key in enumerate(keys):
        by_digest.setdefault(key[0][0], []).append(index)
    for digest, at in by_digest.items():
        totals[at] = _rows(digest, [keys[index][0][1] for index in at], vectors, width)
    # A single vector with scale 1, such as the row of a patch, needs no arithmetic.
    if any(len(key) > 1 or key[0][2] != 1.0 for key in keys):
        with np.errstate(over="ignore", invalid="ignore"):
            totals *= np.array([key[0][2] for key in keys], np.float32)[:, None]
            for total, key in zip(totals, keys, strict=True):
                for digest, row, scale in key[1:]:
                    total += np.float32(scale) * _row(digest, row, vectors, width)
    # Rounding is monotonic, so a row stays finite, or becomes zero, as its largest magnitude does.
    largest = np.maximum(totals.max(axis=1), -totals.min(axis=1))
    limits = torch.finfo(dtype)
    if limits.tiny < largest.min() and largest.max() < limits.max:
        return Sums(totals, np.zeros(len(keys), np.bool_))  # the usual case; rounding is slow
    rounded = torch.from_numpy(largest).to(dtype).float().numpy()
    if not np.isfinite(rounded).all():
        raise BankError(f"the sum of the vectors is not finite in {dtype}")
    return Sums(totals, rounded == 0)


class Basis:
    """Orthogonal unit vectors of a list of rows.

    Gram-Schmidt runs twice in float64: each vector is orthogonal to the others up to the rounding
    to float32 (Giraud et al. 2005). Directions with the same first rows reuse the unit vectors of
    these rows. All directions of a subspace therefore cost as much as the last one alone.
    """

    def __init__(self, vectors: Vectors, width: int) -> None:
        """The basis is empty.

        Args:
            vectors: float32 [rows, W] by digest.
            width: W.
        """
        self._vectors = vectors
        self._width = width
        self._parts: Direction = ()
        self._units = np.empty((1, width))

    def unit_of(self, key: Direction) -> npt.NDArray[np.float32]:
        """The unit vector of a direction's last row, orthogonal to its earlier rows, float32 [W].

        Raises:
            BankError: a vector is missing or of another shape, or the last row is linearly
                dependent on the earlier rows.
        """
        equal = 0
        while equal < min(len(key), len(self._parts)) and key[equal] == self._parts[equal]:
            equal += 1
        self._parts = self._parts[:equal]
        for digest, row in key[equal:]:
            self._add(digest, row)
        unit: npt.NDArray[np.float32] = self._units[len(key) - 1].astype(np.float32)
        return unit

    def norm_of(self, key: Direction) -> float:
        """The L2 norm of a direction's last row, as it came.

        Raises:
            BankError: a vector is missing or of another shape.
        """
        digest, row = key[-1]
        return float(
            np.linalg.norm(_row(digest, row, self._vectors, self._width).astype(np.float64))
        )

    def _add(self, digest: bytes, row: int) -> None:
        vector = _row(digest, row, self._vectors, self._width).astype(np.float64)
        count = len(self._parts)
        before = self._units[:count]
        norm = np.linalg.norm(vector)
        residual = vector / norm if norm > 0 else vector
        for _ in range(2 if count else 0):
            residual = residual - (before @ residual) @ before
        length = np.linalg.norm(residual)
        if not length > 1e-6:
            raise BankError(f"vector {digest.hex()} has no direction of its own")
        if count == len(self._units):
            self._units = np.concatenate([self._units, np.empty_like(self._units)])
        self._units[count] = residual / length
        self._parts = (*self._parts, (digest, row))


def _row(digest: bytes, row: int, vectors: Vectors, width: int) -> npt.NDArray[np.float32]:
    values: npt.NDArray[np.float32] = _rows(digest, [row], vectors, width)[0]
    return values


def _rows(
    digest: bytes, rows: Sequence[int], vectors: Vectors, width: int
) -> npt.NDArray[np.float32]:
    """A copy of some rows of a vector, [n, W]."""
    vector = vectors.get(digest)
    if vector is None:
        raise BankError(f"vector {digest.hex()} is not in the worker")
    for row in rows:
        if not 0 <= row < vector.shape[0] or vector.shape[1] != width:
            raise BankError(f"vector {digest.hex()} has no row {row} of width {width}")
    taken: npt.NDArray[np.float32] = vector.take(rows, axis=0)
    return taken
