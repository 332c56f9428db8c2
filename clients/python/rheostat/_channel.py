"""How a connection behaves: message limits, keepalive and retries, in this one place.

Only unary calls that change nothing are tried again, and only where no server answered; everything
else would risk doing a thing twice.
"""

from __future__ import annotations

import json

MESSAGE_BYTES = 16 * 1024 * 1024
"""Largest message, either way."""
UNARY_TIMEOUT = 60.0
"""Seconds that calls other than generate and stream may take, unless told otherwise."""

_IDEMPOTENT = (
    ("EngineService", "GetModel"),
    ("EngineService", "GetStats"),
    ("GenerationService", "Explain"),
    ("GenerationService", "Tokenize"),
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
    ("grpc.enable_retries", 1),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
)
"""Options of every channel, sync and asyncio."""
