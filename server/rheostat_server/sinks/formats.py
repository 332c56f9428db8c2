"""Tables as the bytes of a file, written front to back: safetensors, or .npz.

A column is an array called by its table and its own name, "0.resid_post.3.positions". One text
beside them says which tables there are. Nothing here holds more than a piece of a column in memory.
"""

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from rheostat_server.sinks.disk import Writer
from rheostat_server.sinks.protocol import RequestAbout
from rheostat_server.sinks.tables import NUMPY, Filled, Table

SCHEMA = "rheostat.captured.v1"
"""What the text and the manifests are called, with their version."""

TEXT = "rheostat_captured"
"""Where the text stands: a key of the metadata, or an array."""

_SAFETENSORS = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "uint32": "U32",
    "uint8": "U8",
}  # fmt: skip
_ALIGNED = 8
_NPY = b"\x93NUMPY\x01\x00"
_NPY_ALIGNED = 64


class Format(StrEnum):
    """Formats of files with rows."""

    SAFETENSORS = "safetensors"
    NPZ = "npz"

    @property
    def media_type(self) -> str:
        """As in `Artifact`."""
        return f"application/x-{self.value}"


class _Named(NamedTuple):
    name: str
    rows: int
    filled: Filled


def write_tables(
    out: Writer, kind: Format, about: RequestAbout, tables: Sequence[Table], spool: int | None
) -> None:
    """Writes a file with these tables. Raises OSError."""
    _WRITERS[kind](out, _text(about, tables), _columns(tables), spool)


def _text(about: RequestAbout, tables: Sequence[Table]) -> str:
    return json.dumps(
        {
            "schema": SCHEMA,
            "request_id": about.request_id,
            "tag": about.target.tag,
            "model": about.model,
            "tables": [said(table) for table in tables],
        }
    )


def said(table: Table) -> Mapping[str, object]:
    """What files and manifests say of a table."""
    about = table.about
    found: dict[str, object] = {
        "name": table.name,
        "capture_index": about.capture_index,
        "point": table.site.point.value,
        "layer": table.site.layer,
        "rows": table.rows,
        "encoding": about.encoding.value,
        "dtype": about.dtype.value,
        "width": about.width,
    }
    if about.kept is not None:
        found["kept"] = about.kept
    if about.seed is not None:
        found["seed"] = about.seed
    return found


def _columns(tables: Sequence[Table]) -> list[_Named]:
    """Every column, those with the longest elements first, so that all are aligned."""
    named = [
        _Named(f"{table.name}.{filled.column.name}", table.rows, filled)
        for table in tables
        for filled in table.columns
    ]
    return sorted(named, key=lambda one: -NUMPY[one.filled.column.dtype].itemsize)


def _write_safetensors(
    out: Writer, text: str, columns: Sequence[_Named], spool: int | None
) -> None:
    header: dict[str, object] = {"__metadata__": {TEXT: text}}
    end = 0
    for name, rows, filled in columns:
        header[name] = {
            "dtype": _SAFETENSORS[filled.column.dtype],
            "shape": [rows, *filled.column.shape],
            "data_offsets": [end, end + filled.nbytes],
        }
        end += filled.nbytes
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % _ALIGNED)
    out.write(len(data).to_bytes(8, "little") + data)
    for _, _, filled in columns:
        for piece in filled.read(spool):
            out.write(piece)


def _write_npz(out: Writer, text: str, columns: Sequence[_Named], spool: int | None) -> None:
    note = np.array(text)
    with zipfile.ZipFile(_Unseekable(out), "w", zipfile.ZIP_STORED) as archive:
        with archive.open(zipfile.ZipInfo(f"{TEXT}.npy"), "w") as member:
            member.write(_npy_header(note.dtype, ()) + note.tobytes())
        for name, rows, filled in columns:
            kind = NUMPY[filled.column.dtype]
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                member.write(_npy_header(kind, (rows, *filled.column.shape)))
                for piece in filled.read(spool):
                    member.write(piece)


def _npy_header(kind: np.dtype[np.generic], shape: tuple[int, ...]) -> bytes:
    """What stands before the bytes of an array, in version 1.0 of numpy's format."""
    header = repr({"descr": kind.str, "fortran_order": False, "shape": shape}).encode()
    header += b" " * (-(len(_NPY) + 2 + len(header) + 1) % _NPY_ALIGNED) + b"\n"
    return _NPY + len(header).to_bytes(2, "little") + header


class _Unseekable:
    """A writer as zipfile wants it; it puts sizes behind members, since it cannot go back."""

    def __init__(self, out: Writer) -> None:
        self.write = out.write

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """The writer is its maker's."""


_WRITERS: dict[Format, Callable[[Writer, str, Sequence[_Named], int | None], None]] = {
    Format.SAFETENSORS: _write_safetensors,
    Format.NPZ: _write_npz,
}
