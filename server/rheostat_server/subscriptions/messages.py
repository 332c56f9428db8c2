"""What a subscription says of rows, losses and ends, and what it counts of each request."""

import struct
from typing import NamedTuple

import google_crc32c

from rheostat_server.capture.leaving import Chunk, End, Item, Loss, Sealed
from rheostat_server.capture.row_messages import dropped
from rheostat_server.capture.stream import to_captured
from rheostat_server.offload import offload
from rheostat_server.subscriptions.joining import to_wire
from rheostat_server.subscriptions.shared_memory import Arena
from rheostat_server.subscriptions.sharing import move_shared, write_inline, write_shared
from rheostat_wire.v1 import capture_pb2, capture_service_pb2, tensor_pb2

Response = capture_service_pb2.SubscribeResponse


class Tally:
    """What was sent of one request."""

    def __init__(self) -> None:
        """Nothing yet."""
        self._chunks = 0
        self._rows = 0
        self._dropped = 0
        self._checksums = bytearray()

    def count(self, item: Item, response: Response) -> None:
        """Counts what is sent; an end is told what was counted."""
        if isinstance(item, Chunk | Sealed):
            captured = response.captured
            self._chunks += 1
            self._rows += len(captured.token_ids) * len(captured.sites)
            self._checksums += struct.pack("<I", captured.tensor.crc32c)
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
            end.finish_reasons.extend(item.tap.finish_reasons)
            end.attached.extend(to_wire([item.tap]))
            end.missed_reason = item.tap.missed


class Message(NamedTuple):
    """Something to say."""

    response: Response
    """Without its sequence number."""
    payload: int = 0
    """Bytes of payload, wherever it lies. To ask the message for it would copy all of it."""


async def message_of(item: Item, arena: Arena | None) -> Message:
    """The message of an item, without its sequence number.

    Args:
        item: what is said.
        arena: shared memory that its reader reads; None: it reads none.
    """
    if isinstance(item, Chunk):
        response = Response(captured=_labels(item))
        block, tensor = item.block, response.captured.tensor
        if arena is not None:
            return Message(response, await write_shared(block, arena, tensor))
        return Message(response, await offload(block.work, write_inline, block, tensor))
    name = item.tap.request_id
    if isinstance(item, Sealed):
        response = Response(captured=item.message)
        response.captured.request_id = name
        tensor = response.captured.tensor
        size = len(tensor.inline)
        if arena is not None:
            await move_shared(tensor, arena)
        return Message(response, size)
    if isinstance(item, Loss):
        response = Response(dropped=dropped(item))
        response.dropped.request_id = name
        return Message(response)
    return Message(Response(end_of_request=capture_service_pb2.EndOfRequest(request_id=name)))


def _labels(chunk: Chunk) -> capture_pb2.Captured:
    """What says which rows they are; the rows are written where they are to lie."""
    message = to_captured(
        chunk.block,
        chunk.track.sample,
        chunk.token_ids,
        baseline=chunk.track.baseline,
        tensor=tensor_pb2.Tensor(),
    )
    message.request_id = chunk.tap.request_id
    return message
