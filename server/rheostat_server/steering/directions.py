"""Checks the directions of ops: they must not be zero, and those of an Ablate must be independent.

Rows are compared in float64, because the engine normalises them. If their norm counts, float32
must be able to hold it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rheostat_engine import Normalise
from rheostat_server.errors import InvalidValue, ZeroVector
from rheostat_server.steering.ops import ResolvedOp
from rheostat_server.steering.readouts import check_norm
from rheostat_server.tensors import widen
from rheostat_server.vectors.store import Vector
from rheostat_wire.v1 import receipt_pb2

DEPENDENT = 1e-3
"""A direction is refused if less than this fraction of its norm is outside the span of the earlier
directions."""

_Rows = npt.NDArray[np.float64]


def check_directions(op: ResolvedOp, paths: Sequence[str]) -> None:
    """Checks the directions of an op. `paths` are those of its vectors.

    Raises:
        ZeroVector: a row is zero, so it has no direction.
        InvalidValue: a norm that counts is too small or large, or at some layer a direction of an
            Ablate is in the span of earlier directions.
    """
    if op.op in (receipt_pb2.OP_ADD, receipt_pb2.OP_REPLACE):
        return
    scaled = _scaled(op)
    for number, (vector, path) in enumerate(zip(op.vectors, paths, strict=True)):
        for row in sorted({rows[number] for rows in op.rows}):
            if vector.peaks[row] == 0:
                raise ZeroVector(f"row {row} is zero and has no direction", field=path)
            if scaled[number]:
                check_norm(vector, row, path)
    if op.op != receipt_pb2.OP_ABLATE or len(op.vectors) == 1:
        return
    values = [_rows_of(vector) for vector in op.vectors]
    for rows in sorted(set(op.rows)):
        dependent = _dependent(np.stack([v[row] for v, row in zip(values, rows, strict=True)]))
        if dependent is not None:
            raise InvalidValue(
                f"row {rows[dependent]} lies in the span of the directions before it, to within "
                f"{DEPENDENT:g} of its norm; remove it",
                field=paths[dependent],
            )


def _scaled(op: ResolvedOp) -> list[bool]:
    """For each vector, whether its norm counts."""
    if not op.bands:
        return [False] * len(op.vectors)
    counts: list[bool] = []
    for band in op.bands:
        counts += [band.readout.normalise is Normalise.NONE, True][: band.vectors]
    return counts


def _rows_of(vector: Vector) -> npt.NDArray[np.float32]:
    return widen(vector.data, vector.kind).reshape(vector.rows, vector.width)


def _dependent(directions: npt.NDArray[np.float32]) -> int | None:  # [k, W]
    """Index of the first direction in the span of earlier ones, or None; Gram-Schmidt, twice."""
    basis: list[_Rows] = []
    for index, direction in enumerate(directions.astype(np.float64)):
        unit = direction / np.linalg.norm(direction)
        rest = unit
        for _ in range(2):
            for before in basis:
                rest = rest - (rest @ before) * before
        norm = float(np.linalg.norm(rest))
        if norm <= DEPENDENT:
            return index
        basis.append(rest / norm)
    return None
