"""The sinks of a server, and the files that they wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from rheostat._fields import counted, read_word
from rheostat._points import Site, read_site
from rheostat._positions import show_sites
from rheostat_wire.v1 import capture_pb2, capture_service_pb2

_LAYOUT = capture_pb2.Layout.DESCRIPTOR
_STATE = capture_service_pb2.ArtifactState.DESCRIPTOR


@dataclass(frozen=True)
class SinkInfo:
    """A sink of the server."""

    name: str
    plugin_name: str
    """"filesystem", "memory", "logging", or the name of a plugin."""
    layouts: tuple[str, ...]
    """Layouts of files that it supports, its default first; empty if it writes no files."""
    options: Mapping[str, str]
    """Options that a request may set, each with one line of explanation."""


@dataclass(frozen=True, repr=False)
class Artifact:
    """A file that a sink wrote, or a request's part of one."""

    sink_name: str
    path: str
    """Relative to the sink's root."""
    offset: int
    """First byte in the file."""
    length: int
    """In bytes."""
    media_type: str
    """"application/x-safetensors", "application/x-npz" or "application/json"."""
    state: str
    """"pending", "complete", "partial" (rows are missing) or "failed"."""
    row_count: int
    """Positions times sites."""
    sites: tuple[Site, ...]
    """Sites of its rows."""
    sha256: bytes
    """SHA-256 of these bytes, once complete."""
    write_time: datetime | None
    """Time of the last write."""

    def __repr__(self) -> str:
        return (
            f"Artifact({self.sink_name!r}, {self.path!r}, {self.length} bytes, {self.state}, "
            f"{counted(self.row_count, 'row')} of {show_sites(self.sites)})"
        )


def read_sinks(answer: capture_service_pb2.ListSinksResponse) -> list[SinkInfo]:
    """The sinks of one page, by name."""
    return [
        SinkInfo(
            sink.name,
            sink.plugin_name,
            tuple(read_word(_LAYOUT, layout, "LAYOUT_") for layout in sink.layouts),
            dict(sink.options),
        )
        for sink in answer.sinks
    ]


def read_artifacts(answer: capture_service_pb2.GetArtifactsResponse) -> list[Artifact]:
    """The artefacts of one page, by sink and path."""
    return [
        Artifact(
            artifact.ref.sink_name,
            artifact.ref.path,
            artifact.ref.offset,
            artifact.size_bytes,
            artifact.media_type,
            read_word(_STATE, artifact.state, "ARTIFACT_STATE_"),
            artifact.row_count,
            tuple(map(read_site, artifact.sites)),
            artifact.sha256,
            artifact.write_time.ToDatetime(UTC) if artifact.HasField("write_time") else None,
        )
        for artifact in answer.artifacts
    ]
