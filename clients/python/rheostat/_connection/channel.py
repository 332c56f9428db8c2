"""Options of every channel (message limits, keepalive, retries), and checks of targets.

gRPC retries only unary calls that change nothing, and only on UNAVAILABLE: no server answers, or it
loads its model or drains. A retry of any other call might act twice.
"""

from __future__ import annotations

import json
import math
import os
import re
from typing import SupportsFloat

from rheostat._errors import Refused, invalid

MESSAGE_BYTES = 16 * 1024 * 1024
"""Largest message, either way."""
_CLOSED = "this client has been closed; rheostat.connect makes another"
DEFAULT_TARGET = "localhost:50051"
"""The default address of ``rheostat serve``."""
TARGET_VARIABLE = "RHEOSTAT_TARGET"
"""The environment variable with the default target."""
UNARY_TIMEOUT = 60.0
"""Default timeout, in seconds, of calls that run no prompt."""

_RESOLVERS = re.compile(r"(dns|unix|unix-abstract|vsock|xds):\D|ipv[46]:")
"""Targets that name a gRPC resolver. In "dns:50051", dns is a host name."""
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_HOST_PORT = re.compile(r"([^:/]+|\[[^]/]+\]):([0-9]{1,5})")
_IDEMPOTENT = (
    ("EngineService", "GetModel"),
    ("EngineService", "GetStats"),
    ("GenerationService", "Explain"),
    ("GenerationService", "Tokenize"),
    ("SteeringService", "GetGlobal"),
    ("SteeringService", "ListVectors"),
)
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [
                {"service": f"rheostat.v1.{service}", "method": method}
                for service, method in _IDEMPOTENT
            ],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.2s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}

OPTIONS: tuple[tuple[str, str | int], ...] = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 15_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_retries", 1),
    # By default, all channels of a process to an address share the pause before the next attempt to
    # connect. A new connection to a restarted server would fail during the pause of an old one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
)
"""Options of every channel, sync and asyncio."""


def default_target() -> str:
    """``$RHEOSTAT_TARGET``, or else `DEFAULT_TARGET`."""
    return os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET


def checked_timeout(timeout: object) -> float | None:
    """Returns ``timeout`` if it is None or a number of seconds, 0 or more."""
    if timeout is None:
        return None
    seconds = float(timeout) if isinstance(timeout, SupportsFloat) else math.nan
    if not 0 <= seconds < math.inf:
        raise invalid(
            "timeout",
            f"a timeout is a number of seconds, 0 or more, or None for no limit, not {timeout!r}",
        )
    return seconds


def checked_target(target: object) -> str:
    """Returns ``target`` if it is "host:port" or begins with a gRPC scheme, as "unix:/a/socket"."""
    if not isinstance(target, str):
        advice = f': write "localhost:{target}"' if type(target) is int else ""
        raise invalid("target", f"a target is a text, not {target!r}{advice}")
    if _RESOLVERS.match(target):
        return target
    scheme = _SCHEME.match(target)
    if scheme is not None:
        bare = target[scheme.end() :].rstrip("/")
        raise invalid("target", f"a target has no scheme: write {bare!r}, without {scheme[0]}")
    match = _HOST_PORT.fullmatch(target)
    if match is None:
        raise invalid("target", f"target needs a port, e.g. localhost:50051; {target!r} has none")
    if not 0 < int(match[2]) < 65536:
        raise invalid("target", f"a target's port is 1 to 65535, not {match[2]}")
    return target


class ConnectionBase:
    """The target, timeout and state of a connection."""

    def __init__(self, target: str, timeout: float | None) -> None:
        self.target = checked_target(target)
        self.timeout = checked_timeout(timeout)
        self.closed = False

    def check_open(self) -> None:
        """Raises Refused if the connection is closed."""
        if self.closed:
            raise Refused(_CLOSED)

    def limit(self, timeout: float | None) -> float | None:
        """The timeout of a call that runs no prompt: ``timeout``, or the connection's if None."""
        return self.timeout if timeout is None else checked_timeout(timeout)
