"""What leaves a tap: rows, word of rows that are lost, and the end."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rheostat_engine import Spans
from rheostat_server.delivery.stream import Block
from rheostat_wire.v1 import capture_pb2

if TYPE_CHECKING:
    from rheostat_server.delivery.row_feed import RowFeed


class SequenceKey(NamedTuple):
    """One of a request's sequences of tokens."""

    sample: int
    """Which sample."""
    baseline: bool
    """Whether it is the sample's baseline."""


class Chunk(NamedTuple):
    """Rows that leave."""

    feed: "RowFeed"
    track: SequenceKey
    block: Block
    token_ids: Sequence[int]
    """Input tokens at the block's positions."""


class EncodedChunk(NamedTuple):
    """Rows that leave as the message that they have become."""

    feed: "RowFeed"
    track: SequenceKey
    message: capture_pb2.Captured


class Loss(NamedTuple):
    """Rows that are lost."""

    feed: "RowFeed"
    track: SequenceKey
    capture_index: int
    """Number of the capture."""
    positions: Spans
    """Where."""
    rows: int
    """How many: positions times sites."""


class End(NamedTuple):
    """Everything of a request has left."""

    feed: "RowFeed"


DeliveryItem = Chunk | EncodedChunk | Loss | End


def size_of(item: DeliveryItem) -> int:
    """Bytes of rows that an item holds in memory."""
    if isinstance(item, Chunk):
        return item.block.size
    return len(item.message.tensor.inline) if isinstance(item, EncodedChunk) else 0
