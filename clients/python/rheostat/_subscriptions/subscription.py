"""A subscription of the synchronous client.

Each subscription has a thread that runs its call. So events arrive, and a broken connection is
replaced, while the reader is busy. The thread has no reference to the `Subscription`: if the
program drops it, the call ends, and the server keeps the subscription for its resume window.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Self

from rheostat._connection.connection import Connection
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
    """Captured rows of other requests: an iterator of events.

        with engine.subscribe(capture=rheostat.Capture("resid_post"), every=True) as subscription:
            for event in subscription:
                if isinstance(event, rheostat.CapturedRows):
                    print(event.request_id, event.sites, event.positions, event.values.shape)

    Iterating waits for events until the subscription is closed. One thread iterates; others may
    close it. If the connection breaks, the client reconnects, and every event arrives exactly once.

    Iterating raises `DataLoss` if rows are missing or damaged, `Unavailable` if reconnecting fails
    for a minute, `NotFound` if the server has ended the subscription, `ResourceExhausted` if this
    client was too slow, and `Aborted` if another call continues the subscription. Closing ends the
    loop. If the thread that closed it early begins another loop, it gets `Refused`.
    """

    def __init__(self, connection: Connection, state: SubscriptionState) -> None:
        """Returns once the subscription is open."""
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
        self._worker.check_open()
        return self

    def __next__(self) -> SubscriptionEvent:
        return self._worker.next_event()

    def finish(self) -> None:
        """Capture no further rows; buffered events still arrive, then iterating ends.

        Running requests get their `EndOfRequest` with the rows that they have.
        """
        self._worker.finish()

    def close(self) -> None:
        """End the subscription and drop events that were not read. Wakes the thread that iterates.

        Returns when the server has ended it. After 5 seconds it logs a warning and continues in the
        background; the server drops the subscription after its resume window at the latest. Does
        nothing if the subscription has ended already.
        """
        self._worker.close()

    def leave(self) -> None:
        """Stop reading, so that `Engine.resume` can continue within the server's resume window.

        Returns when the server has every acknowledgement, or after 5 seconds. With ``ack="auto"``
        all events are acknowledged except the last that was read.
        """
        self._worker.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class SubscriptionWorker(BaseWorker):
    """Runs the calls of one subscription in a thread. Other threads share it."""

    def __init__(self, connection: Connection, state: SubscriptionState) -> None:
        super().__init__(connection, state)
        self._connection = connection
        self._lock = self._changed = threading.Condition()
        self._abandoned = False
        """Whether the program has dropped the `Subscription`."""

    @property
    def _left_alone(self) -> bool:
        """Whether the program has dropped the `Subscription` without closing it."""
        return self._abandoned and not self._closing

    def _notify(self) -> None:
        self._changed.notify_all()

    def _caller(self) -> int:
        return threading.get_ident()

    def run(self) -> None:
        """Runs calls until the subscription has ended."""
        failure: RheostatError | None = ended_early_error()
        try:
            while not (self._ended or self._leaving or self._left_alone):
                try:
                    self._call()
                except RheostatError as error:
                    if self._connection.closed or not self._state.id:
                        raise
                    if self._leaving:  # another client may read the subscription now
                        break
                    pause = self._reconnects.pause(error)
                    with self._changed:
                        self._changed.wait_for(lambda: self._ended or self._leaving, pause)
            failure = None
        except RheostatError as error:
            failure = error
        finally:
            self._end(failure)

    def _call(self) -> None:
        with self._changed:
            if self._ended:
                return
            responses = self._connection.bidi(SUBSCRIBE, None)
            self._begin_call(responses)
        try:
            for message in responses:
                self._receive(message)
                if self._left_alone:
                    return
        finally:
            responses.cancel()
            responses.send(None)
        if not (self._finishing or self._leaving):
            raise ended_early_error()
        self._end(None)

    def wait_until_open(self) -> None:
        """Raises the error of the call, or DeadlineExceeded."""
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

    def _wait(self, condition: Callable[[], bool], timeout: float | None) -> None:
        try:
            self._changed.wait_for(condition, timeout)
        except KeyboardInterrupt:
            self.drop()
            raise

    def next_event(self) -> SubscriptionEvent:
        """The next event; waits for it."""
        with self._changed:
            while (event := self._take()) is None:
                if self._exhausted:
                    raise StopIteration
                self._changed.wait(self._state.seconds_to_ack())
            return event

    def close(self) -> None:
        """End the subscription, and wait until the server has ended it."""
        with self._changed:
            self._begin_close()
            self._changed.wait_for(lambda: self._ended, CLOSE_TIMEOUT)
            self._warn_unless_ended()

    def abandon(self) -> None:
        """End the call at its next message, a heartbeat at the latest.

        The garbage collector may call this in a thread that holds any lock, so it takes no lock.
        """
        self._abandoned = True

    def leave(self) -> None:
        """End the call, not the subscription, once the server has received the acks."""
        with self._changed:
            if self._begin_leave():
                self._changed.wait_for(lambda: self._ended, CLOSE_TIMEOUT)
        self.drop()
