"""Digests of vectors: a request refers to a stored vector by its digest."""

import hashlib

from rheostat_wire.dtypes import DtypeName


def vector_digest(dtype: DtypeName, rows: int, width: int, data: bytes) -> bytes:
    """Returns SHA-256 of a vector's canonical form, which `VectorRef` in steering.proto defines.

    Args:
        dtype: element type.
        rows: number of rows.
        width: elements of a row.
        data: the elements, little-endian, row-major.

    Returns:
        32 bytes.
    """
    header = f"rheostat.v1 vector {dtype} {rows}x{width}\n".encode("ascii")
    return hashlib.sha256(header + data).digest()
