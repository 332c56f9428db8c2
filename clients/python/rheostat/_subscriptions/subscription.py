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
from rheostat._subscriptions.reconnect import Breaks
from rheostat._subscriptions.requests import SUBSCRIBE
from rheostat._subscriptions.state import (
    GOODBYE,
    Intake,
    Standing,
    closed_error,
    ended_early_error,
    not_opened_error,
)
from rheostat_wire.v1 import capture_service_pb2

_Outgoing: TypeAlias = "SimpleQueue[capture_service_pb2.SubscribeRequest | None]"


class Subscription(Standing):
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

    def __init__(self, connection: Connection, intake: Intake) -> None:
        """Made by `Engine`; returns once the subscription is open."""
        self._line = line = _Line(connection, intake)
        super().__init__(intake)
        weakref.finalize(self, line.abandon)
        threading.Thread(target=line.run, name="rheostat-subscription", daemon=True).start()
        line.wait_until_open()

    def ack(self) -> None:
        """Acknowledge all events that were read; the server then discards them.

        Raises Refused in the thread that closed the subscription early.
        """
        self._line.acknowledge()

    def __iter__(self) -> Self:
        """The events that have not been read yet."""
        self._line.check_open()
        return self

    def __next__(self) -> SubscriptionEvent:
        """The next event; waits for it."""
        return self._line.next_event()

    def finish(self) -> None:
        """Take no further requests: buffered events still come, then iterating ends.

        Requests that still run end here with the rows that they had.
        """
        self._line.finish()

    def close(self) -> None:
        """End the subscription and drop events that were not read. Wakes the thread that iterates.

        Does nothing if it has ended already.
        """
        self._line.close()

    def leave(self) -> None:
        """Stop reading, so that `Engine.resume` can continue within the server's resume window.

        Returns when the server has every acknowledgement, or after 5 seconds. With ``ack="auto"``
        all events are acknowledged but the last one read.
        """
        self._line.leave()

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


class _Line:
    """The calls of one subscription, one after the other. Threads share it."""

    def __init__(self, connection: Connection, intake: Intake) -> None:
        self._connection = connection
        self._intake = intake
        self._changed = threading.Condition()
        self._outgoing: _Outgoing = SimpleQueue()
        self._responses: Responses[capture_service_pb2.SubscribeResponse] | None = None
        self._finishing = False
        """Whether the server is to end it."""
        self._leaving = False
        """Whether the server is to end the call alone."""
        self._unread = False
        """Whether nothing more is handed over."""
        self._closer: int | None = None
        """The thread that closed it before its end."""
        self._read = False
        """Whether the reader has seen the end."""
        self._over = False
        """Whether nothing more comes."""
        self._abandoned = False
        """Whether nobody can read it any more."""
        self._failure: _errors.RheostatError | None = None

    def run(self) -> None:
        """Call until it is over. The thread's own."""
        breaks = Breaks(self._intake, self._connection.target)
        failure: _errors.RheostatError | None = ended_early_error()
        try:
            while not (self._over or self._leaving or self._abandoned):
                try:
                    self._call(breaks)
                except _errors.RheostatError as error:
                    if self._connection.closed or not self._intake.id:
                        raise
                    if self._leaving:  # another call may have the subscription by now
                        break
                    pause = breaks.pause(error)
                    with self._changed:
                        self._changed.wait_for(lambda: self._over or self._leaving, pause)
            failure = None
        except _errors.RheostatError as error:
            failure = error
        finally:
            self._end(failure)

    def _call(self, breaks: Breaks) -> None:
        outgoing: _Outgoing = SimpleQueue()
        with self._changed:
            if self._over:
                return
            outgoing.put(self._intake.hello())
            if self._finishing:
                outgoing.put(None)
            responses = self._connection.dialogue(SUBSCRIBE, iter(outgoing.get, None), None)
            self._outgoing, self._responses = outgoing, responses
        try:
            for message in responses:
                with self._changed:
                    if not message.HasField("opened"):
                        breaks.mended()
                    self._intake.feed(message)
                    self._tell()
                    self._changed.notify_all()
                if self._abandoned:
                    return
        except grpc.RpcError as error:
            begun = bool(self._intake.id)
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
            self._wait(lambda: self._over or bool(self._intake.id), timeout)
            if self._intake.id:
                if (refusal := self._intake.payloads.refusal) is not None:
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
            while not self._unread:
                try:
                    event = self._intake.pop()
                except _errors.RheostatError as error:
                    self._failure = error
                    self._intake.discard()
                    raise
                self._tell()
                if event is not None:
                    return event
                if self._failure is not None:
                    raise self._failure
                if self._over:
                    self._read = True
                    break
                self._changed.wait(self._intake.ack_after())
            raise StopIteration

    def acknowledge(self) -> None:
        """All that was handed over has been dealt with."""
        with self._changed:
            self.check_open()
            self._intake.deal()
            self._intake.flush()
            self._tell()

    def check_open(self) -> None:
        """Raise Refused in the thread that closed it before its end."""
        if self._closer == threading.get_ident():
            raise closed_error() from self._failure

    def _hand_no_more_over(self) -> None:
        if not (self._unread or self._read):
            self._closer = threading.get_ident()
        self._unread = True

    def finish(self) -> None:
        """Half-close."""
        with self._changed:
            if not (self._finishing or self._over):
                self._tell()
                self._finishing = True
                self._outgoing.put(None)

    def close(self) -> None:
        """Half-close, and wait until the server has ended it."""
        with self._changed:
            self._hand_no_more_over()
            self._intake.discard()
            self.finish()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._over, GOODBYE)
        self.drop()

    def abandon(self) -> None:
        """Leave it with the next message, a heartbeat at the latest.

        A garbage collector may call this in any thread, whatever that holds: it takes no lock.
        """
        self._abandoned = True

    def leave(self) -> None:
        """End the call alone, once the server has taken the acknowledgements."""
        with self._changed:
            self._hand_no_more_over()
            if self._intake.id and not (self._over or self._finishing or self._leaving):
                self._leaving = True
                for message in (*self._intake.parting(), None):
                    self._outgoing.put(message)
                self._intake.discard()
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._over, GOODBYE)
        self.drop()

    def drop(self) -> None:
        """End the call at once."""
        with self._changed:
            self._hand_no_more_over()
        self._end(None)

    def _end(self, failure: _errors.RheostatError | None) -> None:
        with self._changed:
            self._over = True
            self._failure = self._failure or failure
            if isinstance(failure, _errors.Aborted):  # what waits here goes to the other call
                self._intake.discard()
            if self._responses is not None:
                self._responses.cancel()
            self._outgoing.put(None)
            self._changed.notify_all()

    def _tell(self) -> None:
        for message in self._intake.due():
            if not (self._finishing or self._leaving or self._over):
                self._outgoing.put(message)
