"""What a subscription sends next: taken out of the reservoir, encoded, and without a number yet.

Invariants: it is one item, which stays until it is taken, whatever calls come and go. Long work on
it runs beside the loop, while what came before it is still on its way to the reader.
"""

import asyncio

from rheostat_server.carrier import Carrier
from rheostat_server.limits import OFFLOAD_BYTES
from rheostat_server.subscription_messages import Message
from rheostat_server.taps import Chunk, Item, Reservoir


class Upcoming:
    """The next item. Lives on the event loop."""

    def __init__(self, reservoir: Reservoir, carrier: Carrier) -> None:
        """Of the rows that wait there, as they are carried."""
        self.item: Item | None = None
        """It, if it has been taken."""
        self._reservoir = reservoir
        self._carrier = carrier
        self._encoding: asyncio.Task[Message] | None = None
        self._encoded: Message | None = None

    @property
    def bytes(self) -> int:
        """Bytes of its payload, once it is encoded."""
        return 0 if self._encoded is None else self._encoded.payload

    def prepare(self) -> None:
        """Takes it, if there is something, and begins to encode it if that takes long."""
        if self.item is None:
            self.item = self._reservoir.take()
        item = self.item
        if isinstance(item, Chunk) and item.block.work >= OFFLOAD_BYTES and not self._begun:
            self._encoding = asyncio.create_task(self._carrier.message_of(item))

    async def message(self) -> Message | None:
        """Its message; None: there is nothing, or it went to somebody else meanwhile."""
        self.prepare()
        item = self.item
        if item is None or self._encoded is not None:
            return self._encoded
        if self._encoding is None:
            encoded = await self._carrier.message_of(item)
        else:
            encoded = await asyncio.shield(self._encoding)
        if self.item is not item:
            return None
        self._encoding, self._encoded = None, encoded
        return encoded

    def take(self) -> Item:
        """Gives it away, once its message is there."""
        item = self.item
        assert item is not None
        self.item = self._encoded = None
        return item

    def clear(self) -> None:
        """Forgets it."""
        self.item = self._encoding = self._encoded = None

    @property
    def _begun(self) -> bool:
        return self._encoding is not None or self._encoded is not None
