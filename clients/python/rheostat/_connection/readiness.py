"""Waiting for a server: how long, for what, and what is said when it was in vain.

It never does I/O, so the sync and the asyncio client share it whole.
"""

from __future__ import annotations

import time

from rheostat._connection.channel import checked_timeout
from rheostat._errors import DeadlineExceeded, RheostatError, Unavailable, cause, unanswered

POLL = 0.5
"""Seconds between two questions."""
UNREACHABLE = 10.0
"""Seconds in a row for which nothing may answer at the target."""
READY_TIMEOUT = 600.0
"""Seconds to wait by default."""
_ANSWER = 5.0


class Wait:
    """One wait for the server at a target, from now on."""

    def __init__(self, target: str, timeout: float | None) -> None:
        """Give up after ``timeout`` seconds; None: never, while the server answers."""
        self._target = target
        self._timeout = checked_timeout(timeout)
        self._began = self._answered = time.monotonic()

    def ready(self, health: str) -> bool:
        """Whether the server's health, "SERVING" or another, ends the wait.

        Raises DeadlineExceeded if it does not and the timeout has passed.
        """
        self._answered = time.monotonic()
        if health == "SERVING":
            return True
        self._check(f"for the server at {self._target} to be ready; its health is {health}")
        return False

    def unanswered(self, error: RheostatError) -> None:
        """Nothing answered. Raises if that has lasted too long."""
        silent = time.monotonic() - self._answered
        if silent >= UNREACHABLE:
            raise Unavailable(
                f"{unanswered(self._target, error.details)}; waited {silent:.0f} s for one",
                details=error.details,
            )
        why = cause(error.details)
        self._check(f"for a server at {self._target}; none answers: {why}", error.details)

    def patience(self) -> float:
        """Seconds that the next question may take."""
        if self._timeout is None:
            return _ANSWER
        left = self._timeout - (time.monotonic() - self._began)
        return min(_ANSWER, max(left, 1.0))

    def _check(self, what: str, details: str = "") -> None:
        if self._timeout is not None and time.monotonic() - self._began >= self._timeout:
            raise DeadlineExceeded(f"waited {self._timeout:g} s {what}", details=details)
