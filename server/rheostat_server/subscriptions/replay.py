"""What a subscription has sent and may be asked for again.

Invariants: sequence numbers rise by one; what was sent stays, byte for byte, until it is
acknowledged.
"""

from collections import deque
from typing import NamedTuple

from rheostat_server.errors import InvalidValue
from rheostat_server.subscriptions.messages import Response

_MESSAGE_BYTES = 512
"""What a message weighs beside its payload."""


class Sent(NamedTuple):
    """Something that was sent."""

    sequence: int
    response: Response
    payload: int
    """Bytes of payload."""

    @property
    def weight(self) -> int:
        """Bytes that it takes while it is kept."""
        return self.payload + _MESSAGE_BYTES


class Replay:
    """All that was sent and not acknowledged."""

    def __init__(self) -> None:
        """Nothing was sent."""
        self.last = 0
        """The number of what was sent last."""
        self.acknowledged = 0
        """The number up to which the reader has everything."""
        self._kept: deque[Sent] = deque()

    def add(self, response: Response, payload: int) -> Sent:
        """Gives something that is sent its number, and keeps it."""
        self.last += 1
        response.sequence = self.last
        sent = Sent(self.last, response, payload)
        self._kept.append(sent)
        return sent

    def after(self, sequence: int) -> Sent | None:
        """What was sent after a number, or after the last that was acknowledged."""
        place = max(0, sequence - self.acknowledged)
        return self._kept[place] if place < len(self._kept) else None

    def check(self, sequence: int, field: str) -> None:
        """Refuses numbers of what was never sent.

        Raises:
            InvalidValue: this is one.
        """
        if sequence > self.last:
            raise InvalidValue(
                f"event {sequence} was not sent; the last was {self.last}", field=field
            )

    def acknowledge(self, sequence: int) -> list[Sent]:
        """Forgets everything up to a number, and gives it back."""
        self.acknowledged = max(self.acknowledged, sequence)
        forgotten = []
        while self._kept and self._kept[0].sequence <= sequence:
            forgotten.append(self._kept.popleft())
        return forgotten

    def clear(self) -> None:
        """Forgets everything."""
        self._kept.clear()
