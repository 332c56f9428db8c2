"""What a subscription says of rows, losses and ends, and what it counts of each request."""

import struct

import google_crc32c

from rheostat._proto.v1 import capture_pb2, capture_service_pb2
from rheostat_server.capture_stream import to_captured, wire_runs
from rheostat_server.joining import to_wire
from rheostat_server.offload import offload
from rheostat_server.taps import Chunk, End, Item, Loss

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
        if isinstance(item, Chunk):
            self._chunks += 1
            self._rows += len(item.token_ids) * len(item.block.sites)
            self._checksums += struct.pack("<I", response.captured.tensor.crc32c)
        elif isinstance(item, Loss):
            self._dropped += item.rows
        elif isinstance(item, End):
            end = response.end_of_request
            end.chunks, end.rows, end.dropped_rows = self._chunks, self._rows, self._dropped
            end.crc32c = google_crc32c.value(bytes(self._checksums))
            end.finish_reasons.extend(item.tap.finish_reasons)
            end.attached.extend(to_wire([item.tap]))


async def message_of(item: Item) -> Response:
    """The message of an item, without its sequence number."""
    if isinstance(item, Chunk):
        return Response(captured=await offload(item.block.work, _captured, item))
    if isinstance(item, Loss):
        return Response(
            dropped=capture_pb2.Dropped(
                request_id=item.tap.request_id,
                spec=item.spec,
                sample=item.track.sample,
                baseline=item.track.baseline,
                rows=item.rows,
                positions=wire_runs(item.positions),
            )
        )
    return Response(end_of_request=capture_service_pb2.EndOfRequest(request_id=item.tap.request_id))


def _captured(chunk: Chunk) -> capture_pb2.Captured:
    message = to_captured(
        chunk.block, chunk.track.sample, chunk.token_ids, baseline=chunk.track.baseline
    )
    message.request_id = chunk.tap.request_id
    return message
