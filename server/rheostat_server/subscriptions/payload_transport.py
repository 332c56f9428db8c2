"""Rows on their way into messages and shared memory, straight from where the engine left them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rheostat_server.capture.row_tensors import write_rows
from rheostat_server.delivery.stream import Block
from rheostat_server.limits import SHARED_BYTES
from rheostat_server.subscriptions.shared_memory import Arena, Payload
from rheostat_server.tasks.offload import offload
from rheostat_wire.v1 import tensor_pb2


class Place(NamedTuple):
    """Shared memory for one payload."""

    ref: tensor_pb2.ShmRef
    """Where it is."""
    room: Payload
    """The memory."""


async def placed(blocks: Sequence[Block | None], arena: Arena | None) -> list[Place | None]:
    """Shared memory for the rows of blocks; None for those that travel in their messages.

    Args:
        blocks: the blocks; None has no rows.
        arena: the shared memory; None: there is none.
    """
    places: list[Place | None] = [None] * len(blocks)
    if arena is None:
        return places
    try:
        for index, block in enumerate(blocks):
            if block is not None and block.capture.form.encoding == tensor_pb2.ENCODING_RAW:
                places[index] = await _place(_raw_bytes(block), arena)
    except BaseException:
        give_back(places, arena)
        raise
    return places


def give_back(places: Sequence[Place | None], arena: Arena | None) -> None:
    """Frees places that nothing is written to."""
    for place in places:
        if place is not None and arena is not None:
            arena.free(place.ref.offset)


async def move_shared(tensor: tensor_pb2.Tensor, arena: Arena) -> None:
    """Moves a tensor's payload into shared memory, if there is room."""
    payload = np.frombuffer(tensor.inline, np.uint8)  # a copy
    place = await _place(len(payload), arena)
    if place is None:
        return
    try:
        await offload(len(payload), np.copyto, place.room, payload)
    except Exception:  # not where it is cancelled: the thread may still write
        arena.free(place.ref.offset)
        raise
    tensor.shm.CopyFrom(place.ref)


def write_payload(block: Block, place: Place | None, tensor: tensor_pb2.Tensor) -> int:
    """Makes a tensor of a block's rows; returns the bytes of payload.

    Args:
        block: the rows.
        place: where they go, if their encoding is raw; None: into the tensor.
        tensor: an empty tensor.
    """
    room = None if place is None else place.room
    size = write_rows(block.parts, block.capture, block.held, tensor, room)
    if place is not None:
        tensor.shm.CopyFrom(place.ref)
    return size


def _raw_bytes(block: Block) -> int:
    capture = block.capture
    rows = len(block.sites) * len(block.positions)
    return rows * capture.numbers * capture.kind.itemsize


async def _place(size: int, arena: Arena) -> Place | None:
    """Shared memory for a payload of so many bytes; None if they are too few, or find no room."""
    offset = await arena.place(size) if size >= SHARED_BYTES else None
    return None if offset is None else Place(arena.ref(offset, size), arena.room(offset, size))
