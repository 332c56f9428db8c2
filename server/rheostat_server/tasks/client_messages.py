"""The messages of a client's stream, as the handlers of streams read them."""

from collections.abc import Callable
from typing import Protocol, Self, TypeVar

Message_co = TypeVar("Message_co", covariant=True)


class ClientMessages(Protocol[Message_co]):
    """Messages in the order in which they arrive.

    A large message reserves memory until the next message arrives. A handler that uses a message
    for longer, because it waits in a queue, keeps its memory reserved. Otherwise the messages of
    all queues together would have no limit.
    """

    def __aiter__(self) -> Self:
        """This object."""

    async def __anext__(self) -> Message_co:
        """The next message.

        Raises:
            RheostatError: it cannot be read.
            StopAsyncIteration: the client has closed its side of the stream.
        """

    def keep(self) -> Callable[[], None]:
        """Keeps the memory of the latest message reserved until the result is called, once."""
