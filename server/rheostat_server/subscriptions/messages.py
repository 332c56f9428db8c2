"""The messages of a subscription about rows, losses and ends, and its counts of each request."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import google_crc32c

from rheostat_server.delivery.items import Chunk, DeliveryItem, EncodedChunk, End, Loss
from rheostat_server.delivery.row_messages import CapturedRows, dropped, encoded_rows
from rheostat_server.subscriptions.pending_changes import missed_reason, to_wire
from rheostat_server.subscriptions.shared_memory import Arena
from rheostat_server.subscriptions.shared_payloads import (
    SharedRange,
    give_back,
    move_shared,
    reserve_shared,
    shared_rows,
)
from rheostat_server.tasks.offload import offload
from rheostat_wire.message_parts import MessageParts
from rheostat_wire.v1 import capture_service_pb2

Response = capture_service_pb2.SubscribeResponse

_CRC32C = struct.Struct("<I")

_MESSAGE_BYTES = 512
"""Approximate memory of a message without its payload."""


class Message(NamedTuple):
    """A message about an item, without its sequence number."""

    response: Response
    """The message without rows."""
    rows: CapturedRows | None = None
    """The rows, if the item has some."""
    payload: int = 0
    """Bytes of payload, inside the message or in shared memory. Reading them from the message would
    copy them."""

    @property
    def weight(self) -> int:
        """Bytes of memory."""
        return self.payload + _MESSAGE_BYTES

    def numbered(self, sequence: int) -> MessageParts:
        """The message with a sequence number."""
        self.response.sequence = sequence
        head = self.response.SerializeToString()
        if self.rows is None:
            return MessageParts((head,))
        return MessageParts((head, *self.rows.as_field(Response.CAPTURED_FIELD_NUMBER)))


class DeliveryCounts:
    """Counts of the messages that were sent about one request."""

    def __init__(self) -> None:
        """No message was sent."""
        self._chunks = 0
        self._rows = 0
        self._dropped = 0
        self._checksums = bytearray()

    def count(self, item: DeliveryItem, message: Message) -> None:
        """Counts a message; writes the counts into the message of the end."""
        if (rows := message.rows) is not None:
            self._chunks += 1
            self._rows += rows.row_count
            self._checksums += _CRC32C.pack(rows.crc32c)
        elif isinstance(item, Loss):
            self._dropped += item.rows
        elif isinstance(item, End):
            end = message.response.end_of_request
            end.chunk_count, end.row_count, end.dropped_row_count = (
                self._chunks,
                self._rows,
                self._dropped,
            )
            end.crc32c = google_crc32c.value(bytes(self._checksums))
            end.finish_reasons.extend(item.feed.finish_reasons)
            end.attached.extend(to_wire([item.feed]))
            end.missed_reason = missed_reason(item.feed, self._dropped)


async def messages_of(items: Sequence[DeliveryItem], arena: Arena | None) -> list[Message]:
    """The messages of some items, without their sequence numbers.

    They are encoded together, because a thread for each would cost more than most of them.

    Args:
        items: the items.
        arena: shared memory that the reader reads; None if it reads none.
    """
    blocks = [item.block if isinstance(item, Chunk) else None for item in items]
    places = await reserve_shared(blocks, arena)
    work = sum(block.work for block in blocks if block is not None)
    try:
        messages = await offload(work, _encoded, items, places)
    except Exception:  # not where it is cancelled: the thread may still write
        give_back(places, arena)
        raise
    if arena is not None:
        try:
            for message in messages:
                rows = message.rows
                if rows is not None and rows.tensor is None and rows.message.tensor.inline:
                    await move_shared(rows.message.tensor, arena)
        except Exception:
            _free_chunks(items, messages, arena)
            raise
    return messages


def _free_chunks(items: Sequence[DeliveryItem], messages: Sequence[Message], arena: Arena) -> None:
    """Frees the shared memory of chunks, because their messages are discarded and encoded again.

    Rows from disk keep theirs, because an item from disk stores its message.
    """
    for item, message in zip(items, messages, strict=True):
        rows = message.rows
        if isinstance(item, Chunk) and rows is not None and rows.message.tensor.HasField("shm"):
            arena.free(rows.message.tensor.shm.offset)


def _encoded(items: Sequence[DeliveryItem], places: Sequence[SharedRange | None]) -> list[Message]:
    return [_message_of(item, place) for item, place in zip(items, places, strict=True)]


def _message_of(item: DeliveryItem, place: SharedRange | None) -> Message:
    """The message of an item. Raw rows are copied once, into shared memory or their own."""
    name = item.feed.request_id
    if isinstance(item, Chunk | EncodedChunk):
        if isinstance(item, EncodedChunk):
            rows = CapturedRows(item.message)
        elif place is not None:
            rows = shared_rows(item, place)
        else:  # they are kept until they are acknowledged
            rows = encoded_rows(item).with_own_memory()
        rows.message.request_id = name
        return Message(Response(), rows, rows.size)
    if isinstance(item, Loss):
        response = Response(dropped=dropped(item))
        response.dropped.request_id = name
        return Message(response)
    return Message(Response(end_of_request=capture_service_pb2.EndOfRequest(request_id=name)))
