"""A subscription of the synchronous client.

A thread of its own keeps the call: it takes what comes, up to the credit, and calls again when the
connection breaks, also while the reader is busy. The thread never holds the `Subscription`, so one
that is forgotten ends, and the server keeps it for its resume window.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Self, TypeAlias

import grpc

from rheostat import _errors, _subscribing
from rheostat._calls import SUBSCRIBE
from rheostat._connection import Connection, Responses
from rheostat._proto.v1 import capture_service_pb2
from rheostat._subscribed import SubscriptionEvent
from rheostat._subscribing import GOODBYE, Breaks, Intake, Standing

_Outgoing: TypeAlias = "SimpleQueue[capture_service_pb2.SubscribeRequest | None]"


class Subscription(Standing):
    """Rows of requests that others, or other calls, run: an iterator of events.

        with engine.subscribe(capture=rheostat.Capture("resid_post"), every=True) as subscription:
            for event in subscription:
                if isinstance(event, rheostat.CapturedRows):
                    print(event.request_id, event.sites, event.positions, event.values.shape)

    It waits for events until it is closed. One thread iterates; others may close it. A connection
    that breaks is taken up again, and every event comes once. Iterating raises `DataLoss` where
    rows are missing or damaged, `Unavailable` where no connection comes about for a minute,
    `NotFound` where the server has given the subscription up, `ResourceExhausted` where this client
    was too slow for it, and `Aborted` where another call took it up. Closing ends the loop; the
    thread that closed it before its end and begins another gets `Refused`.
    """

    def __init__(self, connection: Connection, intake: Intake) -> None:
        """Made by `Engine`; returns once the subscription stands."""
        self._line = line = _Line(connection, intake)
        super().__init__(intake)
        weakref.finalize(self, line.abandon)
        threading.Thread(target=line.run, name="rheostat-subscription", daemon=True).start()
        line.wait_until_open()

    def ack(self) -> None:
        """Every event that came has been dealt with, and the server may forget it.

        Raises Refused in the thread that closed it before its end: the server is not told.
        """
        self._line.acknowledge()

    def __iter__(self) -> Self:
        """The events that have not come yet."""
        self._line.check_open()
        return self

    def __next__(self) -> SubscriptionEvent:
        """The next event; waits for it."""
        return self._line.next_event()

    def finish(self) -> None:
        """Want nothing more: what the server has comes still, then iterating ends.

        Requests that still run end here with the rows that they had.
        """
        self._line.finish()

    def close(self) -> None:
        """End it at the server, and drop what has not been taken. Wakes the thread that iterates.

        Nothing happens where it has ended.
        """
        self._line.close()

    def leave(self) -> None:
        """Stop reading, and leave it to the server's resume window: see `Engine.resume`.

        Returns once the server has every acknowledgement, or after 5 seconds. With ``ack="auto"``
        that includes all events but the one in hand.
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
        """Close, also after an error. What has been left, or lost its connection, stays so."""
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
        failure: _errors.RheostatError | None = _subscribing.ended_early()
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
            raise _subscribing.ended_early()
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
            raise _subscribing.not_opened(timeout)

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
            raise _subscribing.closed() from self._failure

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
