"""Writes rows into shared memory, directly from the engine's arrays."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rheostat_server.delivery.block import Block
from rheostat_server.delivery.items import Chunk
from rheostat_server.delivery.row_messages import CapturedRows, label_captured
from rheostat_server.limits import SHARED_BYTES
from rheostat_server.subscriptions.shared_memory import Arena, Payload
from rheostat_server.tasks.offload import offload
from rheostat_wire.v1 import capture_pb2, tensor_pb2


class SharedRange(NamedTuple):
    """Shared memory for one payload."""

    ref: tensor_pb2.ShmRef
    """Its place in the arena."""
    memory: Payload
    """The memory."""


async def reserve_shared(
    blocks: Sequence[Block | None], arena: Arena | None
) -> list[SharedRange | None]:
    """Reserves shared memory for the rows of blocks; None if they travel in their message.

    Args:
        blocks: the blocks; None if an item has no rows.
        arena: the shared memory; None if there is none.
    """
    places: list[SharedRange | None] = [None] * len(blocks)
    if arena is None:
        return places
    try:
        for index, block in enumerate(blocks):
            if block is not None and block.capture.form.encoding == tensor_pb2.ENCODING_RAW:
                places[index] = await _reserve(_raw_bytes(block), arena)
    except BaseException:
        give_back(places, arena)
        raise
    return places


def give_back(places: Sequence[SharedRange | None], arena: Arena | None) -> None:
    """Frees ranges to which nothing was written."""
    for place in places:
        if place is not None and arena is not None:
            arena.free(place.ref.offset)


async def move_shared(tensor: tensor_pb2.Tensor, arena: Arena) -> None:
    """Moves a tensor's payload into shared memory, if it fits."""
    payload = np.frombuffer(tensor.inline, np.uint8)  # a copy
    place = await _reserve(len(payload), arena)
    if place is None:
        return
    try:
        await offload(len(payload), np.copyto, place.memory, payload)
    except Exception:  # not where it is cancelled: the thread may still write
        arena.free(place.ref.offset)
        raise
    tensor.shm.CopyFrom(place.ref)


def shared_rows(chunk: Chunk, place: SharedRange) -> CapturedRows:
    """Writes raw rows into shared memory; returns their message."""
    message, block = capture_pb2.Captured(), chunk.block
    label_captured(message, chunk)
    block.write_raw(message.tensor, place.memory)
    message.tensor.shm.CopyFrom(place.ref)
    return CapturedRows(message)


def _raw_bytes(block: Block) -> int:
    capture = block.capture
    rows = len(block.sites) * len(block.positions)
    return rows * capture.numbers * capture.kind.itemsize


async def _reserve(size: int, arena: Arena) -> SharedRange | None:
    """Reserves shared memory for a payload; None if it is small or does not fit."""
    offset = await arena.place(size) if size >= SHARED_BYTES else None
    return (
        None if offset is None else SharedRange(arena.ref(offset, size), arena.view(offset, size))
    )
