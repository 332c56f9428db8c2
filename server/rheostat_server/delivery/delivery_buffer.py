"""The memory in which rows wait for one reader, and the overload policy when it is full.

Invariants: waiting rows, and sent rows that the reader may ask for again, stay within their share
of memory. Rows are lost only under a policy that allows it. A loss is counted at once, and reported
at the place of the rows. No more rows are lost than do not fit.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from rheostat_server.delivery.byte_budget import ByteCounter, Cost, Holder, Share
from rheostat_server.delivery.items import DeliveryItem, End, ItemSource, Loss
from rheostat_server.delivery.row_batch import Positions, RowBatch
from rheostat_server.delivery.sequence_rows import SequenceRows
from rheostat_server.errors import CaptureOverflow
from rheostat_server.limits import CHUNK_BYTES
from rheostat_wire.v1 import capture_pb2

_ADVICE = (
    "Read and acknowledge faster, capture less, ask for more buffer_bytes, or choose an overload "
    "policy that spills or may lose rows"
)

_KEPT_ARRIVALS = 1024
"""The fewest arrivals that are remembered before those without waiting rows are removed."""

_DROPPING = (capture_pb2.OVERLOAD_DROP_OLDEST, capture_pb2.OVERLOAD_DROP_NEWEST)


class RowsOnDisk(Protocol):
    """The rows of a buffer that wait on disk. They leave before all rows that wait in memory."""

    bytes: int
    """Bytes of rows on disk."""

    @property
    def excess(self) -> int:
        """Bytes of memory above the limit, which are written to the disk."""

    @property
    def holds(self) -> bool:
        """Whether rows wait on the disk, or on their way to it or back."""

    def refusal(self) -> CaptureOverflow | None:
        """The error if no more rows may come; None if they may."""

    def relieve(self, size: int) -> None:
        """Writes rows above the limit to the disk, and `size` bytes in addition."""

    def take(self) -> DeliveryItem | None:
        """Removes and returns the next item; None if it is not in memory yet."""

    def close(self) -> None:
        """Drops all its rows."""


class _Arrival(NamedTuple):
    """Rows of one event in one batch."""

    batch: RowBatch
    """The batch that holds them, which may hold other rows too."""
    feed: ItemSource
    sequence_rows: SequenceRows
    first: int
    """Their first position."""
    end: int
    """One past their last position."""


class Deliveries:
    """The rows of all requests on their way to all readers. Used on the event loop alone."""

    def __init__(self) -> None:
        """No row was lost."""
        self.lost_rows = 0
        """Rows, once for each reader that lost it, reported to its client or not."""


class DeliveryBuffer(Holder):
    """The rows that wait for one reader."""

    def __init__(
        self,
        share: Share | int,
        on_full: Callable[[ItemSource, CaptureOverflow], None],
        deliveries: Deliveries | None = None,
        *,
        news: asyncio.Event | None = None,
        advice: str = _ADVICE,
    ) -> None:
        """An empty buffer.

        Args:
            share: the memory that it shares with other buffers of the request, or its own limit in
                bytes.
            on_full: called with an error if rows do not fit and none may be lost.
            deliveries: counts lost rows.
            news: set when an item can be taken.
            advice: the advice at the end of the error's message.
        """
        if isinstance(share, int):
            share = Share(share, f"{share} bytes wait or are not acknowledged")
        self.chunk_bytes = CHUNK_BYTES
        """The largest chunk, approximately."""
        self.news = news or asyncio.Event()
        """Set when an item can be taken."""
        self.total = ByteCounter(share.byte_counter)
        """Counts waiting rows, kept rows and rows on their way to the disk."""
        self.byte_counter = ByteCounter(self.total)
        """Counts waiting rows."""
        self.spill: RowsOnDisk | None = None
        """Stores rows on disk that do not fit and may not be lost."""
        self._share = share
        self._kept = 0
        self._on_full = on_full
        self._advice = advice
        self.deliveries = deliveries or Deliveries()
        """Counts the lost rows of all readers."""
        self._arrivals: deque[_Arrival] = deque()
        """Waiting rows in the order in which they came, if the policy drops rows."""
        self._last: tuple[_Arrival, ...] = ()
        """The rows that came last."""
        self._clean_at = _KEPT_ARRIVALS
        self._feeds: dict[ItemSource, None] = {}
        """Feeds whose rows, losses or end can leave now."""
        self._pulling: Iterator[DeliveryItem] = iter(())
        share.add(self)

    @property
    def limit(self) -> int:
        """The most bytes that may wait or be kept."""
        return self._share.limit

    @property
    def used(self) -> int:
        """Bytes of memory of waiting and kept rows."""
        return self.total.bytes

    @property
    def kept(self) -> int:
        """Bytes of sent rows that the reader may ask for again."""
        return self._kept

    @kept.setter
    def kept(self, size: int) -> None:
        self.total.add(size - self._kept)
        self._kept = size

    @property
    def waiting(self) -> int:
        """Bytes of waiting rows, in memory and on disk."""
        return self.used - self._kept + (self.spill.bytes if self.spill else 0)

    @property
    def cost(self) -> Cost:
        """The consequence of giving up bytes."""
        if self.spill is not None:
            return Cost.TIME
        dropping = self._last and self._last[0].feed.policy in _DROPPING
        return Cost.ROWS if dropping else Cost.REQUEST

    @property
    def freeable(self) -> int:
        """Bytes that `give_up` can free."""
        return max(0, self.total.weight - self.spilling)

    @property
    def spilling(self) -> int:
        """Bytes that are being written to the disk, with the memory of their batches."""
        if self.spill is None or not self.used:
            return 0
        return self.total.weight * self.spilling_rows // self.used

    @property
    def spilling_rows(self) -> int:
        """Bytes of rows that are being written to the disk."""
        return self.spill.excess if self.spill else 0

    def touch(self, feed: ItemSource) -> None:
        """Lets the items of a feed leave."""
        self._feeds[feed] = None
        self.news.set()

    def remove(self, feed: ItemSource) -> None:
        """Removes a feed, of which no item leaves any more."""
        self._feeds.pop(feed, None)

    def take(self) -> DeliveryItem | None:
        """Removes and returns the next item; None if no item can leave until `news` is set."""
        spilled = self.spill is not None and self.spill.holds
        item = self.spill.take() if self.spill and spilled else self.take_from_memory()
        if item is None:
            self.news.clear()
        return item

    def take_from_memory(self) -> DeliveryItem | None:
        """Removes and returns the next item of the rows in memory."""
        item = next(self._pulling, None)
        while item is None and self._feeds:
            feed = next(iter(self._feeds))
            del self._feeds[feed]
            self._pulling = feed.pull()
            item = next(self._pulling, None)
        if isinstance(item, Loss):
            counted = min(item.rows, item.feed.unreported_rows)
            item.feed.unreported_rows -= counted
            self.deliveries.lost_rows += item.rows - counted
        elif isinstance(item, End):
            self.deliveries.lost_rows -= (
                item.feed.unreported_rows
            )  # their tokens turned out not to be selected
            item.feed.unreported_rows = 0
        return item

    def close(self) -> None:
        """Drops all rows. No item leaves any more."""
        self._feeds.clear()
        self._pulling = iter(())
        self._arrivals.clear()
        self._last = ()
        self.kept = 0
        self._on_full = lambda _, __: None  # it refers to the request, which refers to this buffer
        if self.spill is not None:
            self.spill.close()
            self.spill = None  # it refers to this buffer
        self._share.remove(self)

    def admit(
        self,
        feed: ItemSource,
        sequence_rows: SequenceRows,
        batches: Sequence[RowBatch],
        positions: Positions,
    ) -> None:
        """Applies the limits to rows that were added, which `byte_counter` has counted already.

        Args:
            feed: their feed.
            sequence_rows: the rows of their sequence.
            batches: the batches that hold them, and possibly earlier rows.
            positions: their positions, ascending, [n].
        """
        if not batches:
            return
        first, end = int(positions[0]), int(positions[-1]) + 1
        self._last = tuple([_Arrival(batch, feed, sequence_rows, first, end) for batch in batches])
        if feed.policy in _DROPPING:
            self._arrivals += self._last
            if len(self._arrivals) > self._clean_at:
                self._arrivals = deque(arrival for arrival in self._arrivals if arrival.batch.count)
                self._clean_at = max(_KEPT_ARRIVALS, 2 * len(self._arrivals))
        self._share.check()
        if self.spill is not None and self.spill.excess:
            self._relieve(self.spill, 0)

    def give_up(self, size: int, why: str) -> None:
        """Frees bytes by the overload policy; `why` names the memory that is full."""
        if not self._last:
            return
        feed = self._last[0].feed
        if feed.policy in _DROPPING:
            self._drop(size, newest=feed.policy == capture_pb2.OVERLOAD_DROP_NEWEST)
        elif feed.policy == capture_pb2.OVERLOAD_SPILL and self.spill is not None:
            # The spill counts the rows alone, and `size` the memory of their batches too.
            self._relieve(self.spill, -(-size * self.used // max(1, self.total.weight)))
        else:
            self._fail(
                CaptureOverflow(
                    f"captured rows came faster than they were read: {why}. {self._advice}",
                    metadata={"rows": str(self.byte_counter.rows)},
                )
            )

    def _relieve(self, spill: RowsOnDisk, size: int) -> None:
        """Writes rows above the limit and `size` bytes more to the disk; fails if it cannot."""
        spill.relieve(size)
        error = spill.refusal()
        if error is not None:
            self._fail(error)

    def _fail(self, error: CaptureOverflow) -> None:
        """Fails the request, because the rows that came last do not fit and may not be lost."""
        for batch, feed, sequence_rows, first, end in self._last:
            if batch.count:
                sequence_rows.lose_from(max(first, batch.first))
                self._count(feed, batch.lose(first, end))
        self._on_full(self._last[0].feed, error)

    def _drop(self, size: int, *, newest: bool) -> None:
        """Drops the newest waiting rows, or the oldest, and no more of them than necessary."""
        target = self.total.weight - size
        while self._arrivals and (over := self.total.weight - target) > 0:
            batch, feed, sequence_rows, first, end = self._arrivals[-1 if newest else 0]
            there = batch.count - batch.below(first) if newest else batch.below(end)
            if not there:
                self._arrivals.pop() if newest else self._arrivals.popleft()
                continue
            lost, rows = batch.queue.drop(min(over, there * batch.position_bytes), newest=newest)
            sequence_rows.lose_from(lost)
            self._count(feed, rows)

    def _count(self, feed: ItemSource, rows: int) -> None:
        feed.unreported_rows += rows
        self.deliveries.lost_rows += rows
        self.touch(feed)
