"""The messages of items, without the request's id."""

from collections.abc import Callable
from typing import NamedTuple

from rheostat_engine import Spans
from rheostat_server.capture.row_tensors import bytes_of, tensor_of
from rheostat_server.delivery.items import Chunk, EncodedChunk, Loss
from rheostat_server.limits import OFFLOAD_BYTES
from rheostat_server.selectors.sites import write_site
from rheostat_server.selectors.spans import runs
from rheostat_server.tasks.offload import offload
from rheostat_wire.message_parts import MessageParts, Payload, field_head
from rheostat_wire.v1 import capture_pb2, tensor_pb2, types_pb2


class CapturedRows(NamedTuple):
    """A `Captured` message, whose payload is not copied if it is raw."""

    message: capture_pb2.Captured
    """Complete, unless there is a payload."""
    tensor: tensor_pb2.Tensor | None = None
    """If there is a payload, the message's tensor without it."""
    payload: Payload = b""
    """The tensor's payload, unless it is in the message."""
    sites: bytes = b""
    """The serialized names of the sites, unless they are in the message."""

    def with_own_memory(self) -> "CapturedRows":
        """The same rows, with a payload that keeps no other rows in memory."""
        return self._replace(payload=bytes_of(self.payload))

    def to_message(self) -> capture_pb2.Captured:
        """The complete message, with a copy of the payload."""
        if not self.message.sites:
            self.message.MergeFromString(self.sites)
        if self.tensor is not None:
            self.message.tensor.CopyFrom(self.tensor)
            self.message.tensor.inline = bytes_of(self.payload)
        return self.message

    @property
    def row_count(self) -> int:
        """Number of rows: sites times positions."""
        sites, positions, _ = (self.message.tensor if self.tensor is None else self.tensor).shape
        return sites * positions

    @property
    def crc32c(self) -> int:
        """Checksum of the payload."""
        return (self.message.tensor if self.tensor is None else self.tensor).crc32c

    @property
    def size(self) -> int:
        """Bytes of the payload, in shared memory too. If it is in the message, it is copied."""
        if self.tensor is not None:
            return len(self.payload)
        tensor = self.message.tensor
        return tensor.shm.length if tensor.HasField("shm") else len(tensor.inline)

    def as_field(self, number: int) -> MessageParts:
        """A message in wire format whose only field is this message.

        Args:
            number: the field's number.
        """
        labels = self.message.SerializeToString() + self.sites
        if self.tensor is None:
            return MessageParts((labels,)).as_field(number)
        tensor, size = self.tensor.SerializeToString(), len(self.payload)
        tensor += field_head(tensor_pb2.Tensor.INLINE_FIELD_NUMBER, size)
        labels += field_head(capture_pb2.Captured.TENSOR_FIELD_NUMBER, len(tensor) + size) + tensor
        return MessageParts((field_head(number, len(labels) + size) + labels, self.payload))


def add_runs(add: Callable[[], types_pb2.PositionRun], spans: Spans) -> None:
    """Adds spans to a message's field with its `add`, five times quicker than from a list."""
    for start, end in spans:
        run = add()
        run.start, run.count = start, end - start


def label_captured(message: capture_pb2.Captured, chunk: Chunk, *, with_sites: bool = True) -> None:
    """Writes the labels of a chunk's rows into an empty message, with or without its sites."""
    block, (sample, baseline) = chunk.block, chunk.sequence_key
    if block.capture_index:
        message.capture_index = block.capture_index
    if sample:
        message.sample = sample
    if baseline:
        message.baseline = True
    if with_sites and block.of_all_sites:
        message.MergeFromString(block.capture.site_forms.labels)
    elif with_sites:
        for site in block.sites:
            write_site(message.sites.add(), site)
    add_runs(message.positions.add, runs(block.positions))
    message.token_ids.extend(chunk.token_ids)


def captured_of(chunk: Chunk) -> capture_pb2.Captured:
    """Rows, encoded."""
    return encoded_rows(chunk).to_message()


def few_rows(item: Chunk | EncodedChunk) -> CapturedRows | None:
    """Rows, encoded; None if they are so many that `captured_rows` would encode them elsewhere."""
    if isinstance(item, EncodedChunk):
        return CapturedRows(item.message)
    return encoded_rows(item) if item.block.work <= OFFLOAD_BYTES else None


async def captured_rows(item: Chunk | EncodedChunk) -> CapturedRows:
    """Rows, encoded off the event loop if they are many."""
    if isinstance(item, EncodedChunk):
        return CapturedRows(item.message)
    return await offload(item.block.work, encoded_rows, item)


def encoded_rows(chunk: Chunk) -> CapturedRows:
    """Rows, encoded. A raw payload is a view of them if they are in one array."""
    message, block = capture_pb2.Captured(), chunk.block
    if block.capture.form.encoding != tensor_pb2.ENCODING_RAW:
        label_captured(message, chunk)
        message.tensor.CopyFrom(tensor_of(block.parts, block.capture, block.row_type))
        return CapturedRows(message)
    tensor = tensor_pb2.Tensor()
    label_captured(message, chunk, with_sites=not block.of_all_sites)
    payload = block.write_raw(tensor)
    sites = block.capture.site_forms.labels if block.of_all_sites else b""
    return CapturedRows(message, tensor, payload, sites)


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
