"""What leaves a tap, as messages without the request's id."""

from rheostat_server.capture.leaving import Chunk, Loss, Sealed
from rheostat_server.capture.stream import to_captured, wire_runs
from rheostat_server.offload import offload
from rheostat_wire.v1 import capture_pb2


def captured_of(chunk: Chunk) -> capture_pb2.Captured:
    """Rows, encoded."""
    return to_captured(
        chunk.block, chunk.track.sample, chunk.token_ids, baseline=chunk.track.baseline
    )


async def captured(item: Chunk | Sealed) -> capture_pb2.Captured:
    """Rows, encoded off the event loop if they are many."""
    if isinstance(item, Sealed):
        return item.message
    return await offload(item.block.work, captured_of, item)


def dropped(loss: Loss) -> capture_pb2.Dropped:
    """Rows that are lost."""
    return capture_pb2.Dropped(
        capture_index=loss.capture_index,
        sample=loss.track.sample,
        baseline=loss.track.baseline,
        row_count=loss.rows,
        positions=wire_runs(loss.positions),
    )
