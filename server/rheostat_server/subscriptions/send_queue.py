"""What a subscription sends next: taken out of the reservoir, encoded, and without a number yet.

Invariant: items leave in the order in which they were pulled, each once, whatever calls come and
go. Items of a group are encoded together. Long work on the first two groups runs beside the loop,
while what came before is on its way.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from rheostat_server.delivery.delivery_buffer import DeliveryBuffer
from rheostat_server.delivery.items import Chunk, DeliveryItem, EncodedChunk
from rheostat_server.limits import BATCH_BYTES, BATCH_EVENTS, OFFLOAD_BYTES
from rheostat_server.subscriptions.carrier import Carrier
from rheostat_server.subscriptions.messages import Message

_BATCH_SHARE = 8
"""A batch holds at most an eighth of the subscription's buffer, which does not count it."""


@dataclass(eq=False)
class _Group:
    """Items that are encoded together."""

    pulled: list["_QueuedItem"] = field(default_factory=list)
    long: bool = False
    """Whether encoding them takes long."""
    encoding: asyncio.Task[None] | None = None
    """Runs to its end, whoever waits for it: it may write into memory that others would get."""


@dataclass(eq=False)
class _QueuedItem:
    """An item on its way."""

    item: DeliveryItem
    group: _Group
    message: Message | None = None
    """Set once it is encoded."""

    @property
    def bytes(self) -> int:
        """Of its payload, or of its rows where it is not encoded yet."""
        if self.message is not None:
            return self.message.payload
        return self.item.block.size if isinstance(self.item, Chunk) else 0


class SendQueue:
    """The next items. Lives on the event loop."""

    def __init__(self, buffer: DeliveryBuffer, carrier: Carrier) -> None:
        """Of the rows that wait there, as they are carried."""
        self.batched = False
        """Whether the reader takes several events in a message."""
        self._buffer = buffer
        self._carrier = carrier
        self._pulled: deque[_QueuedItem] = deque()

    def __len__(self) -> int:
        """How many have been pulled."""
        return len(self._pulled)

    @property
    def bytes(self) -> int:
        """Bytes of payload that were pulled; of rows where they are not encoded yet."""
        return sum(one.bytes for one in self._pulled)

    def prepare(self) -> None:
        """Pulls what comes next, and begins to encode it if that takes long.

        Of what takes long a second group too, so that the threads find work when they come back.
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
        """The next items that leave together; none if nothing can leave."""
        group, work = _Group(), 0
        most = min(BATCH_BYTES, self._buffer.limit // _BATCH_SHARE) if self.batched else 0
        while not group.pulled or (work < most and len(group.pulled) < BATCH_EVENTS):
            item = self._buffer.take()
            if item is None:
                break
            group.pulled.append(_QueuedItem(item, group))
            work += _work(item)
        group.long = work >= OFFLOAD_BYTES
        return group

    async def message(self) -> Message | None:
        """That of the first; None: there is none, or it went to somebody else meanwhile."""
        self.prepare()
        if not self._pulled:
            return None
        first = self._pulled[0]
        if first.message is None:
            await asyncio.shield(first.group.encoding or self._begin(first.group))
        return first.message if self._pulled and self._pulled[0] is first else None

    def encoded(self) -> Message | None:
        """That of the first, if it is encoded already."""
        return self._pulled[0].message if self._pulled else None

    def take(self) -> DeliveryItem:
        """Gives the first away, once its message is there."""
        return self._pulled.popleft().item

    def clear(self) -> None:
        """Forgets what was pulled."""
        self._pulled.clear()

    def _begin(self, group: _Group) -> asyncio.Task[None]:
        group.encoding = asyncio.create_task(self._encode(group))
        return group.encoding

    async def _encode(self, group: _Group) -> None:
        messages = await self._carrier.messages_of([one.item for one in group.pulled])
        for one, message in zip(group.pulled, messages, strict=True):
            one.message = message


def _work(item: DeliveryItem) -> int:
    """Bytes that encoding an item goes over."""
    if isinstance(item, Chunk):
        return item.block.work
    return len(item.message.tensor.inline) if isinstance(item, EncodedChunk) else 0
