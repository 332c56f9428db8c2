"""When and how often a subscription connects again after its connection has broken."""

from __future__ import annotations

import logging
import random
import time

from rheostat._errors import Cancelled, RheostatError, Unavailable
from rheostat._subscriptions.state import Intake

_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 2.0

_LOG = logging.getLogger("rheostat")
"""Without a handler of the program's own, Python prints its warnings on stderr."""


class Breaks:
    """How often and how long a connection has been broken, and what follows."""

    def __init__(self, intake: Intake, target: str) -> None:
        """One that stands, to the server at ``target``, of a subscription that brings this."""
        self._intake = intake
        self._target = target
        self._since: float | None = None
        self._pause = 0.0

    def mended(self) -> None:
        """Something came."""
        if self._since is not None:
            lasted = time.monotonic() - self._since
            _LOG.warning(
                "subscription %s continues after %.1f s; no event is lost", self._intake.id, lasted
            )
        self._since, self._pause = None, 0.0

    def pause(self, error: RheostatError) -> float:
        """Seconds to wait before connecting again.

        Raises the error itself if the server refused, Unavailable if it has lasted too long.
        """
        if error.reason or not isinstance(error, Unavailable | Cancelled):
            raise error
        now, patience = time.monotonic(), self._intake.patience
        if self._since is None:
            self._since = now
            _LOG.warning(
                "the connection to %s was lost; trying for %g s to resume subscription %s",
                self._target,
                patience,
                self._intake.id,
            )
        elif now - self._since > patience:
            raise Unavailable(
                f"could not connect to {self._target} within {patience:g} s; if the server "
                "still runs, continue with engine.resume(subscription.acknowledged)",
                details=error.details,
            ) from error
        pause = self._pause
        self._pause = min(_LONGEST_PAUSE, 2 * pause or _FIRST_PAUSE)
        return pause * random.uniform(0.5, 1.0)
