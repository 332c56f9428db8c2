"""Where rows wait for one reader, and what happens to those that find no room.

Invariants: what waits, with what the reader may ask for again, stays within its share of memory.
Rows that find no room are lost only under a policy that says so: counted at once, told in their
place, and no more of them than there is no room for.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from rheostat_server.delivery.byte_budget import ByteCounter, Cost, Share
from rheostat_server.delivery.deliveries import Deliveries
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

_TIDY = 1024
"""Pieces that are remembered at least before those that have left are forgotten."""

_DROPPING = (capture_pb2.OVERLOAD_DROP_OLDEST, capture_pb2.OVERLOAD_DROP_NEWEST)


class Spill(Protocol):
    """What does not wait in memory, and leaves before all that does."""

    bytes: int
    """Bytes of rows on disk."""

    @property
    def memory(self) -> int:
        """Bytes that it takes in memory all the same."""

    @property
    def excess(self) -> int:
        """Bytes of memory that are on their way to the disk."""

    @property
    def holds(self) -> bool:
        """Whether anything waits in it."""

    def refusal(self) -> CaptureOverflow | None:
        """Why no more rows may come; None: they may."""

    def relieve(self, size: int = 0) -> None:
        """Moves what is too much in memory to the disk, and so many bytes more."""

    def take(self) -> DeliveryItem | None:
        """What leaves next; None: nothing yet, and there will be news."""

    def close(self) -> None:
        """Loses all that waits in it."""


class _Arrival(NamedTuple):
    """Rows that came together."""

    piece: RowBatch
    """The piece that holds them, and possibly others."""
    feed: ItemSource
    sequence_rows: SequenceRows
    first: int
    """Their first position."""
    end: int
    """One past their last position."""


class DeliveryBuffer:
    """Room for rows that wait for one reader."""

    def __init__(
        self,
        share: Share | int,
        on_full: Callable[[ItemSource, CaptureOverflow], None],
        deliveries: Deliveries | None = None,
        *,
        news: asyncio.Event | None = None,
        advice: str = _ADVICE,
    ) -> None:
        """An empty one.

        Args:
            share: the memory that it takes, with others of the same request; or the bytes that it
                may take by itself.
            on_full: hears of rows that find no room where none may be lost.
            deliveries: counts what is lost here.
            news: is set when there is something to take.
            advice: what helps where there is no room.
        """
        if isinstance(share, int):
            share = Share(share, f"{share} bytes wait or are not acknowledged")
        self.chunk_bytes = CHUNK_BYTES
        """About how large what leaves is at most."""
        self.news = news or asyncio.Event()
        """Set when there is something to take."""
        self.total = ByteCounter(share.byte_counter)
        """Counts all that it takes in memory."""
        self.byte_counter = ByteCounter(self.total)
        """Counts what waits there to leave."""
        self.spill: Spill | None = None
        """Where rows wait that find no room and may not be lost."""
        self._share = share
        self._kept = 0
        self._on_full = on_full
        self._advice = advice
        self.deliveries = deliveries or Deliveries()
        """What the server delivers to all readers."""
        self._arrivals: deque[_Arrival] = deque()
        """Under a policy that drops, in the order in which they came."""
        self._last: tuple[_Arrival, ...] = ()
        """What came last."""
        self._tidy_at = _TIDY
        self._feeds: dict[ItemSource, None] = {}
        """Feeds whose rows, losses or end can leave now."""
        self._pulling: Iterator[DeliveryItem] = iter(())
        share.add(self)

    @property
    def limit(self) -> int:
        """Bytes that may wait or be kept."""
        return self._share.limit

    @property
    def used(self) -> int:
        """Bytes of memory that wait or are kept."""
        return self.total.bytes

    @property
    def kept(self) -> int:
        """Bytes of what has left and may be asked for again."""
        return self._kept

    @kept.setter
    def kept(self, size: int) -> None:
        self.total.add(size - self._kept)
        self._kept = size

    @property
    def waiting(self) -> int:
        """Bytes that wait, wherever."""
        return self.used - self._kept + (self.spill.bytes if self.spill else 0)

    @property
    def cost(self) -> Cost:
        """What it costs to give them up."""
        if self.spill is not None:
            return Cost.TIME
        dropping = self._last and self._last[0].feed.policy in _DROPPING
        return Cost.ROWS if dropping else Cost.REQUEST

    @property
    def held(self) -> int:
        """Bytes that it can be asked to give up."""
        return max(0, self.total.weight - self.leaving)

    @property
    def leaving(self) -> int:
        """Bytes that are on their way to the disk, with the memory of their pieces."""
        if self.spill is None or not self.used:
            return 0
        return self.total.weight * self.leaving_rows // self.used

    @property
    def leaving_rows(self) -> int:
        """Bytes of the rows themselves that are on their way to the disk."""
        return self.spill.excess if self.spill else 0

    def touch(self, feed: ItemSource) -> None:
        """Lets the items of a feed leave."""
        self._feeds[feed] = None
        self.news.set()

    def forget(self, feed: ItemSource) -> None:
        """Removes a feed, of which no item leaves any more."""
        self._feeds.pop(feed, None)

    def take(self) -> DeliveryItem | None:
        """What leaves next; None: nothing can, until there is news."""
        spilled = self.spill is not None and self.spill.holds
        item = self.spill.take() if self.spill and spilled else self.take_from_memory()
        if item is None:
            self.news.clear()
        return item

    def take_from_memory(self) -> DeliveryItem | None:
        """What leaves next of all that waits in memory."""
        item = next(self._pulling, None)
        while item is None and self._feeds:
            feed = next(iter(self._feeds))
            del self._feeds[feed]
            self._pulling = feed.pull()
            item = next(self._pulling, None)
        if isinstance(item, Loss):
            known = min(item.rows, item.feed.unreported_rows)
            item.feed.unreported_rows -= known
            self.deliveries.lost_rows += item.rows - known
        elif isinstance(item, End):
            self.deliveries.lost_rows -= (
                item.feed.unreported_rows
            )  # their tokens turned out not to be selected
            item.feed.unreported_rows = 0
        return item

    def close(self) -> None:
        """Nothing leaves any more."""
        self._feeds.clear()
        self._pulling = iter(())
        self._arrivals.clear()
        self._last = ()
        self.kept = 0
        if self.spill is not None:
            self.spill.close()

    def admit(
        self,
        feed: ItemSource,
        sequence_rows: SequenceRows,
        pieces: Sequence[RowBatch],
        positions: Positions,
    ) -> None:
        """Lets rows wait, which count already, or loses them or others.

        Args:
            feed: whose rows they are.
            sequence_rows: their track.
            pieces: the pieces that hold them, and possibly rows that came before.
            positions: theirs, ascending, [n].
        """
        if not pieces:
            return
        first, end = int(positions[0]), int(positions[-1]) + 1
        self._last = tuple([_Arrival(piece, feed, sequence_rows, first, end) for piece in pieces])
        if feed.policy in _DROPPING:
            self._arrivals += self._last
            if len(self._arrivals) > self._tidy_at:
                self._arrivals = deque(one for one in self._arrivals if one.piece.count)
                self._tidy_at = max(_TIDY, 2 * len(self._arrivals))
        self._share.check()
        if self.spill is not None and self.spill.excess:
            self._relieve(self.spill, 0)

    def give_up(self, size: int, why: str) -> None:
        """Frees bytes as the policy says, because of what is full."""
        if not self._last:
            return
        feed = self._last[0].feed
        if feed.policy in _DROPPING:
            self._drop(size, newest=feed.policy == capture_pb2.OVERLOAD_DROP_NEWEST)
        elif feed.policy == capture_pb2.OVERLOAD_SPILL and self.spill is not None:
            # The spill counts the rows alone, and `size` the memory of their pieces too.
            self._relieve(self.spill, -(-size * self.used // max(1, self.total.weight)))
        else:
            self._fail(
                CaptureOverflow(
                    f"captured rows came faster than they were read: {why}. {self._advice}",
                    metadata={"rows": str(self.byte_counter.rows)},
                )
            )

    def _relieve(self, spill: Spill, size: int) -> None:
        """Sends what is too much to the disk, and so many bytes more; fails if it cannot be."""
        spill.relieve(size)
        error = spill.refusal()
        if error is not None:
            self._fail(error)

    def _fail(self, error: CaptureOverflow) -> None:
        """The rows that came last find no room, and none may be lost."""
        for piece, feed, sequence_rows, first, end in self._last:
            if piece.count:
                sequence_rows.lose_from(max(first, piece.first))
                self._count(feed, piece.lose(first, end))
        self._on_full(self._last[0].feed, error)

    def _drop(self, size: int, *, newest: bool) -> None:
        """Loses the newest rows that wait, or the oldest, and no more of them than it must."""
        target = self.total.weight - size
        while self._arrivals and (over := self.total.weight - target) > 0:
            piece, feed, sequence_rows, first, end = self._arrivals[-1 if newest else 0]
            there = piece.count - piece.below(first) if newest else piece.below(end)
            if not there:
                self._arrivals.pop() if newest else self._arrivals.popleft()
                continue
            lost, rows = piece.queue.drop(min(over, there * piece.position_bytes), newest=newest)
            sequence_rows.lose_from(lost)
            self._count(feed, rows)

    def _count(self, feed: ItemSource, rows: int) -> None:
        feed.unreported_rows += rows
        self.deliveries.lost_rows += rows
        self.touch(feed)
