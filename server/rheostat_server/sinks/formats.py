"""Writes tables to a file: safetensors, or .npz.

A column is an array whose name is that of its table and column, "0.resid_post.3.positions". A JSON
text lists the tables. Files are written in one pass, and only a part of a column is in memory.
"""

import json
import zipfile
from collections.abc import Mapping, Sequence
from enum import StrEnum

import numpy as np
from numpy.lib.format import write_array_header_1_0

from rheostat_server.sinks.disk import Writer
from rheostat_server.sinks.protocol import RequestAbout
from rheostat_server.sinks.tables import NUMPY, ColumnValues, Table

SCHEMA = "rheostat.captured.v1"
"""Name and version of the schema of the text and of manifests."""

TEXT = "rheostat_captured"
"""The name of the text: a key of the safetensors metadata, or an array in .npz."""

_SAFETENSORS = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int32": "I32", "uint32": "U32",
    "uint8": "U8",
}  # fmt: skip
_ALIGNED = 8


class Format(StrEnum):
    """Formats of files with rows."""

    SAFETENSORS = "safetensors"
    NPZ = "npz"

    @property
    def media_type(self) -> str:
        """As in `Artifact`."""
        return f"application/x-{self.value}"


def write_tables(
    out: Writer, kind: Format, about: RequestAbout, tables: Sequence[Table], spool: int | None
) -> None:
    """Writes a file with these tables. Raises OSError."""
    write = _write_npz if kind is Format.NPZ else _write_safetensors
    columns = [values for table in tables for values in table.columns]
    # Columns with the largest elements first, so that all are aligned.
    columns.sort(key=lambda values: -NUMPY[values.column.dtype].itemsize)
    write(out, _text(about, tables), columns, spool)


def _text(about: RequestAbout, tables: Sequence[Table]) -> str:
    return json.dumps(
        {
            "schema": SCHEMA,
            "request_id": about.request_id,
            "tag": about.target.tag,
            "model": about.model,
            "tables": [table_entry(table) for table in tables],
        }
    )


def table_entry(table: Table) -> Mapping[str, object]:
    """The description of a table in files and manifests."""
    about = table.about
    entry: dict[str, object] = {
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
        entry["kept"] = about.kept
    if about.seed is not None:
        entry["seed"] = about.seed
    return entry


def _write_safetensors(
    out: Writer, text: str, columns: Sequence[ColumnValues], spool: int | None
) -> None:
    header: dict[str, object] = {"__metadata__": {TEXT: text}}
    end = 0
    for values in columns:
        header[values.name] = {
            "dtype": _SAFETENSORS[values.column.dtype],
            "shape": [values.rows, *values.column.shape],
            "data_offsets": [end, end + values.nbytes],
        }
        end += values.nbytes
    data = json.dumps(header).encode()
    data += b" " * (-len(data) % _ALIGNED)
    out.write(len(data).to_bytes(8, "little") + data)
    for values in columns:
        for part in values.read(spool):
            out.write(part)


def _write_npz(out: Writer, text: str, columns: Sequence[ColumnValues], spool: int | None) -> None:
    with zipfile.ZipFile(_Unseekable(out), "w", zipfile.ZIP_STORED) as archive:
        with archive.open(zipfile.ZipInfo(f"{TEXT}.npy"), "w") as member:
            np.save(member, np.array(text))
        for values in columns:
            kind, shape = NUMPY[values.column.dtype], (values.rows, *values.column.shape)
            header = {"descr": kind.str, "fortran_order": False, "shape": shape}
            info = zipfile.ZipInfo(f"{values.name}.npy")
            with archive.open(info, "w", force_zip64=True) as member:
                write_array_header_1_0(member, header)  # type: ignore[no-untyped-call]  # untyped
                for part in values.read(spool):
                    member.write(part)


class _Unseekable:
    """The file interface of zipfile, without `seek`, so zipfile writes sizes after members."""

    def __init__(self, out: Writer) -> None:
        self.write = out.write

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass
