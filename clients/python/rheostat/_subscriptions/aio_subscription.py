"""A subscription of the asyncio client: as `subscription`, with a task instead of a thread."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import Self

from rheostat._connection.aio_connection import Connection, cancelled_here
from rheostat._errors import RheostatError
from rheostat._subscriptions.events import SubscriptionEvent
from rheostat._subscriptions.requests import SUBSCRIBE
from rheostat._subscriptions.state import (
    CLOSE_TIMEOUT,
    SubscriptionInfo,
    SubscriptionState,
    ended_early_error,
    not_opened_error,
)
from rheostat._subscriptions.worker import BaseWorker


class Subscription(SubscriptionInfo):
    """Captured rows of other requests, as `rheostat.Subscription`.

        async with engine.subscribe(capture=Capture("resid_post"), every=True) as subscription:
            async for event in subscription:
                ...

    It is open once it has been entered, or once the first event has arrived. One task iterates. If
    this task is cancelled while it waits, no event is lost. Closing ends the loop. If the task that
    closed it early begins another loop, it gets `Refused`.
    """

    def __init__(self, connection: Connection, state: SubscriptionState) -> None:
        """Made by `Engine`; starts the call."""
        self._worker = worker = SubscriptionWorker(connection, state)
        super().__init__(state)
        loop = asyncio.get_running_loop()
        weakref.finalize(self, _abandon, loop, worker)
        worker.start(loop)

    def ack(self) -> None:
        """Acknowledge all events that were read, as `rheostat.Subscription.ack`."""
        self._worker.acknowledge()

    def __aiter__(self) -> Self:
        self._worker.check_open()
        return self

    async def __anext__(self) -> SubscriptionEvent:
        return await self._worker.next_event()

    def finish(self) -> None:
        """Take no further requests, as `rheostat.Subscription.finish`."""
        self._worker.finish()

    async def close(self) -> None:
        """End the subscription, as `rheostat.Subscription.close`."""
        await self._worker.close()

    async def leave(self) -> None:
        """Stop reading, so that it can be resumed, as `rheostat.Subscription.leave`."""
        await self._worker.leave()

    async def __aenter__(self) -> Self:
        await self._worker.wait_until_open()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def _abandon(loop: asyncio.AbstractEventLoop, worker: SubscriptionWorker) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has been closed, and its calls with it
        loop.call_soon_threadsafe(worker.abandon)


class SubscriptionWorker(BaseWorker):
    """Runs the calls of one subscription in a task."""

    def __init__(self, connection: Connection, state: SubscriptionState) -> None:
        super().__init__(connection, state)
        self._connection = connection
        self._lock = contextlib.nullcontext()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

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
        self._task = loop.create_task(self._run(), name="rheostat-subscription")

    async def _run(self) -> None:
        """Runs calls until the subscription has ended."""
        failure: RheostatError | None = ended_early_error()
        try:
            while not (self._ended or self._leaving):
                try:
                    await self._call()
                except RheostatError as error:
                    if self._connection.closed or not self._state.id:
                        raise
                    if self._leaving:  # another client may read the subscription now
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
        responses = self._connection.bidi(SUBSCRIBE, None)
        self._begin_call(responses)
        try:
            async for message in responses:
                self._receive(message)
        finally:
            responses.cancel()
            responses.send(None)
        if not (self._finishing or self._leaving):
            raise ended_early_error()
        self._end(None)

    async def wait_until_open(self) -> None:
        """Raises the error of the call, or DeadlineExceeded."""
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
        await self._check_payloads()

    async def next_event(self) -> SubscriptionEvent:
        """The next event; waits for it."""
        await self._check_payloads()
        while (event := self._take()) is None:
            if self._exhausted:
                raise StopAsyncIteration
            await self._wait(self._state.seconds_to_ack())
            await self._check_payloads()
        return event

    async def _check_payloads(self) -> None:
        """End the subscription if it requires shared memory and cannot map it."""
        refusal = self._state.payloads.refusal if self._state.id else None
        if refusal is not None and not self._exhausted:
            await self.close()
            raise refusal

    async def close(self) -> None:
        """End the subscription, and wait until the server has ended it."""
        self._begin_close()
        try:
            await self._wait_for_end()
        except asyncio.CancelledError:
            self.drop()
            raise
        self._warn_unless_ended()

    async def leave(self) -> None:
        """End the call, not the subscription, once the server has received the acks."""
        try:
            if self._begin_leave():
                await self._wait_for_end()
        finally:
            self.drop()

    def abandon(self) -> None:
        """End the call because the program dropped the `Subscription`, unless `close` runs."""
        if not self._closing:
            self.drop()

    async def _wait_for_end(self) -> None:
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT)

    async def _wait(self, timeout: float | None) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()
