"""The manifest of a request: all that a reader of its files needs, as one JSON object.

If a request has its own folder, the manifest is `manifest.json` there. In shards it is a line of
the index. It is written last; a request without a manifest does not exist.
"""

import json
import time
from collections.abc import Sequence
from typing import NamedTuple

from rheostat_engine import Point, Site
from rheostat_server.sinks.disk import Writer
from rheostat_server.sinks.formats import SCHEMA, Format, table_entry
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


class Stored(NamedTuple):
    """Rows in a file, or in a part of one."""

    path: str
    """Relative to the folder of the manifest."""
    offset: int
    writer: Writer
    """Has counted and hashed the bytes."""
    tables: Sequence[Table]


def make_manifest(
    about: RequestAbout, outcome: Outcome, kind: Format, files: Sequence[Stored]
) -> bytes:
    """The manifest of a request that ends now, as one line.

    The id comes first, because readers search lines by it.
    """
    manifest = {
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
        "finished_at": time.time(),
        "prompt_token_ids": [int(token) for token in about.prompt_token_ids],
        "files": [
            {
                "path": file.path,
                "offset": file.offset,
                "bytes": file.writer.count,
                "sha256": file.writer.sha256.hex(),
                "tables": [table_entry(table) for table in file.tables],
            }
            for file in files
        ],
        **_projections(about),
    }
    return json.dumps(manifest, ensure_ascii=False).encode() + b"\n"


def _projections(about: RequestAbout) -> dict[str, object]:
    """The directions of projected captures, if there are any."""
    projections: dict[str, object] = {}
    for capture in about.captures:
        if capture.directions:
            rows = {str(layer): list(rows) for layer, rows in capture.direction_rows.items()}
            projection: dict[str, object] = {"digests": list(capture.directions), "rows": rows}
            if capture.readouts:
                projection["readouts"] = [readout._asdict() for readout in capture.readouts]
            projections[str(capture.capture_index)] = projection
    return {"projections": projections} if projections else {}


def artifacts_of(data: bytes, folder: str) -> list[Artifact]:
    """The artefacts that a manifest in `folder` lists, without the manifest itself.

    Raises:
        SinkError: the manifest cannot be parsed.
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
        raise SinkError(f"{folder} holds a manifest that cannot be parsed") from error
