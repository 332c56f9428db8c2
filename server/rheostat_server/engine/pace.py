"""How often the tokens of a stream are passed on while many streams run."""

import asyncio
from collections import deque
from collections.abc import Callable

_UNPACED = 64
"""Streams up to which every token is sent at once."""

_MESSAGES = 8000.0
"""Messages per second of all streams together, if there are more than `_UNPACED`. With 256 streams,
a stream sends a message every 32 ms or with the next token: four tokens of an 8B model on an
H200."""

_PATIENCE = 2
"""Intervals after which waiting tokens are passed on, although no more tokens come."""


class Pace:
    """Lets the tokens of all streams wait for later ones.

    Why
        A message costs the server, the front end and the client more than its tokens. With 256
        streams of a small model, a message for each token would cost more than the model.
    What counts
        A stream is a sample that has had a token and will have more. Requests that wait in the
        engine, such as the cells of a sweep in the background, and requests of one token send no
        messages that could be merged. So they do not make the tokens of others wait.
    How
        Up to `_UNPACED` streams, each token is sent at once. With more streams, tokens wait for
        later ones, so that all streams send `_MESSAGES` messages per second at most. The first
        tokens and the end of a stream never wait.
    """

    def __init__(self) -> None:
        """No streams."""
        self.interval = 0.0
        """Seconds between two messages of a stream."""
        self._streams = 0
        self._later: deque[tuple[float, Callable[[], None]]] = deque()
        """Functions that are called later, and when."""
        self._timer: asyncio.TimerHandle | None = None
        """Set while functions wait in `_later`."""

    def add(self, streams: int) -> None:
        """Counts streams that begin, or streams that have ended if the number is negative."""
        self._streams += streams
        self.interval = self._streams / _MESSAGES if self._streams > _UNPACED else 0.0

    def call_later(self, call: Callable[[], None]) -> None:
        """Calls a function in `_PATIENCE` intervals. One timer serves all streams."""
        loop = asyncio.get_running_loop()
        due = loop.time() + _PATIENCE * self.interval
        self._later.append((due, call))
        if self._timer is None:
            self._timer = loop.call_at(due, self._call)

    def _call(self) -> None:
        """Calls the functions that are due."""
        loop = asyncio.get_running_loop()
        try:
            while self._later and self._later[0][0] <= loop.time():
                self._later.popleft()[1]()
        finally:
            self._timer = loop.call_at(self._later[0][0], self._call) if self._later else None
