"""The manifest of a request: everything that is needed to read its files, as one JSON object.

Beside files of its own a request has it as `manifest.json`; in shards it is a line of the index.
Either way it is written last, and a request without one does not exist.
"""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rheostat_engine import Point, Site
from rheostat_server.sinks.formats import SCHEMA, Format, said
from rheostat_server.sinks.protocol import (
    Artifact,
    Ending,
    Layout,
    Outcome,
    RequestAbout,
    SinkError,
    State,
)
from rheostat_server.sinks.tables import Table

MANIFEST = "manifest.json"
"""Its name beside the files of a request."""


class Stored(NamedTuple):
    """Rows in a file, or in a part of one."""

    path: str
    """Beside the manifest."""
    offset: int
    length: int
    sha256: bytes
    tables: Sequence[Table]


def make_manifest(
    about: RequestAbout,
    outcome: Outcome,
    kind: Format,
    files: Sequence[Stored],
    finished_at: float,
) -> Mapping[str, object]:
    """The manifest of a request; its id comes first, which finds a line of an index quickly."""
    return {
        "request_id": about.request_id,
        "schema": SCHEMA,
        "tag": about.target.tag,
        "sink": about.target.sink,
        "layout": about.target.layout,
        "format": kind,
        "state": outcome.ending,
        "dropped_rows": outcome.dropped_rows,
        "finish_reasons": list(outcome.finish_reasons),
        "model": about.model,
        "labels": dict(about.labels),
        "started_at": about.started_at,
        "finished_at": finished_at,
        "prompt_token_ids": [int(token) for token in about.prompt_token_ids],
        "files": [
            {
                "path": file.path,
                "offset": file.offset,
                "bytes": file.length,
                "sha256": file.sha256.hex(),
                "tables": [said(table) for table in file.tables],
            }
            for file in files
        ],
        **_projections(about),
    }


def _projections(about: RequestAbout) -> dict[str, object]:
    """What rows of captures are projected on, where any are."""
    found = {
        str(one.capture_index): {
            "digests": list(one.directions),
            "rows": {str(layer): list(rows) for layer, rows in one.direction_rows.items()},
        }
        for one in about.captures
        if one.directions
    }
    return {"projections": found} if found else {}


def encoded(manifest: Mapping[str, object]) -> bytes:
    """A manifest as one line."""
    return json.dumps(manifest, ensure_ascii=False).encode() + b"\n"


def artifacts_of(data: bytes, folder: str) -> list[Artifact]:
    """The artefacts that a manifest in `folder` speaks of, itself not among them.

    Raises:
        SinkError: it is not a manifest.
    """
    try:
        manifest = json.loads(data)
        state = State.COMPLETE if manifest["state"] == Ending.COMPLETE else State.PARTIAL
        return [
            Artifact(
                path=f"{folder}/{file['path']}",
                media_type=Format(manifest["format"]).media_type,
                state=state,
                offset=file["offset"],
                length=file["bytes"],
                rows=sum(table["rows"] for table in file["tables"]),
                sites=tuple(
                    dict.fromkeys(
                        Site(Point(table["point"]), table["layer"]) for table in file["tables"]
                    )
                ),
                sha256=bytes.fromhex(file["sha256"]),
                write_time=manifest["finished_at"],
                whole=manifest["layout"] != Layout.SHARDED,
            )
            for file in manifest["files"]
        ]
    except (ValueError, LookupError, TypeError) as error:
        raise SinkError(f"{folder} holds a manifest that is none") from error
