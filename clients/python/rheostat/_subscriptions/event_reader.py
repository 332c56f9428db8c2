"""Reads the events of a subscription, and checks that none is missing or damaged.

Every tensor's checksum is verified. At the end of a request its rows are verified once more: by
count, and by a checksum over the checksums.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import cast

import google_crc32c

from rheostat._capture.activations import positions_of, read_block
from rheostat._capture.encodings import Numbers
from rheostat._errors import DataLoss, ServerError
from rheostat._fields import read_word
from rheostat._responses.results import DroppedRows, FinishReason
from rheostat._subscriptions.events import Attached, CapturedRows, EndOfRequest, SubscriptionEvent
from rheostat_wire.v1 import capture_pb2, capture_service_pb2, tensor_pb2, types_pb2


@dataclass
class _Tally:
    """What came of one request."""

    chunks: int = 0
    rows: int = 0
    dropped: int = 0
    crc32c: int = 0


class Ledger:
    """Reads events in the order of their numbers, and counts what came of each request."""

    def __init__(self, after: int, read: Callable[[int, tensor_pb2.Tensor], Numbers]) -> None:
        """An empty one; what was numbered up to ``after`` came to somebody else.

        ``read`` gives the numbers of an event's tensor.
        """
        self._inherited = after > 0
        self._read = read
        self._tallies: dict[str, _Tally] = {}

    def read(self, message: capture_service_pb2.SubscribeResponse) -> SubscriptionEvent | None:
        """The event; None for kinds that this client does not know.

        Raises DataLoss if rows are damaged or missing, ServerError for what cannot be read.
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
            raise ServerError("a tensor of a subscription came without its CRC-32C")
        block = read_block(message, partial(self._read, sequence))
        tally = self._tally(message.request_id)
        tally.chunks += 1
        tally.rows += len(block.sites) * len(block.positions)
        tally.crc32c = google_crc32c.extend(tally.crc32c, struct.pack("<I", message.tensor.crc32c))
        return CapturedRows(
            sequence,
            message.request_id,
            message.capture_index,
            message.sample,
            message.baseline,
            block.sites,
            block.positions,
            block.token_ids,
            tuple(message.tensor.shape),
            block.tensor,
        )

    def _dropped(self, sequence: int, message: capture_pb2.Dropped) -> DroppedRows:
        self._tally(message.request_id).dropped += message.row_count
        return DroppedRows(
            sequence,
            message.request_id,
            message.capture_index,
            message.sample,
            message.baseline,
            positions_of(message.positions),
            message.row_count,
        )

    def _end(self, sequence: int, message: capture_service_pb2.EndOfRequest) -> EndOfRequest:
        came = self._tallies.pop(message.request_id, _Tally())
        told = _Tally(
            message.chunk_count, message.row_count, message.dropped_row_count, message.crc32c
        )
        if came != told and not (self._inherited and _may_continue(came, told)):
            raise DataLoss(
                f"of {message.request_id} came {_shown(came)}, of {_shown(told)} that were sent",
                reason="REASON_ROWS_LOST",
                metadata={"rows": str(max(0, told.rows - came.rows))},
            )
        return EndOfRequest(
            sequence,
            message.request_id,
            message.chunk_count,
            message.row_count,
            message.dropped_row_count,
            tuple(_finish_reason(one) for one in message.finish_reasons),
            to_attached(message.attached),
            message.missed_reason,
        )

    def _tally(self, request_id: str) -> _Tally:
        return self._tallies.setdefault(request_id, _Tally())


def _may_continue(came: _Tally, told: _Tally) -> bool:
    """Whether the first part of a request may have come before."""
    before = (told.chunks, told.dropped) != (came.chunks, came.dropped)
    return before and all(
        part <= whole
        for part, whole in (
            (came.chunks, told.chunks),
            (came.rows, told.rows),
            (came.dropped, told.dropped),
        )
    )


def _shown(tally: _Tally) -> str:
    return (
        f"{tally.rows} rows in {tally.chunks} chunks with {tally.dropped} dropped and CRC-32C "
        f"{tally.crc32c:08x}"
    )


def _finish_reason(number: types_pb2.FinishReason.ValueType) -> FinishReason:
    return cast(
        FinishReason, read_word(types_pb2.FinishReason.DESCRIPTOR, number, "FINISH_REASON_")
    )


def to_attached(messages: Iterable[capture_service_pb2.Attached]) -> tuple[Attached, ...]:
    """What the server says of samples that began before."""
    return tuple(
        Attached(
            one.request_id,
            one.sample,
            one.baseline,
            one.first_position if one.HasField("first_position") else None,
        )
        for one in messages
    )
