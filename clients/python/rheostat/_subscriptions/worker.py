"""What the workers of both clients share: where a subscription is in its life, and each step of it.

A worker carries the calls of one subscription, one after the other. The subclasses run the calls
and wait; nothing here waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Protocol

from google.protobuf.message import Message

from rheostat._connection.channel import ConnectionBase
from rheostat._errors import Aborted, RheostatError
from rheostat._subscriptions.events import SubscriptionEvent
from rheostat._subscriptions.reconnect import LOG, ReconnectPolicy
from rheostat._subscriptions.state import CLOSE_TIMEOUT, SubscriptionState, closed_error
from rheostat_wire.v1 import capture_service_pb2


class RunningCall(Protocol):
    """The call that a worker runs now."""

    def send(self, request: Message | None) -> None:
        """Send a request; None: no further one follows."""

    def cancel(self) -> None:
        """End the call."""


class BaseWorker(ABC):
    """The life of one subscription. `_lock` is held around every change of it."""

    _lock: AbstractContextManager[object]
    """Reentrant. It does nothing in the asyncio client, whose steps run on one event loop."""

    def __init__(self, connection: ConnectionBase, state: SubscriptionState) -> None:
        self._target = connection.target
        self._state = state
        self._reconnects = ReconnectPolicy(state, connection.target)
        self._responses: RunningCall | None = None
        self._finishing = False
        """Whether the server was asked to end the subscription, or will be when a call begins."""
        self._leaving = False
        """Whether the server was asked to end the call, and to keep the subscription."""
        self._closing = False
        """Whether the server was asked to drop what it has not sent, or will be."""
        self._stopped = False
        """Whether the reader gets no further event."""
        self._closer: object = None
        """The thread or task that closed it before its end."""
        self._end_read = False
        """Whether the reader got all events up to the end."""
        self._ended = False
        """Whether no further event arrives."""
        self._failure: RheostatError | None = None

    @abstractmethod
    def _notify(self) -> None:
        """Wake everything that waits for a change."""

    @abstractmethod
    def _caller(self) -> object:
        """The thread or task that runs now; None outside of tasks."""

    def _begin_call(self, responses: RunningCall) -> None:
        self._responses = responses
        responses.send(self._state.opening_request())
        if self._closing:
            self._send_end()
        elif self._finishing:
            responses.send(None)

    def _send_end(self) -> None:
        """Ask the server to end the subscription now."""
        for request in (*self._state.leave_requests(end=True), None):
            self._send(request)

    def _receive(self, message: capture_service_pb2.SubscribeResponse) -> None:
        with self._lock:
            if not message.HasField("opened"):
                self._reconnects.on_message()
            self._state.add(message)
            self._send_due()
            self._notify()

    def _take(self) -> SubscriptionEvent | None:
        """The next event. None: it has not arrived, or `_exhausted` is set."""
        if self._exhausted:
            return None
        try:
            event = self._state.pop()
        except RheostatError as error:
            self._failure = error
            self._state.discard()
            raise
        self._send_due()
        if event is None:
            if self._failure is not None:
                raise self._failure
            self._end_read = self._ended
        return event

    @property
    def _exhausted(self) -> bool:
        """Whether the reader gets no further event."""
        return self._stopped or self._end_read

    def acknowledge(self) -> None:
        """The program has processed all events that it read."""
        with self._lock:
            self.check_open()
            self._state.mark_processed()
            self._state.flush()
            self._send_due()

    def check_open(self) -> None:
        """Raise Refused in the thread or task that closed the subscription before its end."""
        caller = self._caller()
        if caller is not None and self._closer == caller:
            raise closed_error() from self._failure

    def finish(self) -> None:
        """Ask the server to end the subscription once it has sent its events."""
        with self._lock:
            if not (self._finishing or self._ended):
                self._send_due()
                self._finishing = True
                self._send(None)

    def drop(self) -> None:
        """End the call at once."""
        with self._lock:
            self._stop_delivery()
        self._end(None)

    def _begin_close(self) -> None:
        """Ask the server to end the subscription. Without a connection, the next call asks."""
        self._stop_delivery()
        self._state.discard()
        if not (self._closing or self._ended):
            self._closing = True
            if not self._finishing:  # otherwise this call takes no further request
                self._finishing = True
                self._send_end()
        self._notify()

    def _warn_unless_ended(self) -> None:
        """Tell the program if the server has not confirmed that a closed subscription ended."""
        if not self._ended:
            LOG.warning(
                "subscription %s is closed, but %s has not confirmed it within %g s; trying again "
                "in the background for %g s, after which the server drops it",
                self._state.id,
                self._target,
                CLOSE_TIMEOUT,
                self._state.reconnect_timeout,
            )

    def _begin_leave(self) -> bool:
        """Ask the server to end the call alone. False if there is no call to leave."""
        self._stop_delivery()
        if not self._state.id or self._ended or self._finishing or self._leaving:
            return False
        self._leaving = True
        for request in (*self._state.leave_requests(), None):
            self._send(request)
        self._state.discard()
        self._notify()
        return True

    def _stop_delivery(self) -> None:
        if not self._exhausted:
            self._closer = self._caller()
        self._stopped = True

    def _end(self, failure: RheostatError | None) -> None:
        with self._lock:
            self._ended = True
            self._failure = self._failure or failure
            if isinstance(failure, Aborted):  # the call that took over gets these events
                self._state.discard()
            if self._responses is not None:
                self._responses.cancel()
            self._send(None)
            self._notify()

    def _send_due(self) -> None:
        for request in self._state.due_requests():
            if not (self._finishing or self._leaving or self._ended):
                self._send(request)

    def _send(self, request: Message | None) -> None:
        if self._responses is not None:
            self._responses.send(request)
