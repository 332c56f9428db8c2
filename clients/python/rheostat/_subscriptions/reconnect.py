"""When a subscription reconnects after its connection broke, and when it gives up."""

from __future__ import annotations

import logging
import random
import time

from rheostat._errors import Cancelled, RheostatError, Unavailable
from rheostat._subscriptions.state import SubscriptionState

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 2.0

LOG = logging.getLogger("rheostat")
"""If the program configures no logging, Python prints its warnings on stderr."""
RESUME_ADVICE = "; if the server still runs, continue with engine.resume(subscription.acknowledged)"


class ReconnectPolicy:
    """Decides whether a subscription reconnects, and after which pause."""

    def __init__(self, state: SubscriptionState, target: str) -> None:
        self._state = state
        self._target = target
        self._since: float | None = None
        self._pause = 0.0

    def on_message(self) -> None:
        """A message arrived, so the connection works again."""
        if self._since is not None:
            lasted = time.monotonic() - self._since
            LOG.warning(
                "subscription %s continues after %.1f s; no event is lost", self._state.id, lasted
            )
        self._since, self._pause = None, 0.0

    def pause(self, error: RheostatError) -> float:
        """Seconds to wait before connecting again.

        Raises ``error`` itself if the server refused the call, Unavailable after the timeout.
        """
        if error.reason or not isinstance(error, Unavailable | Cancelled):
            raise error
        now, timeout = time.monotonic(), self._state.reconnect_timeout
        if self._since is None:
            self._since = now
            LOG.warning(
                "the connection to %s was lost; trying for %g s to resume subscription %s",
                self._target,
                timeout,
                self._state.id,
            )
        elif now - self._since > timeout:
            raise Unavailable(
                f"could not connect to {self._target} within {timeout:g} s{RESUME_ADVICE}",
                details=error.details,
            ) from error
        pause = self._pause
        self._pause = min(_LONGEST_PAUSE, 2 * pause or _FIRST_PAUSE)
        return pause * random.uniform(0.5, 1.0)
