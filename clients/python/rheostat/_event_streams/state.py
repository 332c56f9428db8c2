"""The state of a stream of events, shared by both clients; base of subscriptions and watches.

Invariants:

* The reader gets events in the order of their numbers, each once, even if the connection breaks.
* Queued bytes plus credit never exceed the window.
* An event is acknowledged only after the reader has processed it. After a broken connection the
  client therefore asks for all events after the last acknowledgement.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from typing import ClassVar, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from rheostat._connection.calls import BidiCall
from rheostat._connection.channel import MESSAGE_BYTES
from rheostat._errors import DataLoss, DeadlineExceeded, Refused, ServerError, invalid
from rheostat._fields import whole_number
from rheostat_wire.v1 import capture_service_pb2, monitor_service_pb2

Acknowledgement: TypeAlias = Literal["auto", "manual"]
"""When an event is acknowledged: when the next event is read, or when `ack` is called."""

DEFAULT_CREDIT = 64 * 1024 * 1024
"""Bytes that may wait in the client by default."""
RECONNECT_TIMEOUT = 60.0
"""Seconds for which the client tries to reconnect if the server sends no resume window."""
CLOSE_TIMEOUT = 5.0
"""Seconds to wait until the server has ended a closed stream, or a call after `leave`."""

_ACK_EVENTS = 64
_ACK_BYTES = 8 * 1024 * 1024
_ACK_SECONDS = 0.2
"""An acknowledgement is due after so many events, bytes of payload, or seconds."""

M = TypeVar("M", capture_service_pb2.SubscribeResponse, monitor_service_pb2.WatchResponse)
"""The messages of the server."""
E = TypeVar("E")
"""The events that the program reads."""

Request: TypeAlias = capture_service_pb2.SubscribeRequest | monitor_service_pb2.WatchRequest
"""A message of the client."""


class Heartbeat(NamedTuple):
    """The state of a stream at the server, sent after 5 seconds without another event."""

    buffered_bytes: int
    """Bytes that wait for credit or the network."""
    credit_bytes: int
    """Bytes that may be sent without further credit."""
    last_sequence: int
    """Number of the last event."""


class _Progress(NamedTuple):
    """A place in the sequence of events, with the totals of the events before it."""

    sequence: int
    bytes: int = 0
    """Bytes of payload."""
    ended: int = 0
    """Requests that ended."""


class EventStreamState(ABC, Generic[M, E]):
    """The events and acknowledgements of one stream. Only one thread uses it at a time."""

    kind: ClassVar[str]
    """The noun for the stream in errors and in the log."""
    when_lost: ClassVar[str] = ""
    """Advice if no server answers any more; it ends an error's text."""
    when_closed: ClassVar[str]
    """Advice if a closed stream is read."""
    requests: ClassVar[
        type[capture_service_pb2.SubscribeRequest] | type[monitor_service_pb2.WatchRequest]
    ]
    """The class of the client's messages."""

    def __init__(
        self,
        call: BidiCall[M],
        *,
        name: str,
        after: int,
        credit: int,
        ack: Acknowledgement,
        buffer: int | None,
    ) -> None:
        """Opens a stream, or resumes it.

        Args:
            call: the call that reads it.
            name: id of the stream to resume; empty: open a new one.
            after: number of the last event that was read.
            credit: bytes that may wait in the client.
            ack: when an event is acknowledged.
            buffer: bytes of the server's buffer; None: not known.
        """
        if ack not in ("auto", "manual"):
            raise invalid("ack", f'ack is "auto" or "manual", not {ack!r}')
        self.call: BidiCall[M] = call
        self.id = ""
        """Empty until the server has opened the stream."""
        self.missed: dict[str, str] = {}
        """Selected requests that the stream does not read, and the reasons."""
        self.last_heartbeat: Heartbeat | None = None
        self.reconnect_timeout = RECONNECT_TIMEOUT
        """Seconds for which the server keeps the stream after a connection broke."""
        self._name = name
        self._window = whole_number(credit, "credit", "the credit", least=1, most=2**62)
        self._automatic = ack == "auto"
        self._queue: deque[tuple[M, int]] = deque()
        """Events that the program has not read, and bytes of their payloads. The bytes are stored,
        because every access to a payload copies it."""
        self._queued_bytes = 0
        """Bytes of payload in `_queue`."""
        self._credit = 0
        """Bytes that the server may send."""
        self._received = after
        """Number of the last event that arrived."""
        self._delivered = _Progress(after)
        """Up to the last event that the program read."""
        self._processed = _Progress(after)
        """Up to the last event that the program processed."""
        self._acknowledged = _Progress(after)
        self._acknowledged_at = time.monotonic()
        self._flush = False
        """Whether the next `due_requests` sends even a small ack and credit."""
        self._discarding = False
        self._ack_bytes = min(_ACK_BYTES, (buffer or self._window) // 8, self._window // 8)
        """Bytes after which an acknowledgement is due; until then they fill the server's buffer."""

    @property
    def refusal(self) -> Refused | None:
        """Why this client cannot read it although the server has opened it; None: it can."""
        return None

    @abstractmethod
    def _opening(self) -> Request:
        """The message that opens the stream, or resumes it after `_processed`, without credit."""

    @abstractmethod
    def _opened(self, message: M) -> None:
        """Stores the fields of the server's first message of a call."""

    @abstractmethod
    def _payload(self, message: M) -> int:
        """Bytes of a message that count against credit."""

    @abstractmethod
    def _read(self, message: M) -> E | None:
        """The event of a message; None if this client does not know its kind."""

    @abstractmethod
    def _ends_request(self, message: M) -> bool:
        """Whether it is the last event of a request."""

    def opening_request(self) -> Request:
        """The first request of a new call."""
        self._credit = max(0, self._window - self._queued_bytes)
        self._acknowledged = self._processed
        request = self._opening()
        request.open.credit_bytes = self._credit
        request.open.batches = True  # the server may join events into one message
        return request

    def add(self, message: M) -> None:
        """Stores a message. Raises DataLoss if an event before it is missing."""
        match message.WhichOneof("event"):
            case "opened":
                opened = message.opened
                self.missed = {missed.request_id: missed.reason for missed in opened.missed}
                if opened.HasField("resume_window"):
                    self.reconnect_timeout = opened.resume_window.ToTimedelta().total_seconds()
                self._opened(message)
                self.id = self._name
            case "heartbeat":
                heartbeat = message.heartbeat
                self.last_heartbeat = Heartbeat(
                    heartbeat.buffered_bytes, heartbeat.credit_bytes, heartbeat.last_sequence
                )
                self._flush = True
                # The next chunk may be larger than the window; then it would never be sent.
                if not self._queued_bytes and heartbeat.buffered_bytes > heartbeat.credit_bytes:
                    self._window = max(self._window, min(2 * self._window, MESSAGE_BYTES))
            case "batch":
                for event in message.batch.events:
                    self.add(event)
            case _ if message.sequence:
                self._enqueue(message)

    def _enqueue(self, message: M) -> None:
        size = self._payload(message)
        self._credit -= size
        if message.sequence <= self._received or self._discarding:
            return
        if message.sequence > self._received + 1:
            raise DataLoss(
                f"event {message.sequence} came after event {self._received}: events are missing",
                reason="REASON_ROWS_LOST",
            )
        self._received = message.sequence
        self._append(message, size)

    def _append(self, message: M, size: int) -> None:
        self._queued_bytes += size
        self._queue.append((message, size))

    def end(self) -> None:
        """Called once no further message arrives."""

    def pop(self) -> E | None:
        """The next event; None if none has arrived. Raises the errors of damaged events."""
        if self._automatic:
            self.mark_processed()
        while self._queue:
            message, size = self._queue.popleft()
            self._queued_bytes -= size
            event = self._read(message)
            if message.sequence:
                self._delivered = _Progress(
                    message.sequence,
                    self._delivered.bytes + size,
                    self._delivered.ended + self._ends_request(message),
                )
            if event is not None:
                return event
        return None

    def mark_processed(self) -> None:
        """Records that the program has processed all events that it read."""
        self._processed = self._delivered

    def flush(self) -> None:
        """Makes the next `due_requests` acknowledge all processed events."""
        self._flush = True

    def leave_requests(self, *, end: bool = False) -> list[Request]:
        """The last requests of a call: an ack and a leave message. ``end``: also end the stream."""
        self.flush()
        leave = self.requests(leave=capture_service_pb2.SubscribeLeave(end=end))
        return [message for message in self.due_requests() if message.HasField("ack")] + [leave]

    def discard(self) -> None:
        """Drops the events that were not read, and all later events."""
        self._discarding = True
        self._queue.clear()
        self._queued_bytes = 0

    def due_requests(self) -> list[Request]:
        """Requests to send now: an ack, credit."""
        messages: list[Request] = []
        flush, self._flush = self._flush or self.seconds_to_ack() == 0, False
        if flush and self._processed.sequence > self._acknowledged.sequence:
            self._acknowledged, self._acknowledged_at = self._processed, time.monotonic()
            ack = capture_service_pb2.Ack(sequence=self._acknowledged.sequence)
            messages.append(self.requests(ack=ack))
        refill = self._window - self._queued_bytes - self._credit
        if refill > 0 and not self._discarding and (flush or refill >= self._window // 4):
            self._credit += refill
            messages.append(self.requests(credit=capture_service_pb2.Credit(bytes=refill)))
        return messages

    def seconds_to_ack(self) -> float | None:
        """Seconds until an acknowledgement must be sent; None: there is nothing to acknowledge."""
        processed, sent = self._processed, self._acknowledged
        if processed.sequence == sent.sequence:
            return None
        if (
            processed.sequence - sent.sequence >= _ACK_EVENTS
            or processed.bytes - sent.bytes >= self._ack_bytes
            # The end of a request is acknowledged at once, but only if no event waits. The server
            # reads messages one at a time: behind an acknowledgement for each of many short
            # requests, credit would come too late, and the server's buffer would fill.
            or (processed.ended > sent.ended and not self._queue)
        ):
            return 0
        return max(0.0, self._acknowledged_at + _ACK_SECONDS - time.monotonic())

    def closed_error(self) -> Refused:
        """The error of reading or acknowledging a stream that was closed or left."""
        return Refused(f"the {self.kind} is closed: {self.when_closed}")

    def ended_early_error(self) -> ServerError:
        """The error of a stream that ends with OK although the client did not close it."""
        return ServerError(f"the server ended the {self.kind}, although no client closed it")


def not_opened_error(timeout: float | None) -> DeadlineExceeded:
    """The error if the server does not open a stream in time."""
    return DeadlineExceeded(f"no answer within the timeout of {timeout:g} s")
