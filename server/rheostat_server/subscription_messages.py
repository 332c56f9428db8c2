"""What a subscription says of rows, losses and ends, and what it counts of each request."""

import struct

import google_crc32c

from rheostat._proto.v1 import capture_service_pb2
from rheostat_server.row_messages import captured, dropped
from rheostat_server.taps import Chunk, End, Item, Loss, Sealed

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
            end.chunks, end.rows, end.dropped_rows = self._chunks, self._rows, self._dropped
            end.crc32c = google_crc32c.value(bytes(self._checksums))
            end.finish_reasons.extend(item.tap.finish_reasons)


async def message_of(item: Item) -> Response:
    """The message of an item, without its sequence number."""
    name = item.tap.request_id
    if isinstance(item, End):
        return Response(end_of_request=capture_service_pb2.EndOfRequest(request_id=name))
    if isinstance(item, Loss):
        response = Response(dropped=dropped(item))
        response.dropped.request_id = name
        return response
    message = await captured(item)
    message.request_id = name
    return Response(captured=message)
