"""Whether the server serves. Services get the manager of requests here.

Invariant: health says SERVING exactly while `manager` would not raise and requests are admitted.
"""

import asyncio
import logging
from collections.abc import Callable

from grpc_health.v1.health_pb2 import HealthCheckResponse

from rheostat_server.delivery.counts import Drained
from rheostat_server.errors import EngineLost, WarmingUp
from rheostat_server.requests.manager import RequestManager
from rheostat_server.tasks.futures import keep

_LOG = logging.getLogger(__name__)

_WARM_UP_RETRY = 5.0

LOST_GRACE = 5.0
"""Seconds for which a server whose engine is lost still reports this to clients."""


class Readiness:
    """State of a server: warming up, serving, draining or lost."""

    def __init__(self, set_health: Callable[[int], None]) -> None:
        """Makes the state of a server that warms up.

        Args:
            set_health: sets what health checks answer: a `HealthCheckResponse.ServingStatus`.
        """
        self.ended = asyncio.Event()
        self._set = set_health
        self._manager: RequestManager | None = None
        self._losing: asyncio.Task[None] | None = None
        self._drains: set[asyncio.Task[Drained]] = set()

    async def warm_up(self) -> None:
        """Health says NOT_SERVING from now on."""
        self._set(HealthCheckResponse.NOT_SERVING)

    async def serve(self, manager: RequestManager) -> None:
        """Uses a manager; health says SERVING."""
        self._manager = manager
        manager.start(self._lose)
        self._set(HealthCheckResponse.SERVING)
        _LOG.info("serving %s", manager.info.name)

    @property
    def lost(self) -> str:
        """Why the engine is gone; empty while it is there."""
        return self._manager.lost if self._manager is not None else ""

    def manager(self) -> RequestManager:
        """The manager of requests.

        Raises:
            WarmingUp: the model is being loaded.
            EngineLost: the engine is gone.
        """
        manager = self._loaded()
        if manager.lost:
            raise EngineLost(manager.lost)
        return manager

    def _loaded(self) -> RequestManager:
        if self._manager is None:
            raise WarmingUp("the model is being loaded", retry_after=_WARM_UP_RETRY)
        return self._manager

    async def drain(self, timeout: float | None) -> Drained:
        """Admits no more requests, waits for the active ones, and aborts them after `timeout`."""
        self._set(HealthCheckResponse.NOT_SERVING)
        if self._manager is None:
            return Drained(0, 0)
        return await self._manager.drain(timeout)

    async def drain_and_end(self, timeout: float | None) -> Drained:
        """Drains, then ends the server. Both happen even if the caller is cancelled.

        A server whose engine is lost ends too.

        Raises:
            WarmingUp: the model is being loaded.
        """
        self._loaded()
        return await asyncio.shield(keep(self._drains, self._drain_and_end(timeout)))

    async def _drain_and_end(self, timeout: float | None) -> Drained:
        try:
            return await self.drain(timeout)
        finally:
            self.end()

    def end(self) -> None:
        """Makes `run` end the server."""
        self.ended.set()

    def _lose(self) -> None:
        """The engine is gone; health says NOT_SERVING, and the server ends soon."""
        self._losing = asyncio.create_task(self._end_without_engine())

    async def _end_without_engine(self) -> None:
        """Ends the server once its clients had time to read the reason.

        This process cannot start another engine. If it stayed, its supervisor would not start
        another server.
        """
        self._set(HealthCheckResponse.NOT_SERVING)
        await asyncio.sleep(LOST_GRACE)
        self.end()
