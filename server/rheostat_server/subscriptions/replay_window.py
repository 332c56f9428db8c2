"""The events of a subscription that were sent and not acknowledged.

Invariants: sequence numbers rise by one. A sent event stays, byte for byte, until it is
acknowledged.
"""

from collections import deque
from typing import Generic, NamedTuple, Protocol, TypeVar

from rheostat_server.errors import InvalidValue
from rheostat_wire.message_parts import MessageParts


class Sendable(Protocol):
    """An event without its sequence number."""

    @property
    def payload(self) -> int:
        """Bytes of payload."""

    @property
    def weight(self) -> int:
        """Bytes of memory while it is kept."""

    def numbered(self, sequence: int) -> MessageParts:
        """The event's message with a sequence number."""


M = TypeVar("M", bound=Sendable)


class Sent(NamedTuple, Generic[M]):
    """An event that was sent."""

    sequence: int
    message: M


class ReplayWindow(Generic[M]):
    """The sent events that the reader may ask for again."""

    def __init__(self) -> None:
        """No event was sent."""
        self.last = 0
        """The number of the last sent event."""
        self.acknowledged = 0
        """The number up to which the reader has acknowledged all events."""
        self._kept: deque[Sent[M]] = deque()

    def add(self, message: M) -> Sent[M]:
        """Numbers an event that is sent, and keeps it."""
        self.last += 1
        sent = Sent(self.last, message)
        self._kept.append(sent)
        return sent

    def after(self, sequence: int) -> Sent[M] | None:
        """The first kept event after a number."""
        place = max(0, sequence - self.acknowledged)
        return self._kept[place] if place < len(self._kept) else None

    def check(self, sequence: int, field: str) -> None:
        """Refuses numbers of events that were never sent.

        Raises:
            InvalidValue: the number is greater than the last one.
        """
        if sequence > self.last:
            raise InvalidValue(
                f"event {sequence} was not sent; the last was {self.last}", field=field
            )

    def acknowledge(self, sequence: int) -> list[Sent[M]]:
        """Removes and returns the events up to a number."""
        self.acknowledged = max(self.acknowledged, sequence)
        removed = []
        while self._kept and self._kept[0].sequence <= sequence:
            removed.append(self._kept.popleft())
        return removed

    def clear(self) -> None:
        """Removes all events."""
        self._kept.clear()
