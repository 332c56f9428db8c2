"""A request's rows on their way into its own response.

Invariant: whoever waits for what happens in the request hears of rows too, once for all that can
leave.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from rheostat_server.delivery.delivery_buffer import DeliveryBuffer
from rheostat_server.delivery.items import DeliveryItem, End
from rheostat_server.delivery.row_feed import RowFeed
from rheostat_wire.v1 import capture_pb2

ADVICE = "Read faster, capture less, or choose another overload policy"
"""What helps against rows that wait in memory for a response, a sink or a run."""

LOSSLESS = (capture_pb2.OVERLOAD_FAIL, capture_pb2.OVERLOAD_SPILL)
"""Policies under which no row may be lost."""


class NotifyingEvent(asyncio.Event):
    """An event of which somebody hears each time that it is set anew."""

    def __init__(self, ring: Callable[[], None]) -> None:
        """Not set; `ring` hears."""
        super().__init__()
        self._ring = ring

    def set(self) -> None:
        """Sets it."""
        if not self.is_set():
            super().set()
            self._ring()


class ResponseRows:
    """The taps of a response: one for the captures of each policy."""

    def __init__(self, ring: Callable[[], None]) -> None:
        """There are none; `ring` hears when rows can leave."""
        self.bell = NotifyingEvent(ring)
        self._open: deque[tuple[RowFeed, DeliveryBuffer]] = deque()
        self._left = 0

    def add(self, feed: RowFeed, buffer: DeliveryBuffer) -> None:
        """Adds a tap; its reservoir has the bell for its news."""
        self._open.append((feed, buffer))
        self._left += 1

    @property
    def ended(self) -> bool:
        """Whether everything has left."""
        return not self._left

    def take(self) -> DeliveryItem | None:
        """Removes and returns what leaves next, from each tap in turn.

        None: nothing can leave until the bell rings.
        """
        for _ in range(len(self._open)):
            self._open.rotate(-1)
            _, buffer = self._open[-1]
            item = buffer.take()
            while isinstance(item, End):
                self._left -= 1
                item = buffer.take()
            if item is not None:
                return item
        return None

    def close(self) -> None:
        """Loses what waits; nothing leaves any more."""
        for feed, buffer in self._open:
            feed.discard()
            buffer.close()
