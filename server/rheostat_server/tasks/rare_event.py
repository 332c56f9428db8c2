"""An event that many objects have, and for which few tasks ever wait."""

import asyncio


class RareEvent:
    """As `asyncio.Event`, but cheaper to make: it makes an `asyncio.Event` when a task waits."""

    __slots__ = ("_event", "_set")

    def __init__(self) -> None:
        """Not set."""
        self._set = False
        self._event: asyncio.Event | None = None

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def set(self) -> None:
        """Sets it."""
        self._set = True
        if self._event is not None:
            self._event.set()

    def clear(self) -> None:
        """Makes it not set."""
        self._set = False
        if self._event is not None:
            self._event.clear()

    async def wait(self) -> None:
        """Returns once it is set."""
        if self._set:
            return
        if self._event is None:
            self._event = asyncio.Event()
        await self._event.wait()
