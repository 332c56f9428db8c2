"""The items that a subscription sends next: taken out of its buffer, encoded, not yet numbered.

Invariant: items leave in the order in which they were taken, each once, whatever calls begin and
end. The items of a group are encoded together. If that takes long, the first two groups are encoded
on threads while earlier items are being sent.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from rheostat_server.delivery.delivery_buffer import DeliveryBuffer
from rheostat_server.delivery.items import Chunk, DeliveryItem, EncodedChunk, size_of
from rheostat_server.limits import BATCH_BYTES, BATCH_EVENTS, OFFLOAD_BYTES
from rheostat_server.subscriptions.messages import Message
from rheostat_server.subscriptions.payload_transport import PayloadTransport

_GROUP_SHARE = 8
"""A group holds at most an eighth of the subscription's buffer, because the buffer does not count
it. It may be larger than a message: on a busy event loop, each group waits for several iterations
until it is encoded."""


@dataclass(eq=False)
class _Group:
    """Items that are encoded together."""

    pulled: list["_QueuedItem"] = field(default_factory=list)
    long: bool = False
    """Whether encoding them takes long."""
    encoding: asyncio.Task[None] | None = None
    """The task that encodes them. It is never cancelled, as it may write into shared memory."""


@dataclass(eq=False)
class _QueuedItem:
    """An item that was taken out of the buffer."""

    item: DeliveryItem
    group: _Group
    message: Message | None = None
    """Set once it is encoded."""

    @property
    def bytes(self) -> int:
        """Bytes of its payload, or of its rows until it is encoded."""
        if self.message is not None:
            return self.message.payload
        return self.item.block.size if isinstance(self.item, Chunk) else 0


class SendQueue:
    """The next items. Used on the event loop alone."""

    def __init__(self, buffer: DeliveryBuffer, transport: PayloadTransport) -> None:
        """An empty queue of items from `buffer`, sent by `transport`."""
        self.batched = False
        """Whether the reader accepts several events in a message."""
        self._buffer = buffer
        self._transport = transport
        self._pulled: deque[_QueuedItem] = deque()

    def __len__(self) -> int:
        """Number of items."""
        return len(self._pulled)

    @property
    def bytes(self) -> int:
        """Bytes of their payloads, or of their rows until they are encoded."""
        return sum(queued.bytes for queued in self._pulled)

    def prepare(self) -> None:
        """Takes the next group of items, and begins to encode it if that takes long.

        If it takes long, a second group is taken too, so that the threads are never idle.
        """
        while not self._pulled or (
            self._pulled[0].group is self._pulled[-1].group and self._pulled[0].group.long
        ):
            group = self._pull()
            if not group.pulled:
                return
            self._pulled += group.pulled
            if group.long:
                self._begin(group)

    def _pull(self) -> _Group:
        """Takes the next items that leave together; none if no item can leave."""
        group, work, size = _Group(), 0, 0
        most = self._buffer.limit // _GROUP_SHARE if self.batched else 0
        while not group.pulled or (
            size < most and work < BATCH_BYTES and len(group.pulled) < BATCH_EVENTS
        ):
            item = self._buffer.take()
            if item is None:
                break
            group.pulled.append(_QueuedItem(item, group))
            work += _work(item)
            size += size_of(item)
        group.long = work >= OFFLOAD_BYTES
        return group

    async def message(self) -> Message | None:
        """The first item's message; None if there is no item, or another call has taken it."""
        self.prepare()
        if not self._pulled:
            return None
        first = self._pulled[0]
        if first.message is None:
            encoding = first.group.encoding
            if encoding is None or encoding.done():  # it has failed, perhaps for lack of memory
                encoding = self._begin(first.group)
            try:
                await asyncio.shield(encoding)
            except Exception:
                if self._pulled and self._pulled[0] is first:
                    raise
                # The items were removed, because the subscription has failed for another reason.
        return first.message if self._pulled and self._pulled[0] is first else None

    def encoded(self) -> Message | None:
        """The first item's message, if it is encoded already."""
        return self._pulled[0].message if self._pulled else None

    def take(self) -> DeliveryItem:
        """Removes and returns the first item, whose message is encoded."""
        return self._pulled.popleft().item

    def clear(self) -> None:
        """Removes all items."""
        for queued in self._pulled:
            queued.group.pulled.clear()
        self._pulled.clear()

    def _begin(self, group: _Group) -> asyncio.Task[None]:
        group.encoding = asyncio.create_task(self._encode(group))
        return group.encoding

    async def _encode(self, group: _Group) -> None:
        pulled = tuple(group.pulled)  # a copy: `clear` may empty the group
        messages = await self._transport.messages_of([queued.item for queued in pulled])
        for queued, message in zip(pulled, messages, strict=True):
            queued.message = message
        group.pulled.clear()  # items refer to their group


def _work(item: DeliveryItem) -> int:
    """Bytes that the encoding of an item reads."""
    if isinstance(item, Chunk):
        return item.block.work
    return len(item.message.tensor.inline) if isinstance(item, EncodedChunk) else 0
