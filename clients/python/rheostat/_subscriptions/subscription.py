"""A subscription of the synchronous client.

Each subscription has a thread that runs its call, so events arrive up to the credit, and a broken
connection is made again, also while the reader is busy. The thread holds no reference to the
`Subscription`: if the program drops it, the call ends, and the server keeps the subscription for
its resume window.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Self, TypeAlias

import grpc

from rheostat import _errors
from rheostat._connection.connection import Connection, Responses
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

_Outgoing: TypeAlias = "SimpleQueue[capture_service_pb2.SubscribeRequest | None]"


class Subscription(SubscriptionInfo):
    """Captured rows of other requests: an iterator of events.

        with engine.subscribe(capture=rheostat.Capture("resid_post"), every=True) as subscription:
            for event in subscription:
                if isinstance(event, rheostat.CapturedRows):
                    print(event.request_id, event.sites, event.positions, event.values.shape)

    Iterating waits for events until the subscription is closed. One thread iterates; others may
    close it. If the connection breaks, the client reconnects, and every event comes exactly once.

    Iterating raises `DataLoss` if rows are missing or damaged, `Unavailable` if no connection comes
    about for a minute, `NotFound` if the server has ended the subscription, `ResourceExhausted` if
    this client was too slow, and `Aborted` if another call continues the subscription. Closing ends
    the loop. If the thread that closed it early begins another loop, it gets `Refused`.
    """

    def __init__(self, connection: Connection, state: SubscriptionState) -> None:
        """Made by `Engine`; returns once the subscription is open."""
        self._worker = worker = SubscriptionWorker(connection, state)
        super().__init__(state)
        weakref.finalize(self, worker.abandon)
        threading.Thread(target=worker.run, name="rheostat-subscription", daemon=True).start()
        worker.wait_until_open()

    def ack(self) -> None:
        """Acknowledge all events that were read; the server then discards them.

        Raises Refused in the thread that closed the subscription early.
        """
        self._worker.acknowledge()

    def __iter__(self) -> Self:
        """The events that have not been read yet."""
        self._worker.check_open()
        return self

    def __next__(self) -> SubscriptionEvent:
        """The next event; waits for it."""
        return self._worker.next_event()

    def finish(self) -> None:
        """Take no further requests: buffered events still come, then iterating ends.

        Requests that still run end here with the rows that they had.
        """
        self._worker.finish()

    def close(self) -> None:
        """End the subscription and drop events that were not read. Wakes the thread that iterates.

        Does nothing if it has ended already.
        """
        self._worker.close()

    def leave(self) -> None:
        """Stop reading, so that `Engine.resume` can continue within the server's resume window.

        Returns when the server has every acknowledgement, or after 5 seconds. With ``ack="auto"``
        all events are acknowledged but the last one read.
        """
        self._worker.leave()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close, also after an error. A subscription that was left or lost can still be resumed."""
        self.close()


