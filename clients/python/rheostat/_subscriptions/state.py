"""The state of a subscription, which both clients share. Its only I/O is mapping shared memory.

Invariants:

* The reader gets events in the order of their numbers, each once, even if the connection breaks.
* Queued bytes plus credit never exceed the window.
* An event is acknowledged only after the reader has processed it. After a broken connection the
  client therefore asks for all events after the last acknowledgement.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Literal, NamedTuple, TypeAlias

from rheostat._capture.captures import RowDestination
from rheostat._capture.encodings import Numbers, payload_size
from rheostat._connection.channel import MESSAGE_BYTES
from rheostat._errors import DataLoss, DeadlineExceeded, Refused, ServerError, invalid
from rheostat._fields import whole_number
from rheostat._subscriptions.event_reader import EventReader, to_attached
from rheostat._subscriptions.events import Attached, Cursor, Heartbeat, SubscriptionEvent
from rheostat._subscriptions.payloads import Payloads
from rheostat_wire.v1 import capture_service_pb2, tensor_pb2

Acknowledgement: TypeAlias = Literal["auto", "manual"]
"""When an event is acknowledged: when the next event is read, or when `ack` is called."""

DEFAULT_CREDIT = 64 * 1024 * 1024
"""Bytes that may wait in the client by default."""
RECONNECT_TIMEOUT = 60.0
"""Seconds for which the client tries to reconnect if the server sends no resume window."""
CLOSE_TIMEOUT = 5.0
"""Seconds to wait until the server has ended a closed subscription, or a call after `leave`."""

_ACK_EVENTS = 64
_ACK_BYTES = 8 * 1024 * 1024
_ACK_SECONDS = 0.2

_Request = capture_service_pb2.SubscribeRequest
_Open = capture_service_pb2.SubscribeOpen


class _Progress(NamedTuple):
    """A place in the sequence of events, with the totals of the events before it."""

    sequence: int
    bytes: int = 0
    """Bytes of payload."""
    ended: int = 0
    """Requests that ended."""


class _QueuedEvent(NamedTuple):
    """An event that the program has not read."""

    message: capture_service_pb2.SubscribeResponse
    payload: int
    """Bytes of its payload. Stored, because every access to the payload copies it."""


class SubscriptionState:
    """The events and acknowledgements of one subscription. Only one thread uses it at a time."""

    def __init__(
        self,
        request: _Open | None,
        cursor: Cursor | None,
        credit: int,
        ack: Acknowledgement,
        payloads: Payloads,
    ) -> None:
        """Opens a subscription by ``request``, or resumes it after ``cursor``."""
        if ack not in ("auto", "manual"):
            raise invalid("ack", f'ack is "auto" or "manual", not {ack!r}')
        self.id = ""
        """Set once the server has opened it."""
        self.missed: dict[str, str] = {}
        self.attached: tuple[Attached, ...] = ()
        self.last_heartbeat: Heartbeat | None = None
        self.reconnect_timeout = RECONNECT_TIMEOUT
        """Seconds for which the server keeps the subscription after a connection broke."""
        self._open_request = request
        self._name = "" if cursor is None else cursor.subscription_id
        self._window = whole_number(credit, "credit", "the credit", least=1, most=2**62)
        self._automatic = ack == "auto"
        after = 0 if cursor is None else cursor.sequence
        self.payloads = payloads
        self._reader = EventReader(after, self._numbers)
        self._queue: deque[_QueuedEvent] = deque()
        self._queued_bytes = 0
        """Bytes of payload in `_queue`."""
        self._credit = 0
        """Bytes that the server may send."""
        self._received = after
        self._delivered = _Progress(after)
        self._processed = _Progress(after)
        self._acknowledged = _Progress(after)
        self._acknowledged_at = time.monotonic()
        self._flush = False
        self._discarding = False
        buffer = self._window if request is None else request.buffer_bytes or self._window
        self._ack_bytes = min(_ACK_BYTES, buffer // 8, self._window // 8)

    @property
    def cursor(self) -> Cursor:
        """The place after the last event that the program read."""
        return Cursor(self._name, self._delivered.sequence)

    @property
    def acknowledged(self) -> Cursor:
        """The place after the last event that the program processed."""
        return Cursor(self._name, self._processed.sequence)

    def opening_request(self) -> _Request:
        """The first request of a new call."""
        self._credit = max(0, self._window - self._queued_bytes)
        self._acknowledged = self._processed
        request = _Open()
        if self._name:
            request.resume.subscription_id = self._name
            request.resume.after_sequence = self._processed.sequence
        elif self._open_request is not None:
            request.CopyFrom(self._open_request)
        request.credit_bytes = self._credit
        request.batches = True
        return _Request(open=request)

    def add(self, message: capture_service_pb2.SubscribeResponse) -> None:
        """Stores a message. Raises DataLoss if an event before it is missing."""
        match message.WhichOneof("event"):
            case "opened":
                self.id = self._name = message.opened.subscription_id
                self.missed = {missed.request_id: missed.reason for missed in message.opened.missed}
                self.attached = to_attached(message.opened.attached)
                if message.opened.HasField("resume_window"):
                    self.reconnect_timeout = (
                        message.opened.resume_window.ToTimedelta().total_seconds()
                    )
                self.payloads.begin(message.opened)
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
                    self._enqueue(event)
            case _ if message.sequence:
                self._enqueue(message)

    def _enqueue(self, message: capture_service_pb2.SubscribeResponse) -> None:
        size = _payload(message)
        self._credit -= size
        if message.sequence <= self._received or self._discarding:
            return
        if message.sequence > self._received + 1:
            raise DataLoss(
                f"event {message.sequence} came after event {self._received}",
                reason="REASON_ROWS_LOST",
            )
        self._received = message.sequence
        self._queued_bytes += size
        self._queue.append(_QueuedEvent(message, size))

    def pop(self) -> SubscriptionEvent | None:
        """The next event; None if none has arrived. Raises as `EventReader.read`."""
        if self._automatic:
            self.mark_processed()
        while self._queue:
            message, size = self._queue.popleft()
            self._queued_bytes -= size
            event = self._reader.read(message)
            self._delivered = _Progress(
                message.sequence,
                self._delivered.bytes + size,
                self._delivered.ended + message.HasField("end_of_request"),
            )
            if event is not None:
                return event
        return None

    def _numbers(self, sequence: int, tensor: tensor_pb2.Tensor) -> Numbers:
        return self.payloads.read(tensor, lambda: sequence > self._processed.sequence)

    def mark_processed(self) -> None:
        """Records that the program has processed all events that it read."""
        self._processed = self._delivered

    def flush(self) -> None:
        """Makes the next `due_requests` acknowledge all processed events."""
        self._flush = True

    def leave_requests(self, *, end: bool = False) -> list[_Request]:
        """The last requests of a call: an ack, and a leave message that may also end it."""
        self.flush()
        leave = _Request(leave=capture_service_pb2.SubscribeLeave(end=end))
        return [message for message in self.due_requests() if message.HasField("ack")] + [leave]

    def discard(self) -> None:
        """Drops the events that were not read, and all later events."""
        self._discarding = True
        self._queue.clear()
        self._queued_bytes = 0

    def due_requests(self) -> list[_Request]:
        """Requests to send now: the proof for shared memory, an ack, credit."""
        messages = []
        if (proof := self.payloads.take_proof()) is not None:
            messages.append(_Request(proof=capture_service_pb2.SharedMemoryProof(nonce=proof)))
        flush, self._flush = self._flush or self.seconds_to_ack() == 0, False
        if flush and self._processed.sequence > self._acknowledged.sequence:
            self._acknowledged, self._acknowledged_at = self._processed, time.monotonic()
            ack = capture_service_pb2.Ack(sequence=self._acknowledged.sequence)
            messages.append(_Request(ack=ack))
        refill = self._window - self._queued_bytes - self._credit
        if refill > 0 and not self._discarding and (flush or refill >= self._window // 4):
            self._credit += refill
            messages.append(_Request(credit=capture_service_pb2.Credit(bytes=refill)))
        return messages

    def seconds_to_ack(self) -> float | None:
        """Seconds until an acknowledgement must be sent; None: there is nothing to acknowledge."""
        processed, sent = self._processed, self._acknowledged
        if processed.sequence == sent.sequence:
            return None
        if (
            processed.sequence - sent.sequence >= _ACK_EVENTS
            or processed.bytes - sent.bytes >= self._ack_bytes
            # The server reads messages one at a time. Behind an acknowledgement for each short
            # request, credit would come too late, and the buffer of the server would fill.
            or (processed.ended > sent.ended and not self._queue)
        ):
            return 0
        return max(0.0, self._acknowledged_at + _ACK_SECONDS - time.monotonic())


def _payload(message: capture_service_pb2.SubscribeResponse) -> int:
    """Bytes of a message that count against credit."""
    if not message.HasField("captured"):
        return 0
    tensor = message.captured.tensor
    if tensor.HasField("shm"):
        return tensor.shm.length
    if tensor.encoding == tensor_pb2.ENCODING_RAW:  # avoids a copy; `EventReader` checks the size
        return min(payload_size(tensor), tensor.ByteSize())
    return len(tensor.inline)


class SubscriptionInfo(RowDestination):
    """The public properties of a subscription, the same in both clients."""

    def __init__(self, state: SubscriptionState) -> None:
        self._state = state

    def __repr__(self) -> str:
        return f"Subscription({self._state.id!r})" if self._state.id else "Subscription(not open)"

    @property
    def id(self) -> str:
        """Its id, for captures that send their rows here. Raises Refused before it is open."""
        if not self._state.id:
            raise Refused("the subscription is not open yet: enter it with async with")
        return self._state.id

    @property
    def attached(self) -> tuple[Attached, ...]:
        """Samples of selected requests that began before the subscription, at most 1024.

        Each has the first position whose rows are sent.
        """
        return self._state.attached

    @property
    def missed(self) -> dict[str, str]:
        """Reasons why selected requests that began before are not captured, by request id.

        At most 1024.
        """
        return dict(self._state.missed)

    @property
    def inline_reason(self) -> str | None:
        """Why rows are sent inside messages; None if large chunks use shared memory."""
        return self._state.payloads.inline_reason

    @property
    def cursor(self) -> Cursor:
        """The place after the last event that was read, for `Engine.resume`.

        Store it together with your results for that event, and each event counts exactly once.
        """
        return self._state.cursor

    @property
    def acknowledged(self) -> Cursor:
        """The place after the last event that was acknowledged, for `Engine.resume`."""
        return self._state.acknowledged

    @property
    def last_heartbeat(self) -> Heartbeat | None:
        """The server's last heartbeat; None if none has arrived."""
        return self._state.last_heartbeat


def closed_error() -> Refused:
    """The error of reading or acknowledging after `close` or `leave`."""
    return Refused(
        "the subscription is closed: read and acknowledge inside its with block, or call leave() "
        "and continue with engine.resume"
    )


def not_opened_error(timeout: float | None) -> DeadlineExceeded:
    """The error if the server does not open a subscription in time."""
    return DeadlineExceeded(f"no answer within the timeout of {timeout:g} s")


def ended_early_error() -> ServerError:
    """The error of a stream that ends with OK although the client did not close it."""
    return ServerError("the server ended the subscription, although no client closed it")
