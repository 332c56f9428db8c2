"""Sets an event at a moment, with few timers.

Why: most waits for an event with a time limit end before the limit. A timer for each wait stays in
the heap of the event loop until the limit, where it makes all other timers more expensive.
"""

import asyncio


class Alarm:
    """Sets an event at a moment. Used on the event loop alone."""

    def __init__(self, event: asyncio.Event) -> None:
        """No moment is set. `event` is the event that `set_in` sets."""
        self._event = event
        self._timer: asyncio.TimerHandle | None = None

    def set_in(self, seconds: float) -> None:
        """Sets the event in so many seconds, or at the moment that was asked for before.

        So the event may be set too early: a caller that waits for a later moment calls this again.
        No call may ask for an earlier moment than the calls before it.
        """
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._set)

    def cancel(self) -> None:
        """Does not set the event any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self) -> None:
        self._timer = None
        self._event.set()
