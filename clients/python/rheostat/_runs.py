"""Runs: rows that the server stores under an id, as a source of patches."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from google.protobuf import duration_pb2

from rheostat._arrays import Element
from rheostat._errors import invalid
from rheostat._fields import whole_number
from rheostat._points import Site, knows_point, read_site
from rheostat._positions import read_ranges, show_ranges, show_sites
from rheostat_wire.dtypes import FROM_WIRE
from rheostat_wire.v1 import capture_pb2, replace_pb2, run_pb2

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SHORTEST, _LONGEST = 1, 24 * 3600

MOST_POSITIONS = 2**31 - 1
"""The largest position that messages hold."""


@dataclass(frozen=True)
class Run:
    """A run to store: the rows of one sample, in the server's memory, for a limited time."""

    id: str | None = None
    """An id that no other run has. Default: the server makes one; the receipt has it."""
    lease: float | None = None
    """Seconds after the end of the request before it may be evicted, 1 to 86400. Default: 3600."""

    def to_wire(self) -> capture_pb2.RunTarget:
        """The message."""
        path = "captures.run"
        message = capture_pb2.RunTarget(
            run_id="" if self.id is None else valid_run_id(self.id, path)
        )
        if self.lease is not None:
            message.lease.CopyFrom(lease_duration(self.lease, f"{path}.lease"))
        return message


@dataclass(frozen=True, repr=False)
class RunInfo:
    """A run that the server has stored."""

    id: str
    sites: tuple[Site, ...]
    """Sites whose rows it has, by layer, then point."""
    positions: tuple[range, ...]
    """Positions of its rows, the same at each site."""
    prompt_token_ids: tuple[int, ...]
    size_bytes: int
    """Bytes of server memory."""
    create_time: datetime
    """Time when all rows were stored."""
    lease_expire_time: datetime
    """Time until which it is not evicted."""
    labels: Mapping[str, str]
    """Labels of the request that stored it, or of the upload."""
    dtype: Element | None = None
    """Element type of its rows; None if this client does not know the type."""
    width: int = 0
    """Numbers of a row."""

    def __repr__(self) -> str:
        return (
            f"RunInfo({self.id!r}, {show_sites(self.sites)}, positions "
            f"{show_ranges(self.positions)}, {self.size_bytes} bytes, leased until "
            f"{self.lease_expire_time:%Y-%m-%d %H:%M:%S %Z})"
        )


def valid_run_id(value: object, path: str = "run_id") -> str:
    """Returns ``value`` if it is valid as the id of a run."""
    if not isinstance(value, str) or not _ID.fullmatch(value):
        raise invalid(
            path,
            f"{value!r} is no run's id: 1 to 128 of [A-Za-z0-9._-], first a letter or digit",
        )
    return value


def id_of(run: str | RunInfo) -> str:
    """The id of a run, or of its description."""
    return valid_run_id(run.id if isinstance(run, RunInfo) else run)


def position_list(positions: int | Iterable[int]) -> replace_pb2.PositionList:
    """The message for positions of a run."""
    numbers = positions if isinstance(positions, Iterable) else (positions,)
    listed = [
        whole_number(number, "positions", "a position", least=-(2**31), most=MOST_POSITIONS)
        for number in numbers
    ]
    return replace_pb2.PositionList(positions=listed)


def lease_duration(seconds: float, path: str) -> duration_pb2.Duration:
    """The message for a lease in seconds. Raises InvalidRequest if it is too short or long."""
    try:
        lasts = float(seconds)
    except (TypeError, ValueError):
        lasts = 0.0
    if not _SHORTEST <= lasts <= _LONGEST:
        raise invalid(path, f"a lease lasts {_SHORTEST} to {_LONGEST} seconds, not {seconds!r}")
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(lasts * 1e9))
    return duration


def read_run(message: run_pb2.Run) -> RunInfo:
    """The run of a message, without sites at points that this client does not know."""
    return RunInfo(
        message.run_id,
        tuple(read_site(site) for site in message.sites if knows_point(site.point)),
        read_ranges(message.positions),
        tuple(message.prompt_token_ids.ids),
        message.size_bytes,
        message.create_time.ToDatetime(UTC),
        message.lease_expire_time.ToDatetime(UTC),
        dict(message.labels),
        FROM_WIRE.get(message.dtype),
        message.width,
    )
