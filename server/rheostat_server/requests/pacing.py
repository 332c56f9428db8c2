"""How often the tokens of a stream leave while many streams run.

Why
    A message costs the server's process, the front end and the client more than the tokens in it.
    With 256 streams of a small model, a message for each token would cost more than the model.
How
    Up to `_UNPACED` streams, each token leaves at once. With more streams, the tokens of a stream
    leave together, so that all streams send at most about `_MESSAGES` messages per second. The
    first tokens of a stream and its end never wait.
"""

from collections.abc import Iterator
from contextlib import contextmanager

_UNPACED = 64
"""Streams up to which every token leaves at once."""

_MESSAGES = 6000.0
"""Messages per second of the streams above `_UNPACED`. With 256 streams, a stream sends a message
every 32 ms, which are three tokens of an 8B model on one H200."""


class Pace:
    """The pace of all streams of a server."""

    def __init__(self) -> None:
        """No streams."""
        self.interval = 0.0
        """Seconds between two messages of a stream."""
        self._streams = 0

    @contextmanager
    def counting(self, streams: int) -> Iterator[None]:
        """Counts streams while the context lasts."""
        self._count(streams)
        try:
            yield
        finally:
            self._count(-streams)

    def _count(self, change: int) -> None:
        self._streams += change
        self.interval = max(0, self._streams - _UNPACED) / _MESSAGES
