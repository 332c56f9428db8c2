"""The messages of items, without the request's id."""

from collections.abc import Callable

from rheostat_engine import Spans
from rheostat_server.capture.row_tensors import write_rows
from rheostat_server.delivery.items import Chunk, EncodedChunk, Loss
from rheostat_server.selectors.sites import write_site
from rheostat_server.selectors.spans import runs
from rheostat_server.tasks.offload import offload
from rheostat_wire.v1 import capture_pb2, generation_service_pb2, types_pb2

Response = generation_service_pb2.GenerateResponse


def add_runs(add: Callable[[], types_pb2.PositionRun], spans: Spans) -> None:
    """Adds spans to a message's field with its `add`, five times quicker than from a list."""
    for start, end in spans:
        run = add()
        run.start, run.count = start, end - start


def label_captured(message: capture_pb2.Captured, chunk: Chunk) -> None:
    """Writes the labels of a chunk's rows into an empty message."""
    block, (sample, baseline) = chunk.block, chunk.sequence_key
    if block.capture_index:
        message.capture_index = block.capture_index
    if sample:
        message.sample = sample
    if baseline:
        message.baseline = True
    for part in block.parts:
        write_site(message.sites.add(), part.site)
    add_runs(message.positions.add, runs(block.positions))
    message.token_ids.extend(chunk.token_ids)


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
    """Writes rows into a message in place, because copying them would cost as much again."""
    label_captured(message, chunk)
    block = chunk.block
    write_rows(block.parts, block.capture, block.row_type, message.tensor)


def dropped(loss: Loss) -> capture_pb2.Dropped:
    """Rows that are lost."""
    message = capture_pb2.Dropped(
        capture_index=loss.capture_index,
        sample=loss.sequence_key.sample,
        baseline=loss.sequence_key.baseline,
        row_count=loss.rows,
    )
    add_runs(message.positions.add, loss.positions)
    return message
