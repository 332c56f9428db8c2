"""Sends the payloads of a subscription inside messages, or beside them in shared memory.

Invariant: a payload goes to shared memory only if the reader has proved in this call that it reads
that memory. A payload that does not fit there travels inside its message, so it is not lost.
"""

from collections.abc import Sequence

from rheostat_server import validation
from rheostat_server.delivery.items import DeliveryItem
from rheostat_server.delivery.row_messages import CapturedRows
from rheostat_server.errors import InvalidValue
from rheostat_server.limits import CHUNK_BYTES, ID_BYTES, SHARED_CHUNK_BYTES
from rheostat_server.subscriptions.messages import Message, messages_of
from rheostat_server.subscriptions.shared_memory import Arena, NoSharedMemoryError, namespace
from rheostat_wire.v1 import capture_pb2, capture_service_pb2, tensor_pb2


class PayloadTransport:
    """Sends payloads to one reader. Used on the event loop alone."""

    def __init__(self) -> None:
        """Every payload travels inside its message."""
        self.arena: Arena | None = None
        """Shared memory, if the client asked for it and the server could make it."""
        self.inline_reason = ""
        """Why there is no shared memory although the client asked for it."""
        self._proven = False

    def share(self, limit: int, theirs: str) -> None:
        """Makes shared memory, or sets `inline_reason`.

        Args:
            limit: the most bytes of payload that are kept.
            theirs: the reader's namespace; empty if it is unknown.
        """
        try:
            if theirs and theirs != namespace():
                raise NoSharedMemoryError("the client is on another host, or has another /dev/shm")
            self.arena = Arena(limit)
        except NoSharedMemoryError as error:
            self.inline_reason = str(error)

    def begin(self, opened: capture_service_pb2.SubscribeOpened) -> None:
        """Begins a call, and writes its first message."""
        self._proven = False
        opened.inline_reason = self.inline_reason
        if self.arena is not None:
            opened.shared_memory.CopyFrom(self.arena.to_wire())

    def prove(self, nonce: bytes) -> None:
        """Checks the proof that the call's reader reads the arena. Later payloads go there.

        Raises:
            InvalidValue: the nonce is wrong.
        """
        validation.check_count(len(nonce), ID_BYTES, "proof.nonce", "bytes")
        if self.arena is None or not self.arena.proven(nonce):
            raise InvalidValue(
                "is not the nonce in the shared memory of this subscription", field="proof.nonce"
            )
        self._proven = True

    def chunk_bytes(self, limit: int, credit: int) -> int:
        """The largest chunk in bytes, approximately.

        Args:
            limit: the most bytes that may be kept.
            credit: bytes that the reader allows at a time; 0 if unknown.
        """
        most = CHUNK_BYTES
        if self._proven:
            most = max(CHUNK_BYTES, min(SHARED_CHUNK_BYTES, limit // 8, credit // 4))
        return min(most, credit // 2) if credit else most

    async def messages_of(self, items: Sequence[DeliveryItem]) -> list[Message]:
        """The messages of some items, in order."""
        return await messages_of(items, self.arena if self._proven else None)

    def readable(self, message: Message) -> Message:
        """A message as the call's reader can read it."""
        shared = _shared(message)
        if self._proven or self.arena is None or shared is None or message.rows is None:
            return message
        copy = capture_pb2.Captured()
        copy.CopyFrom(message.rows.message)
        copy.tensor.inline = self.arena.view(shared.offset, shared.length).tobytes()
        return message._replace(rows=CapturedRows(copy))

    def free(self, message: Message) -> None:
        """Frees the memory of a message that was acknowledged."""
        shared = _shared(message)
        if self.arena is not None and shared is not None:
            self.arena.free(shared.offset)

    def trim(self) -> None:
        """Gives free memory back, because the subscription is idle."""
        if self.arena is not None:
            self.arena.trim()

    def close(self) -> None:
        """Releases the memory, because the subscription has ended."""
        if self.arena is not None:
            self.arena.close()
            self.arena = None  # threads that still write keep the memory until they end


def _shared(message: Message) -> tensor_pb2.ShmRef | None:
    """The place of a message's payload in shared memory; None if it is not there."""
    if message.rows is None or not message.rows.message.tensor.HasField("shm"):
        return None
    return message.rows.message.tensor.shm
