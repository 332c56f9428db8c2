"""A request's rows on their way into its own response.

Invariant: the reader of the response is woken once for all rows that can leave.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from rheostat_engine.cached_property import cached_property
from rheostat_server.delivery.delivery_buffer import DeliveryBuffer
from rheostat_server.delivery.items import End, RowItem
from rheostat_server.delivery.row_feed import RowFeed
from rheostat_wire.v1 import capture_pb2

ADVICE = "Read faster, capture less, or choose another overload policy"
"""What helps against rows that wait in memory for a response, a sink or a run."""

LOSSLESS = (capture_pb2.OVERLOAD_FAIL, capture_pb2.OVERLOAD_SPILL)
"""Policies under which no row may be lost."""


class NotifyingEvent(asyncio.Event):
    """An event that calls a function each time that it is set anew."""

    def __init__(self, on_set: Callable[[], None]) -> None:
        """Not set; `on_set` is called when that changes."""
        super().__init__()
        self._on_set = on_set

    def set(self) -> None:
        """Sets it."""
        if not self.is_set():
            super().set()
            self._on_set()


class ResponseRows:
    """The feeds of a response, one for the captures of each overload policy."""

    def __init__(self, on_set: Callable[[], None]) -> None:
        """There are none; `on_set` is called when rows can leave."""
        self._on_set = on_set
        self._open: deque[tuple[RowFeed, DeliveryBuffer]] = deque()
        self._left = 0

    @cached_property
    def news(self) -> NotifyingEvent:
        """Is set when rows can leave. Made when needed, because most requests capture nothing."""
        return NotifyingEvent(self._on_set)

    def add(self, feed: RowFeed, buffer: DeliveryBuffer) -> None:
        """Adds a feed, whose buffer sets `news`."""
        self._open.append((feed, buffer))
        self._left += 1

    @property
    def ended(self) -> bool:
        """Whether everything has left."""
        return not self._left

    def take(self) -> RowItem | None:
        """Removes and returns the next item, from each feed in turn.

        None: no item can leave until `news` is set.
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
        """Drops all waiting rows. No item leaves any more."""
        for feed, buffer in self._open:
            feed.discard()
            buffer.close()
