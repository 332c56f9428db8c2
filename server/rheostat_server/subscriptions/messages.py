"""The messages of a subscription about rows, losses and ends, and its counts of each request."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import google_crc32c

from rheostat_server.delivery.items import Chunk, DeliveryItem, EncodedChunk, End, Loss
from rheostat_server.delivery.row_messages import dropped, label_captured
from rheostat_server.subscriptions.pending_changes import to_wire
from rheostat_server.subscriptions.shared_memory import Arena
from rheostat_server.subscriptions.shared_payloads import (
    SharedRange,
    give_back,
    move_shared,
    reserve_shared,
    write_payload,
)
from rheostat_server.tasks.offload import offload
from rheostat_wire.v1 import capture_service_pb2

Response = capture_service_pb2.SubscribeResponse

_CRC32C = struct.Struct("<I")


class DeliveryCounts:
    """Counts of the messages that were sent about one request."""

    def __init__(self) -> None:
        """No message was sent."""
        self._chunks = 0
        self._rows = 0
        self._dropped = 0
        self._checksums = bytearray()

    def count(self, item: DeliveryItem, response: Response) -> None:
        """Counts a message; writes the counts into the message of the end."""
        if isinstance(item, Chunk | EncodedChunk):
            captured = response.captured
            self._chunks += 1
            self._rows += len(captured.token_ids) * len(captured.sites)
            self._checksums += _CRC32C.pack(captured.tensor.crc32c)
        elif isinstance(item, Loss):
            self._dropped += item.rows
        elif isinstance(item, End):
            end = response.end_of_request
            end.chunk_count, end.row_count, end.dropped_row_count = (
                self._chunks,
                self._rows,
                self._dropped,
            )
            end.crc32c = google_crc32c.value(bytes(self._checksums))
            end.finish_reasons.extend(item.feed.finish_reasons)
            end.attached.extend(to_wire([item.feed]))
            end.missed_reason = item.feed.missed_reason


class Message(NamedTuple):
    """A message about an item."""

    response: Response
    """Without its sequence number."""
    payload: int = 0
    """Bytes of payload, inside the message or in shared memory. Reading them from the message would
    copy them."""


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
        for message in messages:
            tensor = message.response.captured.tensor
            if message.payload and not tensor.HasField("shm"):
                await move_shared(tensor, arena)
    return messages


def _encoded(items: Sequence[DeliveryItem], places: Sequence[SharedRange | None]) -> list[Message]:
    return [_message_of(item, place) for item, place in zip(items, places, strict=True)]


def _message_of(item: DeliveryItem, place: SharedRange | None) -> Message:
    """The message of an item, whose rows are written to shared memory or into the message."""
    if isinstance(item, Chunk):
        response = _labelled(item)
        return Message(response, write_payload(item.block, place, response.captured.tensor))
    name = item.feed.request_id
    if isinstance(item, EncodedChunk):
        response = Response(captured=item.message)
        response.captured.request_id = name
        return Message(response, len(response.captured.tensor.inline))
    if isinstance(item, Loss):
        response = Response(dropped=dropped(item))
        response.dropped.request_id = name
        return Message(response)
    return Message(Response(end_of_request=capture_service_pb2.EndOfRequest(request_id=name)))


def _labelled(chunk: Chunk) -> Response:
    """The message of a chunk without its tensor."""
    response = Response()
    label_captured(response.captured, chunk)
    response.captured.request_id = chunk.feed.request_id
    return response
