"""Sinks: destinations that store captured rows. docs/sinks.md is for plugin authors.

`protocol` defines the interface of a sink, `Sinks` has the sinks of a server, and a request writes
to a `GuardedRecording`.
"""

from rheostat_engine import Point, Site
from rheostat_server.sinks.guarded import ArtifactKey, GuardedRecording, SinkArtifact, SinkFailed
from rheostat_server.sinks.protocol import (
    LABELS,
    Artifact,
    Buffering,
    CaptureAbout,
    Collision,
    Column,
    Encoding,
    Ending,
    Labels,
    Layout,
    Outcome,
    ReadoutAbout,
    Recording,
    RequestAbout,
    RowBlock,
    Sink,
    SinkError,
    SinkFactory,
    SinkRefusal,
    SinkSettingsError,
    State,
    Target,
)
from rheostat_server.sinks.registry import GROUP, Page, SinkListing, Sinks, find_plugins
from rheostat_server.sinks.settings import SinkConfig, parse_sink
from rheostat_server.sinks.wire import (
    block_of,
    encoding_of,
    group_targets,
    split_payload,
    to_artifact,
    to_wire_layout,
)
from rheostat_server.tensors import FloatType

__all__ = [
    "GROUP",
    "LABELS",
    "Artifact",
    "ArtifactKey",
    "Buffering",
    "CaptureAbout",
    "Collision",
    "Column",
    "Encoding",
    "Ending",
    "FloatType",
    "GuardedRecording",
    "Labels",
    "Layout",
    "Outcome",
    "Page",
    "Point",
    "ReadoutAbout",
    "Recording",
    "RequestAbout",
    "RowBlock",
    "Sink",
    "SinkArtifact",
    "SinkConfig",
    "SinkError",
    "SinkFactory",
    "SinkFailed",
    "SinkListing",
    "SinkRefusal",
    "SinkSettingsError",
    "Sinks",
    "Site",
    "State",
    "Target",
    "block_of",
    "encoding_of",
    "find_plugins",
    "group_targets",
    "parse_sink",
    "split_payload",
    "to_artifact",
    "to_wire_layout",
]
