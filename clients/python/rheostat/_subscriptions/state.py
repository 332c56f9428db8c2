"""The state of a subscription, which both clients share. Its only I/O is mapping shared memory."""

from __future__ import annotations

from rheostat._capture.captures import RowDestination
from rheostat._capture.encodings import Decoded, payload_size
from rheostat._connection.calls import BidiCall
from rheostat._errors import Refused
from rheostat._event_streams.state import Acknowledgement, EventStreamState, Heartbeat, Request
from rheostat._event_streams.worker import StreamBase
from rheostat._subscriptions.event_reader import EventReader, to_attached
from rheostat._subscriptions.events import Attached, Cursor, SubscriptionEvent
from rheostat._subscriptions.payloads import Payloads, View
from rheostat_wire.v1 import capture_service_pb2, tensor_pb2

RESUME_ADVICE = "; if the server still runs, continue with engine.resume(subscription.acknowledged)"

_Response = capture_service_pb2.SubscribeResponse
_CALL = BidiCall("/rheostat.v1.CaptureService/Subscribe", _Response)


class SubscriptionState(EventStreamState[_Response, SubscriptionEvent]):
    """The events and acknowledgements of one subscription. Only one thread uses it at a time."""

    kind = "subscription"
    when_lost = RESUME_ADVICE
    when_closed = (
        "read and acknowledge inside its with block, or call leave() and continue with "
        "engine.resume"
    )
    requests = capture_service_pb2.SubscribeRequest

    def __init__(
        self,
        request: capture_service_pb2.SubscribeOpen | None,
        cursor: Cursor | None,
        credit: int,
        ack: Acknowledgement,
        payloads: Payloads,
    ) -> None:
        """Opens a subscription by ``request``, or resumes it after ``cursor``."""
        name, after = ("", 0) if cursor is None else cursor
        buffer = None if request is None else request.buffer_bytes
        super().__init__(_CALL, name=name, after=after, credit=credit, ack=ack, buffer=buffer)
        self.attached: tuple[Attached, ...] = ()
        self.payloads = payloads
        self._open_request = request
        self._reader = EventReader(after, self._numbers)

    @property
    def refusal(self) -> Refused | None:
        """The error if shared memory is required and cannot be used."""
        return self.payloads.refusal

    @property
    def cursor(self) -> Cursor:
        """The place after the last event that the program read."""
        return Cursor(self._name, self._delivered.sequence)

    @property
    def acknowledged(self) -> Cursor:
        """The place after the last event that the program processed."""
        return Cursor(self._name, self._processed.sequence)

    def due_requests(self) -> list[Request]:
        """Requests to send now: the proof for shared memory, an ack, credit."""
        messages = super().due_requests()
        if (proof := self.payloads.take_proof()) is not None:
            sent = capture_service_pb2.SharedMemoryProof(nonce=proof)
            messages.insert(0, capture_service_pb2.SubscribeRequest(proof=sent))
        return messages

    def _opening(self) -> Request:
        request = capture_service_pb2.SubscribeRequest()
        if self._name:
            request.open.resume.subscription_id = self._name
            request.open.resume.after_sequence = self._processed.sequence
        elif self._open_request is not None:
            request.open.CopyFrom(self._open_request)
        return request

    def _opened(self, message: _Response) -> None:
        self._name = message.opened.subscription_id
        self.attached = to_attached(message.opened.attached)
        self.payloads.begin(message.opened)

    def _read(self, message: _Response) -> SubscriptionEvent | None:
        return self._reader.read(message)

    def _ends_request(self, message: _Response) -> bool:
        return message.HasField("end_of_request")

    def _payload(self, message: _Response) -> int:
        if not message.HasField("captured"):
            return 0
        tensor = message.captured.tensor
        if tensor.HasField("shm"):
            return tensor.shm.length
        if tensor.encoding == tensor_pb2.ENCODING_RAW:  # no copy; `EventReader` checks the size
            return min(payload_size(tensor), tensor.ByteSize())
        return len(tensor.inline)

    def _numbers(self, sequence: int, tensor: tensor_pb2.Tensor) -> Decoded | View:
        return self.payloads.read(tensor, lambda: sequence > self._processed.sequence)


class SubscriptionInfo(StreamBase[_Response, SubscriptionEvent], RowDestination):
    """The public properties of a subscription, the same in both clients."""

    _state: SubscriptionState

    @property
    def attached(self) -> tuple[Attached, ...]:
        """Samples of selected requests that began before the subscription, at most 1024.

        Each has the first position whose rows are sent.
        """
        return self._state.attached

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

    def ack(self) -> None:
        """Acknowledge all events that were read; the server then discards them.

        Raises Refused in the thread or task that closed the subscription early.
        """
        self._worker.acknowledge()

    @property
    def last_heartbeat(self) -> Heartbeat | None:
        """The server's last heartbeat; None if none has arrived."""
        return self._state.last_heartbeat
