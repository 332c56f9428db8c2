"""The messages of a client's stream, as the handlers of streams read them."""

from collections.abc import AsyncGenerator, Callable
from typing import Generic, Self, TypeVar

Message = TypeVar("Message")


class ClientMessages(Generic[Message]):
    """Messages in the order in which they arrive.

    A large message reserves memory until the next message arrives. A handler that uses a message
    for longer, because it waits in a queue, keeps its memory reserved. Otherwise the messages of
    all queues together would have no limit.
    """

    def __init__(
        self, messages: AsyncGenerator[Message, None], keep: Callable[[], Callable[[], None]]
    ) -> None:
        """No message was read yet; `messages` yields them."""
        self._messages = messages
        self.keep = keep
        """Keeps the memory of the latest message reserved. Returns a function that releases it, to
        be called once. The first message stays reserved until the call ends anyway."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        """The next message.

        Raises:
            RheostatError: it cannot be read.
            StopAsyncIteration: the client has closed its side of the stream.
        """
        return await anext(self._messages)

    async def aclose(self) -> None:
        """Reads no more."""
        await self._messages.aclose()
