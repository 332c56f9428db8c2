"""Common bases of both clients: `BaseWorker`, the life cycle of a stream, and `StreamBase`.

A worker runs the calls of one stream, one after the other. The subclasses run the calls and
wait; no method here waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar

from google.protobuf.message import Message

from rheostat._connection.channel import ConnectionBase
from rheostat._errors import Aborted, Refused, RheostatError
from rheostat._event_streams.reconnect import LOG, ReconnectPolicy
from rheostat._event_streams.state import CLOSE_TIMEOUT, E, EventStreamState, M

T = TypeVar("T")


class RunningCall(Protocol):
    """The methods of `BidiResponses` that both clients have."""

    def send(self, request: Message | None) -> None: ...
    def cancel(self) -> None: ...


class StreamBase(Generic[M, E]):
    """The public methods of subscriptions and watches that are equal in both clients."""

    _state: EventStreamState[M, E]
    _worker: BaseWorker[M, E]

    def __repr__(self) -> str:
        of = repr(self._state.id) if self._state.id else "not open"
        return f"{self._state.kind.capitalize()}({of})"

    @property
    def id(self) -> str:
        """The id of the stream. Raises Refused before it is open."""
        if not self._state.id:
            raise Refused(f"the {self._state.kind} is not open yet: enter it with async with")
        return self._state.id

    @property
    def missed(self) -> dict[str, str]:
        """Why selected requests that already ran are not captured or read, by request id.

        At most 1024 requests.
        """
        return dict(self._state.missed)

    def finish(self) -> None:
        """Take no further rows or readings; iterating ends after the events that remain.

        These are the buffered events, and the last event of each running request, which sums up
        its rows or readings so far.
        """
        self._worker.finish()


class BaseWorker(ABC, Generic[M, E]):
    """The life cycle of one stream. `_lock` is held around every change of its state."""

    _state: EventStreamState[M, E]
    _lock: AbstractContextManager[object]
    """Reentrant. A null context in the asyncio client, whose steps run on one event loop."""

    def __init__(self, connection: ConnectionBase, state: EventStreamState[M, E]) -> None:
        self._target = connection.target
        self._state = state
        self._reconnects = ReconnectPolicy(state, connection.target)
        self._responses: RunningCall | None = None
        self._finishing = False
        """The server is asked to end the stream, now or when the next call begins."""
        self._leaving = False
        """The server is asked to end the call and to keep the stream."""
        self._closing = False
        """As `_finishing`, and the server drops the events that it has not sent."""
        self._stopped = False
        """The reader gets no further events."""
        self._closer: object = None
        """The thread or task that closed the stream before its end."""
        self._end_read = False
        """The reader has got the last event."""
        self._ended = False
        """No further events arrive."""
        self._failure: RheostatError | None = None

    @abstractmethod
    def _notify(self) -> None:
        """Wakes all threads or tasks that wait for a change."""

    @abstractmethod
    def _caller(self) -> object:
        """The current thread or task; None outside of tasks."""

    def _begin_call(self, responses: RunningCall) -> None:
        self._responses = responses
        responses.send(self._state.opening_request())
        self._send_due()
        if self._closing:
            self._send_end()
        elif self._finishing:
            responses.send(None)

    def _send_end(self) -> None:
        for request in (*self._state.leave_requests(end=True), None):
            self._send(request)

    def _receive(self, message: M) -> None:
        with self._lock:
            if not message.HasField("opened"):
                self._reconnects.on_message()
            self._state.add(message)
            self._send_due()
            self._notify()

    def _take(self) -> E | None:
        """The next event; None if it has not arrived, or if `_exhausted`."""
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
        return self._stopped or self._end_read

    def acknowledge(self) -> None:
        """Acknowledges all events that the program read."""
        with self._lock:
            self.check_open()
            self._state.mark_processed()
            self._state.flush()
            self._send_due()

    def act(self, change: Callable[[], T]) -> T:
        """Runs ``change``, which changes the state, and sends the requests that are then due.

        Raises Refused if nothing can be sent.
        """
        with self._lock:
            if self._finishing or self._leaving or self._ended or self._stopped:
                raise self._state.closed_error() from self._failure
            result = change()
            self._send_due()
            return result

    def check_open(self) -> None:
        """Raises Refused in the thread or task that closed the stream before its end."""
        caller = self._caller()
        if caller is not None and self._closer == caller:
            raise self._state.closed_error() from self._failure

    def finish(self) -> None:
        """Asks the server to end the stream once it has sent its events."""
        with self._lock:
            if not (self._finishing or self._ended):
                self._send_due()
                self._finishing = True
                self._send(None)

    def drop(self) -> None:
        """Ends the call without waiting for the server."""
        with self._lock:
            self._stop_delivery()
        self._end(None)

    def _begin_close(self) -> None:
        """Asks the server to end the stream; without a connection, the next call asks."""
        self._stop_delivery()
        self._state.discard()
        if not (self._closing or self._ended):
            self._closing = True
            if not self._finishing:  # otherwise the request stream of this call has ended
                self._finishing = True
                self._send_end()
        self._notify()

    def _warn_unless_ended(self) -> None:
        """Logs a warning if the server has not confirmed that a closed stream ended."""
        if not self._ended:
            LOG.warning(
                "%s %s is closed, but %s has not confirmed it within %g s; trying again in the "
                "background for %g s, after which the server drops it",
                self._state.kind,
                self._state.id,
                self._target,
                CLOSE_TIMEOUT,
                self._state.reconnect_timeout,
            )

    def _begin_leave(self) -> bool:
        """Asks the server to end the call. Returns False if there is no call to end."""
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
            if not self._ended:
                self._state.end()
            self._ended = True
            self._failure = self._failure or failure
            # Another call has resumed the stream, and gets these events.
            if isinstance(failure, Aborted):
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
