"""The content of manifests: stored requests, their tables and files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rheostat._capture.encodings import Encoding
from rheostat._errors import DataLoss
from rheostat._points import Point, PointLike, Site, point_of
from rheostat.captures._arrays import Part, damaged

Ending: TypeAlias = Literal["complete", "partial", "aborted"]
"""Whether the rows of a request are complete."""

_SCHEMA = "rheostat.captured.v1"
_READ_BYTES = 4 << 20


@dataclass(frozen=True)
class StoredTable:
    """The rows of one capture of a request at one site."""

    capture_index: int
    """Index of the capture in its request."""
    point: Point
    layer: int
    rows: int
    dtype: str
    """Captured element type: "float32", "float16" or "bfloat16"."""
    width: int
    """Numbers per row before an encoding."""
    encoding: Encoding
    name: str = field(repr=False)
    part: Part = field(repr=False)


@dataclass(frozen=True)
class StoredRequest:
    """A request whose rows are stored."""

    request_id: str
    tag: str
    model: str
    labels: dict[str, str]
    state: Ending
    """"complete": every selected row is stored. "partial": rows were lost under an overload policy.
    "aborted": the request ended early, and the rows until then are stored."""
    dropped_rows: int
    """Selected rows that were lost."""
    finish_reasons: tuple[str, ...]
    """One per sample."""
    prompt_token_ids: tuple[int, ...] = field(repr=False)
    started_at: float
    """Seconds since the epoch."""
    finished_at: float
    """Seconds since the epoch."""
    layout: str
    format: str
    tables: tuple[StoredTable, ...] = field(repr=False)
    digests: tuple[tuple[Part, str], ...] = field(repr=False)

    @property
    def sites(self) -> tuple[tuple[Point, int], ...]:
        """The sites that have rows, each once, in the order of the captures."""
        return tuple(dict.fromkeys((table.point, table.layer) for table in self.tables))

    def tables_at(self, point: PointLike, layer: int) -> tuple[StoredTable, ...]:
        """The tables of a site, under either of its two names; one per capture."""
        site = Site(point_of(point), layer)
        for name in (site, site.twin):
            tables = tuple(table for table in self.tables if (table.point, table.layer) == name)
            if tables:
                return tables
        return ()

    def verify(self) -> None:
        """Reads every file. Raises DataLoss if a SHA-256 differs from the manifest."""
        for part, digest in self.digests:
            if _digest(part) != digest:
                raise damaged(part.path, "its SHA-256 differs from the manifest")


def _digest(part: Part) -> str:
    digest = hashlib.sha256()
    left = part.length
    try:
        with part.path.open("rb") as file:
            file.seek(part.offset)
            while left and (data := file.read(min(left, _READ_BYTES))):
                digest.update(data)
                left -= len(data)
    except OSError as error:
        raise damaged(part.path, error.strerror or str(error)) from error
    return digest.hexdigest()


def read_manifest(data: bytes, path: Path) -> StoredRequest:
    """The request of a manifest in the file ``path``. Raises DataLoss if it cannot be parsed."""
    try:
        manifest = json.loads(data)
        if manifest["schema"] != _SCHEMA:
            raise ValueError(f"its schema is {manifest['schema']}, not {_SCHEMA}")
        files = [(_part(file, path), file) for file in manifest["files"]]
        return StoredRequest(
            manifest["request_id"],
            manifest["tag"],
            manifest["model"],
            dict(manifest["labels"]),
            manifest["state"],
            manifest["dropped_rows"],
            tuple(manifest["finish_reasons"]),
            tuple(manifest["prompt_token_ids"]),
            manifest["started_at"],
            manifest["finished_at"],
            manifest["layout"],
            manifest["format"],
            tuple(table for part, file in files for table in _tables(file, part)),
            tuple((part, file["sha256"]) for part, file in files),
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataLoss(f"{path} holds a manifest that cannot be read ({error})") from error


def _part(file: dict[str, Any], path: Path) -> Part:
    name = file["path"]
    if Path(name).name != name or name in (".", ".."):
        raise ValueError(f"{name} is not in its folder")
    return Part(path.parent / name, int(file["offset"]), int(file["bytes"]))


def _tables(file: dict[str, Any], part: Part) -> Iterator[StoredTable]:
    for table in file["tables"]:
        kept, name = table.get("kept"), table["encoding"]
        width = table["width"] if name in ("rp8", "topk8") else None
        yield StoredTable(
            table["capture_index"],
            Point(table["point"]),
            table["layer"],
            table["rows"],
            table["dtype"],
            table["width"],
            Encoding(name, kept, width, table.get("seed")),
            table["name"],
            part,
        )
