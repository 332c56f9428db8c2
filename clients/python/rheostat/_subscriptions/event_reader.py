"""Reads the events of a subscription, and checks that none is missing or damaged.

Each tensor has a checksum. At the end of a request, the number of rows and a checksum of the
checksums are verified as well.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import google_crc32c

from rheostat._capture.activations import read_captured_tensor
from rheostat._capture.encodings import Decoded
from rheostat._errors import DataLoss, ServerError
from rheostat._fields import same_fields
from rheostat._responses.results import DroppedRows, read_dropped, read_finish_reason
from rheostat._subscriptions.events import Attached, CapturedRows, EndOfRequest, SubscriptionEvent
from rheostat._subscriptions.payloads import View
from rheostat_wire.v1 import capture_pb2, capture_service_pb2, tensor_pb2


@dataclass
class _RequestCounts:
    """Counts of one request."""

    chunks: int = 0
    rows: int = 0
    dropped: int = 0
    crc32c: int = 0


class EventReader:
    """Reads events in the order of their numbers, and counts the rows of each request."""

    def __init__(
        self, after: int, read: Callable[[int, tensor_pb2.Tensor], Decoded | View]
    ) -> None:
        """Begins after event ``after``; another client read the earlier events.

        ``read`` decodes the tensor of an event.
        """
        self._resumed = after > 0
        self._read = read
        self._counts: defaultdict[str, _RequestCounts] = defaultdict(_RequestCounts)

    def read(self, message: capture_service_pb2.SubscribeResponse) -> SubscriptionEvent | None:
        """The event; None if this client does not know its kind.

        Raises DataLoss if rows are damaged or missing, ServerError if the message cannot be read.
        """
        match message.WhichOneof("event"):
            case "captured":
                return self._captured(message.sequence, message.captured)
            case "dropped":
                return self._dropped(message.sequence, message.dropped)
            case "end_of_request":
                return self._end(message.sequence, message.end_of_request)
        return None

    def _captured(self, sequence: int, message: capture_pb2.Captured) -> CapturedRows:
        if not message.tensor.HasField("crc32c"):
            raise ServerError("a tensor of a subscription has no CRC-32C")
        captured = read_captured_tensor(message, partial(self._read, sequence))
        counts = self._counts[message.request_id]
        counts.chunks += 1
        counts.rows += len(captured.sites) * len(captured.positions)
        counts.crc32c = google_crc32c.extend(
            counts.crc32c, struct.pack("<I", message.tensor.crc32c)
        )
        return CapturedRows(
            sequence,
            message.request_id,
            message.capture_index,
            message.sample,
            message.baseline,
            captured.sites,
            captured.positions,
            captured.token_ids,
            tuple(message.tensor.shape),
            captured.tensor,
        )

    def _dropped(self, sequence: int, message: capture_pb2.Dropped) -> DroppedRows:
        self._counts[message.request_id].dropped += message.row_count
        return read_dropped(message, sequence, message.request_id)

    def _end(self, sequence: int, message: capture_service_pb2.EndOfRequest) -> EndOfRequest:
        received = self._counts.pop(message.request_id, _RequestCounts())
        sent = _RequestCounts(
            message.chunk_count, message.row_count, message.dropped_row_count, message.crc32c
        )
        if received != sent and not (self._resumed and _may_continue(received, sent)):
            raise DataLoss(
                f"of {message.request_id} arrived {_show_counts(received)}, "
                f"of {_show_counts(sent)} that were sent",
                reason="REASON_ROWS_LOST",
                metadata={"rows": str(max(0, sent.rows - received.rows))},
            )
        return EndOfRequest(
            sequence,
            **same_fields(EndOfRequest, message),
            finish_reasons=tuple(map(read_finish_reason, message.finish_reasons)),
            attached=to_attached(message.attached),
        )


def _may_continue(received: _RequestCounts, sent: _RequestCounts) -> bool:
    """Whether another client may have read the first events of a request."""
    before = (sent.chunks, sent.dropped) != (received.chunks, received.dropped)
    fits = received.chunks <= sent.chunks and received.dropped <= sent.dropped
    return before and fits and received.rows <= sent.rows


def _show_counts(counts: _RequestCounts) -> str:
    return (
        f"{counts.rows} rows in {counts.chunks} chunks with {counts.dropped} dropped and CRC-32C "
        f"{counts.crc32c:08x}"
    )


def to_attached(messages: Iterable[capture_service_pb2.Attached]) -> tuple[Attached, ...]:
    """The samples that began before the subscription."""
    return tuple(
        Attached(
            sample.request_id,
            sample.sample,
            sample.baseline,
            sample.first_position if sample.HasField("first_position") else None,
        )
        for sample in messages
    )
