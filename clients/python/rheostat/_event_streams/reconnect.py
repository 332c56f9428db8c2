"""When a stream reconnects after its connection broke, and when it gives up."""

from __future__ import annotations

import logging
import random
import time
from typing import Protocol

from rheostat._errors import Cancelled, RheostatError, Unavailable

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 2.0
"""Seconds. The first attempt has no pause; then the pauses double, up to the longest."""

LOG = logging.getLogger("rheostat")
"""If the program configures no logging, Python prints its warnings on stderr."""


class Reconnecting(Protocol):
    """The part of a stream's state that the policy reads."""

    id: str
    reconnect_timeout: float

    @property
    def kind(self) -> str: ...
    @property
    def when_lost(self) -> str: ...


class ReconnectPolicy:
    """Decides whether a stream reconnects, and after which pause."""

    def __init__(self, state: Reconnecting, target: str) -> None:
        self._state = state
        self._target = target
        self._lost_at: float | None = None
        """When the connection was lost; None while it works."""
        self._pause = 0.0

    def on_message(self) -> None:
        """A message arrived, so the connection works again."""
        if self._lost_at is not None:
            lasted = time.monotonic() - self._lost_at
            LOG.warning(
                "%s %s continues after %.1f s; no event is lost",
                self._state.kind,
                self._state.id,
                lasted,
            )
        self._lost_at, self._pause = None, 0.0

    def pause(self, error: RheostatError) -> float:
        """Seconds to wait before connecting again.

        Raises ``error`` itself if the server refused the call, Unavailable after the timeout.
        """
        if error.reason or not isinstance(error, Unavailable | Cancelled):
            raise error
        now, timeout = time.monotonic(), self._state.reconnect_timeout
        if self._lost_at is None:
            self._lost_at = now
            LOG.warning(
                "the connection to %s was lost; trying for %g s to resume %s %s",
                self._target,
                timeout,
                self._state.kind,
                self._state.id,
            )
        elif now - self._lost_at > timeout:
            raise Unavailable(
                f"could not connect to {self._target} within {timeout:g} s{self._state.when_lost}",
                details=error.details,
            ) from error
        pause = self._pause
        self._pause = min(_LONGEST_PAUSE, 2 * pause or _FIRST_PAUSE)
        return pause * random.uniform(0.5, 1.0)
