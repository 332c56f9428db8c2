"""A stream of events of the asyncio client: like `stream`, with a task instead of a thread."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import Self

from rheostat._connection.aio_connection import Connection, cancelled_here
from rheostat._errors import RheostatError
from rheostat._event_streams.state import CLOSE_TIMEOUT, E, EventStreamState, M, not_opened_error
from rheostat._event_streams.worker import BaseWorker, StreamBase


class EventStream(StreamBase[M, E]):
    """The methods that a subscription and a watch have in common, as `stream.EventStream`."""

    def __init__(self, connection: Connection, state: EventStreamState[M, E]) -> None:
        """Starts the call."""
        self._state = state
        self._worker: StreamWorker[M, E] = StreamWorker(connection, state)
        worker = self._worker
        loop = asyncio.get_running_loop()
        weakref.finalize(self, _abandon, loop, worker)
        worker.start(loop)

    def __aiter__(self) -> Self:
        self._worker.check_open()
        return self

    async def __anext__(self) -> E:
        return await self._worker.next_event()

    async def close(self) -> None:
        """End the stream, and drop events that were not read. Iterating in another task ends.

        Returns once the server has ended the stream, or after 5 seconds with a warning in the log.
        Closing then continues in the background, and the server drops the stream after its resume
        window at the latest. Does nothing if the stream has ended already.
        """
        await self._worker.close()

    async def __aenter__(self) -> Self:
        await self._worker.wait_until_open()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def _abandon(loop: asyncio.AbstractEventLoop, worker: StreamWorker[M, E]) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has been closed, and its calls with it
        loop.call_soon_threadsafe(worker.abandon)


class StreamWorker(BaseWorker[M, E]):
    """Runs the calls of one stream in a task."""

    def __init__(self, connection: Connection, state: EventStreamState[M, E]) -> None:
        BaseWorker.__init__(self, connection, state)
        self._connection = connection
        self._lock = contextlib.nullcontext()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        """Ends a wait when an acknowledgement is due; None if no such moment is set."""

    def _notify(self) -> None:
        self._changed.set()

    def _caller(self) -> weakref.ref[asyncio.Task[object]] | None:
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs
            return None
        return None if task is None else weakref.ref(task)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the task."""
        self._task = loop.create_task(self._run(), name=f"rheostat-{self._state.kind}")

    async def _run(self) -> None:
        """Runs calls until the stream has ended."""
        failure: RheostatError | None = self._state.ended_early_error()
        try:
            while not (self._ended or self._leaving):
                try:
                    await self._call()
                except RheostatError as error:
                    if self._connection.closed or not self._state.id:
                        raise
                    if self._leaving:  # another client may read the stream now
                        break
                    await self._wait(self._reconnects.pause(error))
            failure = None
        except RheostatError as error:
            failure = error
        except asyncio.CancelledError:
            failure = cancelled_here()
            raise
        finally:
            self._end(failure)

    async def _call(self) -> None:
        responses = self._connection.bidi(self._state.call, None)
        self._begin_call(responses)
        try:
            async for message in responses:
                self._receive(message)
        finally:
            responses.cancel()
            responses.send(None)
        if not (self._finishing or self._leaving):
            raise self._state.ended_early_error()
        self._end(None)

    async def wait_until_open(self) -> None:
        """Raises the error of the call, or DeadlineExceeded after the connection's timeout."""
        timeout = self._connection.timeout
        try:
            async with asyncio.timeout(timeout):
                while not (self._ended or self._state.id):
                    await self._wait(None)
        except TimeoutError:
            self.drop()
            raise not_opened_error(timeout) from None
        except asyncio.CancelledError:
            self.drop()
            raise
        if self._failure is not None and not self._state.id:
            raise self._failure
        await self._check_readable()

    async def next_event(self) -> E:
        """The next event; waits for it."""
        await self._check_readable()
        while (event := self._take()) is None:
            if self._exhausted:
                raise StopAsyncIteration
            self._wake_in(self._state.seconds_to_ack())
            await self._wait(None)
            await self._check_readable()
        return event

    def _wake_in(self, seconds: float | None) -> None:
        """Ends a wait after ``seconds`` at the latest, to acknowledge events; None: never.

        A timer for each wait would cost more than reading an event. So one timer serves all waits
        until it fires. It is never too late, because later acknowledgements are due after it.
        """
        if seconds is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._changed.set()

    async def _check_readable(self) -> None:
        """End the stream if this client cannot read it."""
        refusal = self._state.refusal if self._state.id else None
        if refusal is not None and not self._exhausted:
            await self.close()
            raise refusal

    async def close(self) -> None:
        """End the stream, and wait until the server has ended it."""
        self._begin_close()
        try:
            await self._wait_for_end()
        except asyncio.CancelledError:
            self.drop()
            raise
        self._warn_unless_ended()

    async def leave(self) -> None:
        """End the call, not the stream, once the server has received the acks."""
        try:
            if self._begin_leave():
                await self._wait_for_end()
        finally:
            self.drop()

    def abandon(self) -> None:
        """End the call because the program dropped the `EventStream`, unless `close` runs."""
        if not self._closing:
            self.drop()

    async def _wait_for_end(self) -> None:
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT)

    async def _wait(self, timeout: float | None) -> None:
        self._changed.clear()
        if timeout is None:
            await self._changed.wait()
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()
