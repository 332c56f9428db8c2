"""Digests of vectors, which name them on the wire."""

import hashlib

from rheostat_wire.dtypes import DtypeName


def vector_digest(dtype: DtypeName, rows: int, width: int, data: bytes) -> bytes:
    """SHA-256 of a vector's canonical form, which `VectorRef` in steering.proto defines.

    Args:
        dtype: element type.
        rows: of the vector.
        width: elements of a row.
        data: the elements, little-endian, row-major.
    """
    header = f"rheostat.v1 vector {dtype} {rows}x{width}\n".encode("ascii")
    return hashlib.sha256(header + data).digest()
