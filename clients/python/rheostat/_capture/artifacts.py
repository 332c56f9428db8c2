"""Sinks of a server, and what they wrote, as it says them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from rheostat._fields import read_word
from rheostat._points import Site, read_site
from rheostat._positions import show_sites
from rheostat_wire.v1 import capture_pb2, capture_service_pb2

_LAYOUT = capture_pb2.Layout.DESCRIPTOR
_STATE = capture_service_pb2.ArtifactState.DESCRIPTOR


@dataclass(frozen=True)
class SinkInfo:
    """A sink of the server."""

    name: str
    """What requests call it."""
    plugin_name: str
    """What it is: "filesystem", "memory", "logging", or a plugin's name."""
    layouts: tuple[str, ...]
    """How it can lay out files, its own first; empty if it writes none."""
    options: Mapping[str, str]
    """What a request may ask of it, each with one line of explanation."""


@dataclass(frozen=True, repr=False)
class Artifact:
    """A file that a sink wrote, or a request's part of one."""

    sink_name: str
    """The sink."""
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
    """Where its rows are from."""
    sha256: bytes
    """Of these bytes, once complete."""
    write_time: datetime | None
    """When it was last written."""

    def __repr__(self) -> str:
        """Sink, path, size, state and rows."""
        return (
            f"Artifact({self.sink_name!r}, {self.path!r}, {self.length} bytes, {self.state}, "
            f"{self.row_count} rows of {show_sites(self.sites)})"
        )


def read_sinks(answer: capture_service_pb2.ListSinksResponse) -> list[SinkInfo]:
    """The sinks, by name."""
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
    """The artefacts, by sink and path."""
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
