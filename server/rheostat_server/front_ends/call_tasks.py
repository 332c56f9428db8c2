"""The tasks that answer calls which a forwarder has received."""

import asyncio
import logging
from functools import partial
from typing import Protocol

from rheostat_server.front_ends.call import Answer, Call
from rheostat_server.front_ends.call_starts import CallStarts
from rheostat_server.front_ends.records import Kind, read_call_body
from rheostat_wire.message_parts import Payload

_LOG = logging.getLogger(__name__)


class Send(Protocol):
    """A function that sends a record to the forwarder."""

    def __call__(self, kind: Kind, call: int = 0, *body: Payload) -> None:
        """Sends a record of a call, whose body is the concatenated parts."""


class CallTasks:
    """The calls of a forwarder, and their tasks."""

    def __init__(
        self, send: Send, answer: Answer, starts: CallStarts, *, writes_cheaply: bool = True
    ) -> None:
        """No call runs.

        Args:
            send: sends a record to the forwarder.
            answer: answers a call.
            starts: the turns of calls to start.
            writes_cheaply: see `Call`.
        """
        self._send = send
        self._answer = answer
        self._starts = starts
        self._writes_cheaply = writes_cheaply
        self._calls: dict[int, tuple[Call, asyncio.Task[None] | None]] = {}
        """Each has a task once it is its turn to start."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks that answer calls. A call may have ended while its task still cleans up."""

    def __len__(self) -> int:
        """The calls that the forwarder has not reported as over."""
        return len(self._calls)

    def receive(self, kind: Kind, number: int, body: bytes) -> None:
        """Processes a record of a call."""
        if kind is Kind.BEGIN:
            self._begin(number, body)
        elif (begun := self._calls.get(number)) is not None:
            call, task = begun
            call.receive(kind, body)
            if kind is Kind.DONE:
                del self._calls[number]
                if task is not None and not call.ended:
                    task.cancel()  # the client has disconnected

    def cancel(self) -> None:
        """Cancels the tasks of all calls, because the forwarder has ended."""
        for call, task in self._calls.values():
            call.receive(Kind.DONE, b"")
            if task is not None:
                task.cancel()
        self._calls.clear()

    def _begin(self, number: int, body: bytes) -> None:
        begin = read_call_body(body)

        def send(kind: Kind, *body: Payload) -> None:
            self._send(kind, number, *body)

        call = Call(send, begin, self._starts, writes_cheaply=self._writes_cheaply)
        self._calls[number] = call, None
        self._starts.call(partial(self._start, number, begin.method, call))

    def _start(self, number: int, path: str, call: Call) -> None:
        """Starts to answer a call, unless its client has disconnected."""
        if number not in self._calls:
            return
        task = asyncio.create_task(self._answer_to_end(path, call))
        self._calls[number] = call, task
        self._tasks.add(task)
        task.add_done_callback(self._remove_task)

    async def _answer_to_end(self, path: str, call: Call) -> None:
        """Answers a call, and reports its end to the forwarder even if answering fails."""
        try:
            await self._answer(path, call)
            call.end()
        finally:
            call.abandon()

    def _remove_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("a call was not answered to its end", exc_info=error)
