"""How the payloads of a subscription travel: inside messages, or beside them in shared memory.

Invariant: nothing lies in shared memory for a reader that has not shown, in this call, that it
reads it. What finds no room there travels inside its message, so that rows are lost to no policy
that they would not be lost to without it.
"""

from collections.abc import Sequence

from rheostat_server import validation
from rheostat_server.delivery.items import DeliveryItem
from rheostat_server.errors import InvalidValue
from rheostat_server.limits import CHUNK_BYTES, ID_BYTES, SHARED_CHUNK_BYTES
from rheostat_server.subscriptions.messages import Message, Response, messages_of
from rheostat_server.subscriptions.shared_memory import Arena, NoSharedMemoryError, namespace
from rheostat_wire.v1 import capture_service_pb2


class Carrier:
    """Carries payloads to one reader. Lives on the event loop."""

    def __init__(self) -> None:
        """One that carries everything inside messages, and was not asked to do otherwise."""
        self.arena: Arena | None = None
        """Shared memory, if it was asked for and can be had."""
        self.inline_reason = ""
        """Why there is none, though it was asked for."""
        self._proven = False

    def share(self, limit: int, theirs: str) -> None:
        """Makes shared memory, or finds out why there can be none.

        Args:
            limit: bytes of payload that are kept at most.
            theirs: the reader's namespace; empty: not known.
        """
        try:
            if theirs and theirs != namespace():
                raise NoSharedMemoryError("the client is on another host, or has another /dev/shm")
            self.arena = Arena(limit)
        except NoSharedMemoryError as error:
            self.inline_reason = str(error)

    def begin(self, opened: capture_service_pb2.SubscribeOpened) -> None:
        """A call begins, whose first message this is."""
        self._proven = False
        opened.inline_reason = self.inline_reason
        if self.arena is not None:
            opened.shared_memory.CopyFrom(self.arena.to_wire())

    def prove(self, nonce: bytes) -> None:
        """The call's reader has read the arena: what is encoded from now on goes there.

        Raises:
            InvalidValue: it has not.
        """
        validation.check_count(len(nonce), ID_BYTES, "proof.nonce", "bytes")
        if self.arena is None or not self.arena.proven(nonce):
            raise InvalidValue(
                "is not the nonce in the shared memory of this subscription", field="proof.nonce"
            )
        self._proven = True

    def chunk_bytes(self, limit: int, credit: int) -> int:
        """How large chunks should be.

        Args:
            limit: bytes that may be kept.
            credit: bytes that the reader allows at a time; 0: not known.
        """
        most = CHUNK_BYTES
        if self._proven:
            most = max(CHUNK_BYTES, min(SHARED_CHUNK_BYTES, limit // 8, credit // 4))
        return min(most, credit // 2) if credit else most

    async def messages_of(self, items: Sequence[DeliveryItem]) -> list[Message]:
        """The messages of some items, in order."""
        return await messages_of(items, self.arena if self._proven else None)

    def readable(self, response: Response) -> Response:
        """A message as the call's reader can read it."""
        arena, tensor = self.arena, response.captured.tensor
        if self._proven or arena is None or not tensor.HasField("shm"):
            return response
        copy = Response()
        copy.CopyFrom(response)
        copy.captured.tensor.inline = arena.room(tensor.shm.offset, tensor.shm.length).tobytes()
        return copy

    def free(self, response: Response) -> None:
        """Nobody asks for a message again."""
        tensor = response.captured.tensor
        if self.arena is not None and tensor.HasField("shm"):
            self.arena.free(tensor.shm.offset)

    def rest(self) -> None:
        """Nothing has happened for a while: gives memory back that nothing is in."""
        if self.arena is not None:
            self.arena.trim()

    def close(self) -> None:
        """The subscription has ended."""
        if self.arena is not None:
            self.arena.close()
            self.arena = None  # its memory goes with the last who writes there
