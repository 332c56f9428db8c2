"""The items that leave a request's feed of rows: rows, losses, and the end."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rheostat_engine import Spans
from rheostat_server.delivery.block import Block
from rheostat_wire.v1 import capture_pb2, types_pb2


class SequenceKey(NamedTuple):
    """One of a request's sequences of tokens."""

    sample: int
    """Which sample."""
    baseline: bool
    """Whether it is the sample's baseline."""


class ItemSource(ABC):
    """A request whose items leave for one reader, as its buffer and its messages see it."""

    def __init__(self, request_id: str, policy: capture_pb2.Overload.ValueType) -> None:
        """A request of which no item has left.

        Args:
            request_id: the request.
            policy: the overload policy of the reader.
        """
        self.request_id = request_id
        self.policy = policy
        self.finish_reasons: Sequence[types_pb2.FinishReason.ValueType] = ()
        self.missed_reason = ""
        """Why the reader misses the rows that it observes; empty if it gets them."""
        self.unreported_rows = 0
        """Rows that are lost, and that no `Loss` has reported."""
        self.first_positions: dict[SequenceKey, int | None] = {}
        """The first captured position of each sequence that ran before the reader was attached;
        None if it is unknown, or if no position is captured."""

    @abstractmethod
    def pull(self) -> "Iterator[DeliveryItem]":
        """Removes and yields the items that can leave."""


class Chunk(NamedTuple):
    """Rows that leave."""

    feed: ItemSource
    sequence_key: SequenceKey
    block: Block
    token_ids: Sequence[int]
    """Input tokens at the block's positions."""


class EncodedChunk(NamedTuple):
    """Rows that leave, and that are encoded already."""

    feed: ItemSource
    sequence_key: SequenceKey
    message: capture_pb2.Captured


class Loss(NamedTuple):
    """Rows that are lost."""

    feed: ItemSource
    sequence_key: SequenceKey
    capture_index: int
    """Number of the capture."""
    positions: Spans
    """Where."""
    rows: int
    """How many: positions times sites."""


class End(NamedTuple):
    """Everything of a request has left."""

    feed: ItemSource


RowItem = Chunk | EncodedChunk | Loss
DeliveryItem = RowItem | End


def size_of(item: DeliveryItem) -> int:
    """Bytes of rows that an item holds in memory."""
    if isinstance(item, Chunk):
        return item.block.size
    return len(item.message.tensor.inline) if isinstance(item, EncodedChunk) else 0
