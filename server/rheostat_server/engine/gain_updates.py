"""Sends the gains of running samples to the engine.

Why together
    Every session may change a gain with every token, and the engine's core handles each message
    between two steps. So all gains of an iteration of the event loop go into one message, and so do
    those that come in the pause after a message. The gains of a watch come together, so they are
    sent at once.

Why a message waits for no answer
    The core answers between two steps. A gain that waited for the answer to an earlier message
    would reach it in the step after that, and act a position later. So only the pauses grow: each
    is twice as long as the one before, until the core answers. A step gets few messages, however
    long it is.

Invariants: gains reach the core in their order. Of several gains of an intervention in a message,
the last counts. A message has about `_MESSAGE_GAINS` numbers, and at least one sample.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from rheostat_engine import GainsUpdate, merged_gains
from rheostat_server.engine.backend import Backend
from rheostat_server.errors import Defect, EngineLost, RheostatError
from rheostat_server.tasks.futures import begin_now, keep

_LOG = logging.getLogger(__name__)

_MESSAGE_GAINS = 8192

_PAUSE = 0.0005
"""Seconds between the first message of a step and the second."""

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
        self._scheduled = False
        """Whether waiting gains will be sent in the next iteration of the event loop."""
        self._sending: asyncio.Future[None] | None = None
        """Runs `_send_all`. None before the first message."""
        self._unanswered: set[asyncio.Task[None]] = set()
        """Messages that the core has not answered."""
        self._pause = _PAUSE
        """Seconds from the next message to the one after it, unless the core answers sooner."""

    def set(self, update: GainsUpdate, fail: Fail) -> None:
        """Changes gains of a sample from its next step on. An event reports the position.

        Args:
            update: the change.
            fail: ends the sample's request, if the change cannot be sent.
        """
        before = self._waiting.get(update.name)
        earlier = None if before is None else before.update
        self._waiting[update.name] = _Waiting(merged_gains(earlier, update), fail)
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._send_scheduled)

    def send_now(self) -> None:
        """Sends waiting gains at once, or in the pause after a message, when the pause ends."""
        if self._waiting and (self._sending is None or self._sending.done()):
            self._sending = begin_now(self._send_all())

    def _send_scheduled(self) -> None:
        self._scheduled = False
        self.send_now()

    async def _send_all(self) -> None:
        """Sends messages until no gain waits at the end of a pause."""
        while message := self._taken():
            answer = self._backend.set_gains([waiting.update for waiting in message])
            keep(self._unanswered, self._answered(answer, message))
            pause, self._pause = self._pause, 2 * self._pause
            await asyncio.wait(self._unanswered, timeout=pause, return_when=asyncio.FIRST_COMPLETED)

    async def _answered(self, answer: Awaitable[None], message: list[_Waiting]) -> None:
        """Waits for the answer to a message. If it is an error, the requests of the gains fail."""
        try:
            await answer
        except Exception as error:  # nobody awaits this; the requests must get the error
            if not isinstance(error, EngineLost):
                _LOG.error("gains were not sent", exc_info=error)
                error = Defect("a gain did not reach the engine")
            for waiting in message:
                waiting.fail(error)
        self._pause = _PAUSE

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
