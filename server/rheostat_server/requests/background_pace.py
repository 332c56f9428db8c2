"""How often requests in the background start while the engine generates for other requests.

Why
    Each step of the engine that also computes a prompt takes longer, and all streams wait for it.
    A step with one prompt of 40 tokens costs a large model little. A step with 16 takes twice the
    time of a step that only generates.
How
    One request in the background runs at a time. After it none starts for as long as it took. So
    most steps compute no such prompt, and the others one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LONGEST_REST = 0.1
"""Seconds of a rest at most, because a request may have waited before it ran."""


class BackgroundPace:
    """The requests in the background that run, of all sweeps."""

    def __init__(self) -> None:
        """None runs."""
        self._running = 0
        self._rest_until = 0.0

    @contextmanager
    def running(self, now: Callable[[], float]) -> Iterator[None]:
        """Counts a request as running."""
        began = now()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._rest_until = now() + min(_LONGEST_REST, now() - began)

    def allows(self, now: float) -> bool:
        """Whether a request may start beside others."""
        return not self._running and now >= self._rest_until
