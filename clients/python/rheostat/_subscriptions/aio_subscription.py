"""A subscription of the asyncio client: as `_subscription`, with a task instead of a thread."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from types import TracebackType
from typing import Self, TypeAlias

import grpc
import grpc.aio

from rheostat import _errors
from rheostat._connection.aio_connection import (
    Connection,
    Responses,
    cancelled_here,
    task_is_cancelled,
    until_none,
)
from rheostat._subscriptions.events import SubscriptionEvent
from rheostat._subscriptions.reconnect import ReconnectPolicy
from rheostat._subscriptions.requests import SUBSCRIBE
from rheostat._subscriptions.state import (
    CLOSE_TIMEOUT,
    SubscriptionInfo,
    SubscriptionState,
    closed_error,
    ended_early_error,
    not_opened_error,
)
from rheostat_wire.v1 import capture_service_pb2

_Outgoing: TypeAlias = "asyncio.Queue[capture_service_pb2.SubscribeRequest | None]"


class Subscription(SubscriptionInfo):
    """Captured rows of other requests, as `rheostat.Subscription`.

        async with engine.subscribe(capture=Capture("resid_post"), every=True) as subscription:
            async for event in subscription:
                ...

    It is open once it has been entered, or when the first event has come. One task iterates. A task
    that is cancelled while it waits for an event loses none. Closing ends the loop. If the task
    that closed it early begins another loop, it gets `Refused`.
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
        """The events that have not been read yet."""
        self._worker.check_open()
        return self

    async def __anext__(self) -> SubscriptionEvent:
        """The next event; waits for it."""
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
        """Itself, once it is open."""
        await self._worker.wait_until_open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close, as `rheostat.Subscription` does, also if the task is cancelled."""
        await self.close()


def _abandon(loop: asyncio.AbstractEventLoop, worker: SubscriptionWorker) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has been closed, and its calls with it
        loop.call_soon_threadsafe(worker.drop)


def _task() -> asyncio.Task[object] | None:
    """The task that asks; None outside of tasks."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


class SubscriptionWorker:
    """The calls of one subscription, one after the other."""

    def __init__(self, connection: Connection, state: SubscriptionState) -> None:
        self._connection = connection
        self._state = state
        self._changed = asyncio.Event()
        self._outgoing: _Outgoing = asyncio.Queue()
        self._responses: Responses[capture_service_pb2.SubscribeResponse] | None = None
        self._task: asyncio.Task[None] | None = None
        self._finishing = False
        """Whether the server is to end it."""
        self._leaving = False
        """Whether the server is to end the call alone."""
        self._stopped = False
        """Whether nothing more is handed over."""
        self._closer: weakref.ref[asyncio.Task[object]] | None = None
        """The task that closed it before its end."""
        self._read = False
        """Whether the reader has seen the end."""
        self._ended = False
        """Whether nothing more comes."""
        self._failure: _errors.RheostatError | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call from now on."""
        self._task = loop.create_task(self._run(), name="rheostat-subscription")

    async def _run(self) -> None:
        """Call until it is over."""
        reconnects = ReconnectPolicy(self._state, self._connection.target)
        failure: _errors.RheostatError | None = ended_early_error()
        try:
            while not (self._ended or self._leaving):
                try:
                    await self._call(reconnects)
                except _errors.RheostatError as error:
                    if self._connection.closed or not self._state.id:
                        raise
                    if self._leaving:  # another call may have the subscription by now
                        break
                    await self._wait(reconnects.pause(error))
            failure = None
        except _errors.RheostatError as error:
            failure = error
        except asyncio.CancelledError:
            failure = cancelled_here()
            raise
        finally:
            self._end(failure)

    async def _call(self, reconnects: ReconnectPolicy) -> None:
        outgoing: _Outgoing = asyncio.Queue()
        self._outgoing = outgoing
        outgoing.put_nowait(self._state.opening_request())
        if self._finishing:
            outgoing.put_nowait(None)
        responses = self._connection.bidi(SUBSCRIBE, until_none(outgoing), None)
        self._responses = responses
        try:
            async for message in responses:
                if not message.HasField("opened"):
                    reconnects.on_message()
                self._state.add(message)
                self._send_due()
                self._changed.set()
        except grpc.RpcError as error:
            begun = bool(self._state.id)
            raise _errors.from_rpc(error, self._connection.target, None, begun=begun) from None
        except asyncio.CancelledError:
            if task_is_cancelled():
                raise
            raise cancelled_here() from None
        finally:
            responses.cancel()
            outgoing.put_nowait(None)
        if not (self._finishing or self._leaving):
            raise ended_early_error()
        self._end(None)

    async def wait_until_open(self) -> None:
        """Raises what came instead, or DeadlineExceeded."""
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
        """Hand over the next event; waits for it."""
        while not self._stopped:
            await self._check_payloads()
            try:
                event = self._state.pop()
            except _errors.RheostatError as error:
                self._failure = error
                self._state.discard()
                raise
            self._send_due()
            if event is not None:
                return event
            if self._failure is not None:
                raise self._failure
            if self._ended:
                self._read = True
                break
            await self._wait(self._state.seconds_to_ack())
        raise StopAsyncIteration

    async def _check_payloads(self) -> None:
        """Ends it where payloads come in another way than they must."""
        refusal = self._state.payloads.refusal if self._state.id else None
        if refusal is not None:
            await self.close()
            raise refusal

    def acknowledge(self) -> None:
        """All that was handed over has been dealt with."""
        self.check_open()
        self._state.mark_processed()
        self._state.flush()
        self._send_due()

    def check_open(self) -> None:
        """Raise Refused in the task that closed it before its end."""
        task = _task()
        if task is not None and self._closer is not None and self._closer() is task:
            raise closed_error() from self._failure

    def _stop_delivery(self) -> None:
        if not (self._stopped or self._read):
            task = _task()
            self._closer = None if task is None else weakref.ref(task)
        self._stopped = True

    def finish(self) -> None:
        """Half-close."""
        if not (self._finishing or self._ended):
            self._send_due()
            self._finishing = True
            self._outgoing.put_nowait(None)

    async def close(self) -> None:
        """Half-close, and wait until the server has ended it."""
        self._stop_delivery()
        self._state.discard()
        self.finish()
        self._changed.set()
        try:
            if self._task is not None:
                await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT)
        finally:
            self.drop()

    async def leave(self) -> None:
        """End the call alone, once the server has taken the acknowledgements."""
        self._stop_delivery()
        try:
            if self._state.id and not (self._ended or self._finishing or self._leaving):
                self._leaving = True
                for message in (*self._state.leave_requests(), None):
                    self._outgoing.put_nowait(message)
                self._state.discard()
                self._changed.set()
                if self._task is not None:
                    await asyncio.wait({self._task}, timeout=CLOSE_TIMEOUT)
        finally:
            self.drop()

    def drop(self) -> None:
        """End the call at once."""
        self._stop_delivery()
        self._end(None)

    def _end(self, failure: _errors.RheostatError | None) -> None:
        self._ended = True
        self._failure = self._failure or failure
        if isinstance(failure, _errors.Aborted):  # what waits here goes to the other call
            self._state.discard()
        if self._responses is not None:
            self._responses.cancel()
        self._outgoing.put_nowait(None)
        self._changed.set()

    async def _wait(self, timeout: float | None) -> None:
        """Until something has changed."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._changed.wait()

    def _send_due(self) -> None:
        for message in self._state.due_requests():
            if not (self._finishing or self._leaving or self._ended):
                self._outgoing.put_nowait(message)
