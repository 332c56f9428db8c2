"""Sinks: destinations that store captured rows. docs/sinks.md is for plugin authors.

The names here are those that a plugin needs; `protocol` defines the interface of a sink. In the
server, `registry.Sinks` has the sinks, and a request writes to a `guarded.GuardedRecording`.
"""

from rheostat_engine import Point, Site
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
from rheostat_server.tensors import FloatType

__all__ = [
    "LABELS",
    "Artifact",
    "Buffering",
    "CaptureAbout",
    "Collision",
    "Column",
    "Encoding",
    "Ending",
    "FloatType",
    "Labels",
    "Layout",
    "Outcome",
    "Point",
    "ReadoutAbout",
    "Recording",
    "RequestAbout",
    "RowBlock",
    "Sink",
    "SinkError",
    "SinkFactory",
    "SinkRefusal",
    "SinkSettingsError",
    "Site",
    "State",
    "Target",
]
