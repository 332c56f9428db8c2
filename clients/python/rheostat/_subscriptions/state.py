"""The state of a subscription, without I/O except mapping shared memory, so both clients share it.

Invariants:

* The reader gets events in the order of their numbers, each once, whatever connections do.
* Bytes that wait here and bytes that the server may send together never exceed the window.
* An event is acknowledged only after the reader has dealt with it. After a broken connection the
  client therefore asks for all events after the last acknowledgement.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Literal, NamedTuple, TypeAlias

from rheostat._capture.captures import RowDestination
from rheostat._capture.encodings import Numbers, payload_size
from rheostat._connection.channel import MESSAGE_BYTES
from rheostat._errors import (
    DataLoss,
    DeadlineExceeded,
    Refused,
    ServerError,
    invalid,
)
from rheostat._fields import whole_number
from rheostat._subscriptions.event_reader import Ledger, to_attached
from rheostat._subscriptions.events import Attached, Cursor, Heartbeat, SubscriptionEvent
from rheostat._subscriptions.payloads import Payloads
from rheostat_wire.v1 import capture_service_pb2, tensor_pb2

Acknowledgement: TypeAlias = Literal["auto", "manual"]
"""When an event is acknowledged: when the next one is read, or by `ack` alone."""

CREDIT = 64 * 1024 * 1024
"""Default for the bytes that may wait in the client."""
PATIENCE = 60.0
"""Seconds for which the client tries to reconnect if the server gives no resume window."""
GOODBYE = 5.0
"""Seconds that the server has to end a subscription that was closed, or a call that was left."""

_ACK_EVENTS = 64
_ACK_BYTES = 8 * 1024 * 1024
_ACK_SECONDS = 0.2


_Request = capture_service_pb2.SubscribeRequest
_Open = capture_service_pb2.SubscribeOpen


class _Progress(NamedTuple):
    """How far something is."""

    sequence: int
    bytes: int = 0
    """Payload of everything up to there."""
    ended: int = 0
    """Requests that ended up to there."""


class _Arrived(NamedTuple):
    """What waits here."""

    message: capture_service_pb2.SubscribeResponse
    payload: int
    """Its bytes of payload, which to ask the message for is to copy them."""


class Intake:
    """What one subscription has brought. Not for several threads at a time."""

    def __init__(
        self,
        wish: _Open | None,
        cursor: Cursor | None,
        credit: int,
        ack: Acknowledgement,
        payloads: Payloads,
    ) -> None:
        """One that has not been opened: a new one by ``wish``, or that of ``cursor``."""
        if ack not in ("auto", "manual"):
            raise invalid("ack", f'ack is "auto" or "manual", not {ack!r}')
        self.id = ""
        """Set once it stands."""
        self.missed: dict[str, str] = {}
        self.attached: tuple[Attached, ...] = ()
        self.last_heartbeat: Heartbeat | None = None
        self.patience = PATIENCE
        """Seconds for which the server waits for its client once a connection has broken."""
        self._wish = wish
        self._name = "" if cursor is None else cursor.subscription_id
        self._window = whole_number(credit, "credit", "the credit", least=1, most=2**62)
        self._automatic = ack == "auto"
        after = 0 if cursor is None else cursor.sequence
        self.payloads = payloads
        self._ledger = Ledger(after, self._numbers)
        self._waiting: deque[_Arrived] = deque()
        self._held = 0
        """Bytes that wait here."""
        self._allowed = 0
        """Bytes that the server may send."""
        self._received = after
        self._handed = _Progress(after)
        self._dealt = _Progress(after)
        self._told = _Progress(after)
        self._told_at = time.monotonic()
        self._flush = False
        self._discards = False
        room = self._window if wish is None else wish.buffer_bytes or self._window
        self._ack_bytes = min(_ACK_BYTES, room // 8, self._window // 8)

    @property
    def cursor(self) -> Cursor:
        """After the last event that was handed over."""
        return Cursor(self._name, self._handed.sequence)

    @property
    def acknowledged(self) -> Cursor:
        """After the last event that was dealt with."""
        return Cursor(self._name, self._dealt.sequence)

    def hello(self) -> _Request:
        """What a new call says first."""
        self._allowed = max(0, self._window - self._held)
        self._told = self._dealt
        wish = _Open()
        if self._name:
            wish.resume.subscription_id = self._name
            wish.resume.after_sequence = self._dealt.sequence
        elif self._wish is not None:
            wish.CopyFrom(self._wish)
        wish.credit_bytes = self._allowed
        return _Request(open=wish)

    def feed(self, message: capture_service_pb2.SubscribeResponse) -> None:
        """Take what came. Raises DataLoss if something is missing before it."""
        match message.WhichOneof("event"):
            case "opened":
                self.id = self._name = message.opened.subscription_id
                self.missed = {one.request_id: one.reason for one in message.opened.missed}
                self.attached = to_attached(message.opened.attached)
                if message.opened.HasField("resume_window"):
                    self.patience = message.opened.resume_window.ToTimedelta().total_seconds()
                self.payloads.begin(message.opened)
            case "heartbeat":
                beat = message.heartbeat
                self.last_heartbeat = Heartbeat(
                    beat.buffered_bytes, beat.credit_bytes, beat.last_sequence
                )
                self._flush = True
                # A chunk may be larger than the window, and would never come.
                if not self._held and beat.buffered_bytes > beat.credit_bytes:
                    self._window = max(self._window, min(2 * self._window, MESSAGE_BYTES))
            case _ if message.sequence:
                self._take_in(message)

    def _take_in(self, message: capture_service_pb2.SubscribeResponse) -> None:
        size = _payload(message)
        self._allowed -= size
        if message.sequence <= self._received or self._discards:
            return
        if message.sequence > self._received + 1:
            raise DataLoss(
                f"event {message.sequence} came after event {self._received}",
                reason="REASON_ROWS_LOST",
            )
        self._received = message.sequence
        self._held += size
        self._waiting.append(_Arrived(message, size))

    def pop(self) -> SubscriptionEvent | None:
        """Hand the next event over; None: there is none yet. Raises as `Ledger.read`."""
        if self._automatic:
            self.deal()
        while self._waiting:
            message, size = self._waiting.popleft()
            self._held -= size
            event = self._ledger.read(message)
            self._handed = _Progress(
                message.sequence,
                self._handed.bytes + size,
                self._handed.ended + message.HasField("end_of_request"),
            )
            if event is not None:
                return event
        return None

    def _numbers(self, sequence: int, tensor: tensor_pb2.Tensor) -> Numbers:
        return self.payloads.read(tensor, lambda: sequence > self._dealt.sequence)

    def deal(self) -> None:
        """All that was handed over has been dealt with."""
        self._dealt = self._handed

    def flush(self) -> None:
        """Tell the server at once what it may forget."""
        self._flush = True

    def parting(self) -> list[_Request]:
        """What ends a call in such a way that the server still takes the last acknowledgement."""
        self.flush()
        leave = _Request(leave=capture_service_pb2.SubscribeLeave())
        return [one for one in self.due() if one.HasField("ack")] + [leave]

    def discard(self) -> None:
        """Hand nothing more over."""
        self._discards = True
        self._waiting.clear()
        self._held = 0

    def due(self) -> list[_Request]:
        """What the server is to be told now."""
        messages = []
        if (proof := self.payloads.take_proof()) is not None:
            messages.append(_Request(proof=capture_service_pb2.SharedMemoryProof(nonce=proof)))
        flush, self._flush = self._flush or self.ack_after() == 0, False
        if flush and self._dealt.sequence > self._told.sequence:
            self._told, self._told_at = self._dealt, time.monotonic()
            ack = capture_service_pb2.Ack(sequence=self._told.sequence)
            messages.append(_Request(ack=ack))
        owed = self._window - self._held - self._allowed
        if owed > 0 and not self._discards and (flush or owed >= self._window // 4):
            self._allowed += owed
            messages.append(_Request(credit=capture_service_pb2.Credit(bytes=owed)))
        return messages

    def ack_after(self) -> float | None:
        """Seconds after which an acknowledgement is due; None: there is nothing to acknowledge."""
        dealt, told = self._dealt, self._told
        if dealt.sequence == told.sequence:
            return None
        if (
            dealt.sequence - told.sequence >= _ACK_EVENTS
            or dealt.bytes - told.bytes >= self._ack_bytes
            or dealt.ended > told.ended
        ):
            return 0
        return max(0.0, self._told_at + _ACK_SECONDS - time.monotonic())


def _payload(message: capture_service_pb2.SubscribeResponse) -> int:
    """Bytes that count against credit."""
    if not message.HasField("captured"):
        return 0
    tensor = message.captured.tensor
    if tensor.HasField("shm"):
        return tensor.shm.length
    if tensor.encoding == tensor_pb2.ENCODING_RAW:  # else refused when it is read
        return min(payload_size(tensor), tensor.ByteSize())
    return len(tensor.inline)


class Standing(RowDestination):
    """The public properties of a subscription, the same in both clients."""

    def __init__(self, intake: Intake) -> None:
        """Of the subscription with this state."""
        self._intake = intake

    @property
    def id(self) -> str:
        """Its id, for captures that send their rows here. Raises Refused before it is open."""
        if not self._intake.id:
            raise Refused("the subscription is not open yet: enter it with async with")
        return self._intake.id

    @property
    def attached(self) -> tuple[Attached, ...]:
        """Samples of selected requests that began before the subscription was opened, at most 1024.

        Each names the first position from which its rows come.
        """
        return self._intake.attached

    @property
    def missed(self) -> dict[str, str]:
        """Selected requests that cannot be captured because they began before, with the reason.

        At most 1024, by request id.
        """
        return dict(self._intake.missed)

    @property
    def inline_reason(self) -> str | None:
        """Why rows come inside messages; None if large chunks come through shared memory."""
        return self._intake.payloads.inline_reason

    @property
    def cursor(self) -> Cursor:
        """Where to resume after the event that was read last.

        Store it together with your results for that event, and each event counts exactly once.
        """
        return self._intake.cursor

    @property
    def acknowledged(self) -> Cursor:
        """Where to resume after the event that was acknowledged last."""
        return self._intake.acknowledged

    @property
    def last_heartbeat(self) -> Heartbeat | None:
        """The server's last heartbeat: how much is buffered, and how much credit is left."""
        return self._intake.last_heartbeat


def closed_error() -> Refused:
    """The error of reading on, or acknowledging, after closing or leaving before the end."""
    return Refused(
        "the subscription is closed: read and acknowledge within its with block, or continue a "
        "subscription that was left with engine.resume"
    )


def not_opened_error(timeout: float | None) -> DeadlineExceeded:
    """The error of a subscription that the server does not answer."""
    return DeadlineExceeded(f"no answer within the timeout of {timeout:g} s")


def ended_early_error() -> ServerError:
    """The error of a stream that ends as if it had been closed."""
    return ServerError("the server ended the subscription, although no client closed it")
