"""What a subscription sends next: taken out of the reservoir, encoded, and without a number yet.

Invariant: items leave in the order in which they were pulled, each once, whatever calls come and
go. Long work on the first two runs beside the loop, while what came before is on its way.
"""

import asyncio
from collections import deque
from dataclasses import dataclass

from rheostat_server.capture.leaving import Chunk, Item, Sealed
from rheostat_server.capture.reservoir import Reservoir
from rheostat_server.limits import OFFLOAD_BYTES
from rheostat_server.subscriptions.carrier import Carrier
from rheostat_server.subscriptions.messages import Message


@dataclass(eq=False)
class _Pulled:
    """An item on its way."""

    item: Item
    long: bool
    """Whether encoding it takes long."""
    encoding: asyncio.Task[Message] | None = None
    """Runs to its end, whoever waits for it: it may write into memory that others would get."""
    message: Message | None = None
    """Set once it is encoded."""

    @property
    def bytes(self) -> int:
        """Of its payload, or of its rows where it is not encoded yet."""
        if self.message is not None:
            return self.message.payload
        return self.item.block.size if isinstance(self.item, Chunk) else 0


class Upcoming:
    """The next items. Lives on the event loop."""

    def __init__(self, reservoir: Reservoir, carrier: Carrier) -> None:
        """Of the rows that wait there, as they are carried."""
        self._reservoir = reservoir
        self._carrier = carrier
        self._pulled: deque[_Pulled] = deque()

    def __len__(self) -> int:
        """How many have been pulled."""
        return len(self._pulled)

    @property
    def bytes(self) -> int:
        """Bytes of payload that were pulled; of rows where they are not encoded yet."""
        return sum(one.bytes for one in self._pulled)

    def prepare(self) -> None:
        """Pulls what comes next, and begins to encode it if that takes long.

        Of what takes long a second one too, so that the threads find work when they come back.
        """
        while not self._pulled or (len(self._pulled) == 1 and self._pulled[0].long):
            item = self._reservoir.take()
            if item is None:
                return
            self._pulled.append(_Pulled(item, _work(item) >= OFFLOAD_BYTES))
            if self._pulled[-1].long:
                self._begin(self._pulled[-1])

    async def message(self) -> Message | None:
        """That of the first; None: there is none, or it went to somebody else meanwhile."""
        self.prepare()
        if not self._pulled:
            return None
        first = self._pulled[0]
        if first.message is None:
            first.message = await asyncio.shield(first.encoding or self._begin(first))
        return first.message if self._pulled and self._pulled[0] is first else None

    def take(self) -> Item:
        """Gives the first away, once its message is there."""
        return self._pulled.popleft().item

    def clear(self) -> None:
        """Forgets what was pulled."""
        self._pulled.clear()

    def _begin(self, pulled: _Pulled) -> asyncio.Task[Message]:
        pulled.encoding = asyncio.create_task(self._carrier.message_of(pulled.item))
        return pulled.encoding


def _work(item: Item) -> int:
    """Bytes that encoding an item goes over."""
    if isinstance(item, Chunk):
        return item.block.work
    return len(item.message.tensor.inline) if isinstance(item, Sealed) else 0
