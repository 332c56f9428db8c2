"""Holds samples in the engine while the watch that must read them has no reader.

Why together
    A watch may read hundreds of requests. Everything that changes in an iteration of the event loop
    goes into one message, and so does what changes while a message is on its way.

Invariants: there is one message at a time. The last call of `set` for a sample wins. A sample that
the engine could not hold fails, so it never runs on unwatched.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import NamedTuple

from rheostat_server.engine.backend import Backend
from rheostat_server.errors import Defect, EngineLost, RheostatError

_LOG = logging.getLogger(__name__)

Fail = Callable[[RheostatError], None]


class _Waiting(NamedTuple):
    held: bool
    fail: Fail


class HeldSamples:
    """Samples that the engine is to hold. Used on the event loop alone."""

    def __init__(self, backend: Backend) -> None:
        """No sample is held.

        Args:
            backend: holds them.
        """
        self._backend = backend
        self._waiting: dict[str, _Waiting] = {}
        """By the ids of the samples' plans."""
        self._task: asyncio.Task[None] | None = None

    def set(self, plan_ids: Iterable[str], fail: Fail, *, held: bool) -> None:
        """Holds or releases samples that the engine has.

        Args:
            plan_ids: the ids of their plans.
            fail: ends their request if the message cannot be sent.
            held: whether they are held; False: they go on.
        """
        self._waiting.update((plan_id, _Waiting(held, fail)) for plan_id in plan_ids)
        if self._waiting and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        while message := self._waiting:
            self._waiting = {}
            try:
                for held in (True, False):
                    ids = [plan_id for plan_id, waiting in message.items() if waiting.held == held]
                    if ids:
                        await self._backend.hold_samples(ids, held=held)
            except Exception as error:  # the task goes on; the requests must get the error
                if not isinstance(error, EngineLost):
                    _LOG.error("samples were not held or released", exc_info=error)
                    error = Defect("the engine could not hold the request, or go on with it")
                for waiting in message.values():
                    waiting.fail(error)
