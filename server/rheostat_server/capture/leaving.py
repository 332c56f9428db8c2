"""What leaves a tap: rows, word of rows that are lost, and the end."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rheostat_engine import Spans
from rheostat_server.capture.stream import Block
from rheostat_wire.v1 import capture_pb2

if TYPE_CHECKING:
    from rheostat_server.capture.taps import Tap


class Track(NamedTuple):
    """One of a request's sequences of tokens."""

    sample: int
    """Which sample."""
    baseline: bool
    """Whether it is the sample's baseline."""


class Chunk(NamedTuple):
    """Rows that leave."""

    tap: "Tap"
    track: Track
    block: Block
    token_ids: Sequence[int]
    """Input tokens at the block's positions."""


class Sealed(NamedTuple):
    """Rows that leave as the message that they have become."""

    tap: "Tap"
    track: Track
    message: capture_pb2.Captured


class Loss(NamedTuple):
    """Rows that are lost."""

    tap: "Tap"
    track: Track
    capture_index: int
    """Number of the capture."""
    positions: Spans
    """Where."""
    rows: int
    """How many: positions times sites."""


class End(NamedTuple):
    """Everything of a request has left."""

    tap: "Tap"


Item = Chunk | Sealed | Loss | End


def size_of(item: Item) -> int:
    """Bytes of rows that an item holds in memory."""
    if isinstance(item, Chunk):
        return item.block.size
    return len(item.message.tensor.inline) if isinstance(item, Sealed) else 0
