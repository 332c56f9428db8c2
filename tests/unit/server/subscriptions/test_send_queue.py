"""What a subscription sends next: in order, each once, though calls come and go meanwhile."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from rheostat_engine import OPEN_END, Point, Rows, Site
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.delivery.delivery_buffer import DeliveryBuffer
from rheostat_server.delivery.items import Chunk, DeliveryItem, EncodedChunk, End, SequenceKey
from rheostat_server.delivery.row_feed import RowFeed
from rheostat_server.selectors.selection import Selection
from rheostat_server.subscriptions.messages import Message, Response
from rheostat_server.subscriptions.send_queue import SendQueue
from rheostat_server.tensors import FloatType
from rheostat_wire.v1 import capture_pb2

from ..streams import until

SITE = Site(Point.RESID_POST, 0)
WIDTH = 1 << 18
"""A row of float32 is so long that a thread encodes it."""


class PayloadTransport:
    """Encodes when it is told to."""

    def __init__(self) -> None:
        self.begun: list[DeliveryItem] = []
        self.go = asyncio.Event()
        self.error: Exception | None = None

    async def messages_of(self, items: Sequence[DeliveryItem]) -> list[Message]:
        self.begun += items
        if any(isinstance(item, Chunk | EncodedChunk) for item in items):
            await self.go.wait()
        if self.error is not None:
            raise self.error
        return [
            Message(Response(), payload=item.block.size if isinstance(item, Chunk) else 0)
            for item in items
        ]


def requests(count: int, buffer: DeliveryBuffer) -> None:
    """Requests that have ended, each with one row."""
    capture = ResolvedCapture((SITE,), Selection(((0, OPEN_END),), ()), FloatType.FLOAT32)
    sequence_key = SequenceKey(0, False)
    for number in range(count):
        feed = RowFeed(
            f"r{number}",
            [5],
            {0: capture},
            FloatType.FLOAT32,
            capture_pb2.OVERLOAD_FAIL,
            buffer,
        )
        data = np.zeros((1, WIDTH), np.float32)
        feed.add(sequence_key, Rows("", (SITE.index,), np.zeros(1, np.int32), data[None]))
        feed.extend(sequence_key, [7])
        feed.close()


def send_queue(count: int, limit: int = 1 << 30) -> tuple[SendQueue, PayloadTransport]:
    buffer = DeliveryBuffer(limit, lambda feed, error: None)
    transport = PayloadTransport()
    requests(count, buffer)
    return SendQueue(buffer, transport), transport


async def test_items_come_in_order_and_two_are_begun() -> None:
    one, transport = send_queue(3)
    one.prepare()
    await asyncio.sleep(0)
    assert [type(item) for item in transport.begun] == [Chunk]  # behind it comes an end
    assert (len(one), one.bytes) == (2, 4 * WIDTH)
    transport.go.set()
    taken = []
    while await one.message() is not None:
        taken.append(one.take())
    assert [type(item) for item in taken] == [Chunk, End] * 3
    assert [item.feed.request_id for item in taken] == ["r0", "r0", "r1", "r1", "r2", "r2"]
    assert transport.begun == taken
    assert one.bytes == 0


async def test_a_group_holds_an_eighth_of_the_buffer() -> None:
    """The buffer does not count it."""
    one, _ = send_queue(40, limit=64 << 20)
    one.batched = True
    one.prepare()
    groups = {id(queued.group): queued.group for queued in one._pulled}
    assert len(groups) == 2
    assert one.bytes == 2 * (64 << 20) // 8


async def test_a_call_that_goes_away_takes_nothing_with_it() -> None:
    one, transport = send_queue(1)
    first = asyncio.create_task(one.message())
    second = asyncio.create_task(one.message())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    transport.go.set()
    message = await second
    assert message is not None
    assert message is await one.message()
    assert isinstance(one.take(), Chunk)
    assert sum(isinstance(item, Chunk) for item in transport.begun) == 1


async def test_what_comes_back_from_disk_is_written_once_though_its_call_goes_away() -> None:
    one, transport = send_queue(1)
    (chunk, end) = (one._buffer.take(), one._buffer.take())
    assert isinstance(chunk, Chunk)
    back = [EncodedChunk(chunk.feed, chunk.sequence_key, capture_pb2.Captured()), end]
    one._buffer.take = lambda: back.pop(0) if back else None  # type: ignore[method-assign]  # a disk
    first = asyncio.create_task(one.message())
    second = asyncio.create_task(one.message())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    transport.go.set()
    assert await second is not None
    assert [type(item) for item in transport.begun] == [EncodedChunk]


async def test_items_that_could_not_be_encoded_are_encoded_for_the_next_call(monkeypatch) -> None:
    one, transport = send_queue(1)

    async def full(items: Sequence[DeliveryItem]) -> list[Message]:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(transport, "messages_of", full)
        with pytest.raises(MemoryError):
            await one.message()
    transport.go.set()
    assert await one.message() is not None
    assert isinstance(one.take(), Chunk)


async def test_items_removed_before_their_encoding_begins_are_not_given() -> None:
    one, transport = send_queue(1)
    waiting = asyncio.create_task(one.message())
    await asyncio.sleep(0)
    one.clear()
    transport.go.set()
    assert await waiting is None
    assert len(one) == 0


async def test_items_removed_while_they_are_encoded_fail_no_task() -> None:
    one, transport = send_queue(3)
    one.batched = True  # the groups have several items
    waiting = asyncio.create_task(one.message())
    one.prepare()
    encodings = [queued.group.encoding for queued in one._pulled]
    await until(lambda: bool(transport.begun))
    one.clear()
    transport.go.set()
    assert await waiting is None
    for encoding in encodings:
        assert encoding is not None
        await encoding
    assert (len(one), one.bytes) == (0, 0)


async def test_later_items_go_on_after_items_were_removed_while_they_were_encoded() -> None:
    one, transport = send_queue(1)
    waiting = asyncio.create_task(one.message())
    await until(lambda: bool(transport.begun))
    one.clear()
    requests(1, one._buffer)
    later = asyncio.create_task(one.message())
    transport.go.set()
    assert await waiting is None
    assert await later is not None
    assert isinstance(one.take(), Chunk)


@pytest.mark.parametrize("removed", [True, False])
async def test_an_encoding_that_fails_matters_only_to_items_that_are_still_there(removed) -> None:
    one, transport = send_queue(1)
    transport.error = MemoryError("full")
    waiting = asyncio.create_task(one.message())
    await until(lambda: bool(transport.begun))
    if removed:
        one.clear()
    transport.go.set()
    if removed:
        assert await waiting is None
    else:
        with pytest.raises(MemoryError):
            await waiting
