"""The state of a watch, which both clients share.

Updates end or change requests. Each gets one event: the server's answer, or a refusal if the watch
ends before. Answers have no number and are not sent again, so after a broken connection the client
sends the updates again that were not answered, with new numbers. So an update may act twice, which
changes nothing: the second stop of a request is refused, because it does not run any more, and the
gains of a request are set again in their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import grpc
from google.protobuf.message import Message

from rheostat._connection.calls import BidiCall
from rheostat._errors import ResourceExhausted
from rheostat._event_streams.state import EventStreamState, Request
from rheostat._responses.signals import SignalColumn, read_table
from rheostat._responses.updates import read_applied, read_refused
from rheostat._watches.event_reader import WatchReader
from rheostat._watches.events import WatchEvent
from rheostat_wire.v1 import monitor_service_pb2

BUFFER_BYTES = 8 * 1024 * 1024
"""Bytes of the server's buffer by default."""

_MOST_UPDATES = 4096
"""The most updates with unread answers. The server's limit is the same."""

_MOST_GAINS = 40
"""Most gains in a message. The server decodes messages of more than 256 fields in turn with large
messages of others, and refuses one of more than 1000 if large messages take all the memory."""


def join_gains(requests: Sequence[Message]) -> Iterator[Message]:
    """Joins consecutive gains into batches, because a message costs more than its gain."""
    for are_gains, some in groupby(requests, _is_gain):
        several = [*some]
        if not are_gains or len(several) == 1:
            yield from several
            continue
        for start in range(0, len(several), _MOST_GAINS):
            batch = monitor_service_pb2.WatchRequest()
            for request in several[start : start + _MOST_GAINS]:
                if isinstance(request, monitor_service_pb2.WatchRequest):
                    batch.steer_batch.steers.append(request.steer)
            yield batch


def _is_gain(request: Message) -> bool:
    return isinstance(request, monitor_service_pb2.WatchRequest) and request.steer.HasField("gain")


_Response = monitor_service_pb2.WatchResponse
_CALL = BidiCall("/rheostat.v1.MonitorService/Watch", _Response, join_requests=join_gains)


class WatchState(EventStreamState[_Response, WatchEvent]):
    """The events, acknowledgements and updates of one watch. One thread uses it at a time."""

    kind = "watch"
    when_lost = "; if the server still runs, open another watch with engine.watch"
    when_closed = "read it, and act on requests, inside its with block"
    requests = monitor_service_pb2.WatchRequest

    def __init__(
        self, opening: monitor_service_pb2.WatchOpen, rules: Iterable[str], credit: int
    ) -> None:
        """Opens a watch by ``opening``, whose rules have the names ``rules``."""
        buffer = opening.buffer_bytes or BUFFER_BYTES
        super().__init__(_CALL, name="", after=0, credit=credit, ack="auto", buffer=buffer)
        self._open = opening
        self._reader = WatchReader(rules)
        self._last_update = 0
        self._last_sent = 0
        """Number of the last update that was sent."""
        self._unanswered: dict[int, tuple[int, monitor_service_pb2.WatchRequest]] = {}
        """Updates that were not answered, and their ids, by the numbers that were sent."""
        self._unread = 0
        """Updates without an answer that the program has read."""
        self._outbox: list[Request] = []

    @property
    def columns(self) -> tuple[SignalColumn, ...]:
        """The columns of its readings."""
        return self._reader.columns

    def update(self, message: monitor_service_pb2.WatchRequest) -> int:
        """Sends an update with the next `due_requests`, and returns its id.

        Raises ResourceExhausted if too many updates have answers that were not read.
        """
        if self._unread >= _MOST_UPDATES:
            raise ResourceExhausted(
                f"{_MOST_UPDATES} updates have answers that were not read: read the watch's events "
                "before the next update, or make fewer updates",
                reason="REASON_QUEUE_FULL",
            )
        self._last_update += 1
        self._unread += 1
        self._send(self._last_update, message)
        return self._last_update

    def _send(self, update_id: int, message: monitor_service_pb2.WatchRequest) -> None:
        self._last_sent += 1
        action = message.stop if message.HasField("stop") else message.steer
        action.update_id = self._last_sent
        self._unanswered[self._last_sent] = update_id, message
        self._outbox.append(message)

    def opening_request(self) -> Request:
        """The first request of a new call; the updates that were not answered follow it."""
        unanswered, self._unanswered = self._unanswered, {}
        self._outbox.clear()
        for update_id, message in unanswered.values():
            again = monitor_service_pb2.WatchRequest()
            again.CopyFrom(message)
            self._send(update_id, again)
        return super().opening_request()

    def due_requests(self) -> list[Request]:
        """Requests to send now: updates, an ack, credit."""
        updates, self._outbox = self._outbox, []
        return [*updates, *super().due_requests()]

    def add(self, message: _Response) -> None:
        """Stores a message. Raises DataLoss if an event before it is missing."""
        if message.WhichOneof("event") in ("applied", "refused"):
            self._enqueue_answer(message)
        else:
            super().add(message)

    def end(self) -> None:
        """Refuses the updates that get no answer any more."""
        for number in list(self._unanswered):
            refusal = _Response()
            refusal.refused.update_id = number
            refusal.refused.status.code = grpc.StatusCode.NOT_FOUND.value[0]
            refusal.refused.status.message = "the watch has ended"
            self._enqueue_answer(refusal)

    def _enqueue_answer(self, message: _Response) -> None:
        answer = message.applied if message.HasField("applied") else message.refused
        update_id, _ = self._unanswered.pop(answer.update_id, (0, None))
        if update_id and not self._discarding:
            answer.update_id = update_id
            self._append(message, 0)

    def _opening(self) -> Request:
        request = monitor_service_pb2.WatchRequest()
        if self._name:
            request.open.resume.watch_id = self._name
            request.open.resume.after_sequence = self._processed.sequence
        else:
            request.open.CopyFrom(self._open)
        return request

    def _opened(self, message: _Response) -> None:
        self._name = message.opened.watch_id
        self._reader.columns = read_table(message.opened.table)

    def _payload(self, message: _Response) -> int:
        if not message.HasField("signals"):
            return 0
        rows, columns = message.signals.values.shape
        return 4 * rows * columns

    def _read(self, message: _Response) -> WatchEvent | None:
        match message.WhichOneof("event"):
            case "applied":
                self._unread -= 1
                return read_applied(message.applied)
            case "refused":
                self._unread -= 1
                return read_refused(message.refused)
        return self._reader.read(message)

    def _ends_request(self, message: _Response) -> bool:
        return message.HasField("ended")
