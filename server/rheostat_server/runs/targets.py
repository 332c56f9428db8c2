"""The run that a capture stores: its id and lease, checked at admission."""

import re
import uuid
from typing import NamedTuple

from google.protobuf import duration_pb2

from rheostat_server import validation
from rheostat_server.errors import InvalidValue
from rheostat_server.validation import field_path
from rheostat_wire.v1 import capture_pb2, tensor_pb2

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Ids of runs."""

_LEASE = 3600.0
_SHORTEST, _LONGEST = 1.0, 24 * 3600.0


class RunTarget(NamedTuple):
    """A run to store."""

    id: str
    """From the request, or random."""
    lease: float
    """Seconds after its completion before it may be evicted."""
    least: int = 0
    """Positions that the run must have. A run with fewer is not stored."""


def run_target(spec: capture_pb2.CaptureSpec, path: str) -> RunTarget:
    """The run that a capture stores; `path` is that of the capture.

    Raises:
        InvalidValue: the id or lease is invalid, or the rows are encoded or projected.
    """
    target = spec.run
    if target.run_id:
        validation.matches(target.run_id, RUN_ID, field_path(path, "run.run_id"))
    if spec.HasField("encoding") and spec.encoding != tensor_pb2.ENCODING_RAW:
        raise InvalidValue(
            "a run keeps rows as they are: use ENCODING_RAW, or a sink for other encodings",
            field=field_path(path, "encoding"),
        )
    if spec.HasField("projection"):
        raise InvalidValue(
            "a run keeps whole rows: leave the projection out, or send it to a sink",
            field=field_path(path, "projection"),
        )
    lease = target.lease if target.HasField("lease") else None
    return RunTarget(
        target.run_id or uuid.uuid4().hex, lease_seconds(lease, field_path(path, "run.lease"))
    )


def lease_seconds(duration: duration_pb2.Duration | None, path: str) -> float:
    """The seconds of a lease; 1 hour if it is None.

    Raises:
        InvalidValue: it is too short or too long.
    """
    if duration is None:
        return _LEASE
    seconds = duration.seconds + duration.nanos / 1e9
    if not _SHORTEST <= seconds <= _LONGEST:
        raise InvalidValue("a lease lasts 1 s to 24 h", field=path)
    return seconds