class SubscriptionWorker:
    """The calls of one subscription, one after the other. Threads share it."""

    def __init__(self, connection: Connection, state: SubscriptionState) -> None:
        self._connection = connection
        self._state = state
        self._changed = threading.Condition()
        self._outgoing: _Outgoing = SimpleQueue()
        self._responses: Responses[capture_service_pb2.SubscribeResponse] | None = None
        self._finishing = False
        """Whether the server is to end it."""
        self._leaving = False
        """Whether the server is to end the call alone."""
        self._stopped = False
        """Whether nothing more is handed over."""
        self._closer: int | None = None
        """The thread that closed it before its end."""
        self._read = False
        """Whether the reader has seen the end."""
        self._ended = False
        """Whether nothing more comes."""
        self._abandoned = False
        """Whether nobody can read it any more."""
        self._failure: _errors.RheostatError | None = None

    def run(self) -> None:
        """Call until it is over. The thread's own."""
        reconnects = ReconnectPolicy(self._state, self._connection.target)
        failure: _errors.RheostatError | None = ended_early_error()
        try:
            while not (self._ended or self._leaving or self._abandoned):
                try:
                    self._call(reconnects)
                except _errors.RheostatError as error:
                    if self._connection.closed or not self._state.id:
                        raise
                    if self._leaving:  # another call may have the subscription by now
                        break
                    pause = reconnects.pause(error)
                    with self._changed:
                        self._changed.wait_for(lambda: self._ended or self._leaving, pause)
            failure = None
        except _errors.RheostatError as error:
            failure = error
        finally:
            self._end(failure)

    def _call(self, reconnects: ReconnectPolicy) -> None:
        outgoing: _Outgoing = SimpleQueue()
        with self._changed:
            if self._ended:
                return
            outgoing.put(self._state.opening_request())
            if self._finishing:
                outgoing.put(None)
            responses = self._connection.bidi(SUBSCRIBE, iter(outgoing.get, None), None)
            self._outgoing, self._responses = outgoing, responses
        try:
            for message in responses:
                with self._changed:
                    if not message.HasField("opened"):
                        reconnects.on_message()
                    self._state.add(message)
                    self._send_due()
                    self._changed.notify_all()
                if self._abandoned:
                    return
        except grpc.RpcError as error:
            begun = bool(self._state.id)
            raise _errors.from_rpc(error, self._connection.target, None, begun=begun) from None
        finally:
            responses.cancel()
            outgoing.put(None)
        if not (self._finishing or self._leaving):
            raise ended_early_error()
        self._end(None)

    def wait_until_open(self) -> None:
        """Raises what came instead, or DeadlineExceeded."""
        timeout = self._connection.timeout
        with self._changed:
            self._wait(lambda: self._ended or bool(self._state.id), timeout)
            if self._state.id:
                if (refusal := self._state.payloads.refusal) is not None:
                    self.close()
                    raise refusal
                return
            if self._failure is not None:
                raise self._failure
            self.drop()
            raise not_opened_error(timeout)

    def _wait(self, moment: Callable[[], bool], timeout: float | None) -> None:
        try:
            self._changed.wait_for(moment, timeout)
        except KeyboardInterrupt:
            self.drop()
            raise

    def next_event(self) -> SubscriptionEvent:
        """Hand over the next event; waits for it."""
        with self._changed:
            while not self._stopped:
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
                self._changed.wait(self._state.seconds_to_ack())
            raise StopIteration

    def acknowledge(self) -> None:
        """All that was handed over has been dealt with."""
        with self._changed:
            self.check_open()
            self._state.mark_processed()
            self._state.flush()
            self._send_due()

    def check_open(self) -> None:
        """Raise Refused in the thread that closed it before its end."""
        if self._closer == threading.get_ident():
            raise closed_error() from self._failure

    def _stop_delivery(self) -> None:
        if not (self._stopped or self._read):
            self._closer = threading.get_ident()
        self._stopped = True

    def finish(self) -> None:
        """Half-close."""
        with self._changed:
            if not (self._finishing or self._ended):
                self._send_due()
                self._finishing = True
                self._outgoing.put(None)

    def close(self) -> None:
        """Half-close, and wait until the server has ended it."""
        with self._changed:
            self._stop_delivery()
            self._state.discard()
            self.finish()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended, CLOSE_TIMEOUT)
        self.drop()

    def abandon(self) -> None:
        """Leave it with the next message, a heartbeat at the latest.

        A garbage collector may call this in any thread, whatever that holds: it takes no lock.
        """
        self._abandoned = True

    def leave(self) -> None:
        """End the call alone, once the server has taken the acknowledgements."""
        with self._changed:
            self._stop_delivery()
            if self._state.id and not (self._ended or self._finishing or self._leaving):
                self._leaving = True
                for message in (*self._state.leave_requests(), None):
                    self._outgoing.put(message)
                self._state.discard()
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._ended, CLOSE_TIMEOUT)
        self.drop()

    def drop(self) -> None:
        """End the call at once."""
        with self._changed:
            self._stop_delivery()
        self._end(None)

    def _end(self, failure: _errors.RheostatError | None) -> None:
        with self._changed:
            self._ended = True
            self._failure = self._failure or failure
            if isinstance(failure, _errors.Aborted):  # what waits here goes to the other call
                self._state.discard()
            if self._responses is not None:
                self._responses.cancel()
            self._outgoing.put(None)
            self._changed.notify_all()

    def _send_due(self) -> None:
        for message in self._state.due_requests():
            if not (self._finishing or self._leaving or self._ended):
                self._outgoing.put(message)
