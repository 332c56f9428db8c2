"""The messages of items, without the request's id."""

from rheostat_server.capture.row_tensors import write_rows
from rheostat_server.delivery.items import Chunk, EncodedChunk, Loss
from rheostat_server.delivery.row_assembler import wire_runs, write_labels
from rheostat_server.tasks.offload import offload
from rheostat_wire.v1 import capture_pb2, generation_service_pb2

Response = generation_service_pb2.GenerateResponse


def label_captured(message: capture_pb2.Captured, chunk: Chunk) -> None:
    """Writes the labels of a chunk's rows into an empty message."""
    sample, baseline = chunk.sequence_key
    write_labels(message, chunk.block, sample, chunk.token_ids, baseline=baseline)


def captured_of(chunk: Chunk) -> capture_pb2.Captured:
    """Rows, encoded."""
    message = capture_pb2.Captured()
    _fill(message, chunk)
    return message


async def captured(item: Chunk | EncodedChunk) -> Response:
    """The response with rows, encoded off the event loop if they are many."""
    if isinstance(item, EncodedChunk):
        return Response(captured=item.message)
    response = Response()
    await offload(item.block.work, _fill, response.captured, item)
    return response


def _fill(message: capture_pb2.Captured, chunk: Chunk) -> None:
    """Writes rows into a message in place, because to copy them would cost as much again."""
    label_captured(message, chunk)
    block = chunk.block
    write_rows(block.parts, block.capture, block.held, message.tensor)


def dropped(loss: Loss) -> capture_pb2.Dropped:
    """Rows that are lost."""
    return capture_pb2.Dropped(
        capture_index=loss.capture_index,
        sample=loss.sequence_key.sample,
        baseline=loss.sequence_key.baseline,
        row_count=loss.rows,
        positions=wire_runs(loss.positions),
    )
