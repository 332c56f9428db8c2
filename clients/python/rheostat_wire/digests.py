"""Digests of vectors. A request refers to a stored vector by its digest."""

import hashlib

from rheostat_wire.dtypes import DtypeName


def vector_digest(dtype: DtypeName, rows: int, width: int, data: bytes) -> bytes:
    """Returns SHA-256 of a vector's canonical form, which `VectorRef` in steering.proto defines.

    `data` are the elements [rows, width], little-endian, row-major. The digest has 32 bytes.
    """
    header = f"rheostat.v1 vector {dtype} {rows}x{width}\n".encode("ascii")
    return hashlib.sha256(header + data).digest()
