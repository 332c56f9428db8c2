"""Sends the gains of running samples to the engine.

Why together
    Every session may change a gain with every token. All gains of an iteration of the event loop go
    into one message, and so do those that come while a message is on its way.

Invariants: there is one message at a time. Of several gains of an intervention in a message, the
last counts. A message has about `_MESSAGE_GAINS` numbers, and at least one sample.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from rheostat_engine import GainsUpdate, merged_gains
from rheostat_server.engine.backend import Backend
from rheostat_server.errors import Defect, EngineLost, RheostatError

_LOG = logging.getLogger(__name__)

_MESSAGE_GAINS = 8192

Fail = Callable[[RheostatError], None]


class _Waiting(NamedTuple):
    update: GainsUpdate
    fail: Fail


class GainUpdates:
    """Gains of all sessions. Used on the event loop alone."""

    def __init__(self, backend: Backend) -> None:
        """No gain waits.

        Args:
            backend: its workers change the gains.
        """
        self._backend = backend
        self._waiting: dict[str, _Waiting] = {}
        """By the ids of the samples' plans."""
        self._task: asyncio.Task[None] | None = None

    def set(self, update: GainsUpdate, fail: Fail) -> None:
        """Changes gains of a sample from its next step on. An event reports the position.

        Args:
            update: the change.
            fail: ends the sample's request, if the change cannot be sent.
        """
        before = self._waiting.get(update.name)
        earlier = None if before is None else before.update
        self._waiting[update.name] = _Waiting(merged_gains(earlier, update), fail)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        while message := self._taken():
            try:
                await self._backend.set_gains([waiting.update for waiting in message])
            except Exception as error:  # the task goes on; the requests must get the error
                if not isinstance(error, EngineLost):
                    _LOG.error("gains were not sent", exc_info=error)
                    error = Defect("a gain did not reach the engine")
                for waiting in message:
                    waiting.fail(error)

    def _taken(self) -> list[_Waiting]:
        """Takes the gains of the next message."""
        taken: list[_Waiting] = []
        count = 0
        for waiting in self._waiting.values():
            count += len(waiting.update.gains)
            if taken and count > _MESSAGE_GAINS:
                break
            taken.append(waiting)
        for waiting in taken:
            del self._waiting[waiting.update.name]
        return taken
