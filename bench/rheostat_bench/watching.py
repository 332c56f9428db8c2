"""A subscriber of every request, in a process of its own: it reads, or it stands still."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import rheostat


class Watched(NamedTuple):
    """What came to a subscriber."""

    rows: int
    """Rows."""
    last: float
    """When its last event came, by `time.monotonic`, which all processes share."""


class Watcher:
    """A client that has one subscription at a time. Its methods are orders."""

    def __init__(self, engine: rheostat.Engine) -> None:
        """Has none."""
        self._engine = engine
        self._subscription: rheostat.Subscription | None = None
        self._reading: asyncio.Task[Watched] | None = None

    async def open(self, options: rheostat.SubscribeOptions, requests: int | None) -> str:
        """Subscribes; returns once the subscription stands, and says which way its rows come.

        Args:
            options: what is subscribed to.
            requests: how many it reads to their end; None: it reads nothing at all.
        """
        self._subscription = subscription = self._engine.subscribe(**options)
        if requests is not None:
            reading = asyncio.to_thread(_read, subscription, requests)
            self._reading = asyncio.create_task(reading)
        reason = subscription.inline_reason
        return "shared memory" if reason is None else f"the connection: {reason}"

    async def finish(self) -> Watched:
        """Waits until it has read all its requests, and closes the subscription.

        Raises:
            TimeoutError: some have not come to their end within a minute.
        """
        assert self._reading is not None, "it reads"
        async with asyncio.timeout(60):
            await asyncio.shield(self._reading)
        return await self.close()

    async def close(self) -> Watched:
        """Closes the subscription, whatever may still come."""
        assert self._subscription is not None, "it was opened"
        self._subscription.close()
        watched = Watched(0, 0.0) if self._reading is None else await self._reading
        self._subscription = self._reading = None
        return watched


def _read(subscription: rheostat.Subscription, requests: int) -> Watched:
    rows = ended = 0
    for event in subscription:
        if isinstance(event, rheostat.CapturedRows):
            rows += event.shape[0] * event.shape[1]
        ended += isinstance(event, rheostat.EndOfRequest)
        if ended == requests:
            break
    return Watched(rows, time.monotonic())


@asynccontextmanager
async def watching(target: str) -> AsyncIterator[Watcher]:
    """A subscriber with a connection of its own."""
    with rheostat.connect(target) as engine:
        yield Watcher(engine)
