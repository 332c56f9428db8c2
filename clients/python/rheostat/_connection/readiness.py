"""Waiting for a server: its timeouts and errors, without I/O, so both clients share it."""

from __future__ import annotations

import time

from rheostat._connection.channel import checked_timeout
from rheostat._errors import (
    START_ONE,
    DeadlineExceeded,
    RheostatError,
    Unavailable,
    cause,
    unanswered,
)

POLL = 0.5
"""Seconds between two health checks."""
UNREACHABLE = 10.0
"""Seconds in a row without an answer after which the wait ends."""
READY_TIMEOUT = 600.0
"""Seconds to wait by default."""
_CHECK_TIMEOUT = 5.0


class Wait:
    """One wait for the server at a target, which starts now."""

    def __init__(self, target: str, timeout: float | None) -> None:
        """``timeout`` in seconds. None: waits as long as the server answers, but is not ready."""
        self._target = target
        self._timeout = checked_timeout(timeout)
        self._began = self._answered = time.monotonic()

    def ready(self, health: str) -> bool:
        """A health check returned ``health``. Returns whether it is "SERVING".

        Raises DeadlineExceeded after the timeout.
        """
        self._answered = time.monotonic()
        if health == "SERVING":
            return True
        self._raise_if_late(f"for the server at {self._target} to be ready; its health is {health}")
        return False

    def unanswered(self, error: RheostatError) -> None:
        """A health check failed. Raises Unavailable if all failed for `UNREACHABLE` seconds.

        Raises DeadlineExceeded after the timeout.
        """
        silent = time.monotonic() - self._answered
        if silent >= UNREACHABLE:
            raise Unavailable(
                f"{unanswered(self._target, error.details)}; waited {silent:.0f} s; {START_ONE}",
                details=error.details,
            )
        why = cause(error.details)
        self._raise_if_late(f"for a server at {self._target}; none answers: {why}", error.details)

    def check_timeout(self) -> float:
        """Timeout of the next health check, in seconds."""
        if self._timeout is None:
            return _CHECK_TIMEOUT
        left = self._timeout - (time.monotonic() - self._began)
        return min(_CHECK_TIMEOUT, max(left, 1.0))

    def _raise_if_late(self, waited_for: str, details: str = "") -> None:
        if self._timeout is not None and time.monotonic() - self._began >= self._timeout:
            raise DeadlineExceeded(f"waited {self._timeout:g} s {waited_for}", details=details)
