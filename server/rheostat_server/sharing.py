"""Rows on their way into shared memory, straight from where the engine left them."""

import math
from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import google_crc32c
import numpy as np

from rheostat._proto.v1 import tensor_pb2
from rheostat_server.capture_stream import Block
from rheostat_server.limits import SHARED_BYTES
from rheostat_server.offload import offload
from rheostat_server.shared_memory import Arena, Payload
from rheostat_server.tensors import converted

T = TypeVar("T")


async def shared_tensor(block: Block, arena: Arena) -> tensor_pb2.Tensor:
    """The rows of a block as they travel: in shared memory, where there is room for them."""
    if block.form.encoding != tensor_pb2.ENCODING_RAW:
        tensor = await offload(block.work, block.encoded)
        payload = np.frombuffer(tensor.inline, np.uint8)
        moved = await _put(len(payload), lambda room: np.copyto(room, payload), arena)
        if moved is not None:
            tensor.shm.CopyFrom(moved.ref)
        return tensor
    shape = (len(block.sites), len(block.positions), block.rows[0].shape[1])
    size = math.prod(shape) * block.wanted.itemsize
    put = await _put(size, partial(_write_rows, block), arena)
    if put is None:
        return await offload(block.work, block.encoded)
    return tensor_pb2.Tensor(
        dtype=block.wanted.wire,
        shape=shape,
        encoding=tensor_pb2.ENCODING_RAW,
        shm=put.ref,
        crc32c=put.result,
    )


class _Put(NamedTuple, Generic[T]):
    """What was written."""

    ref: tensor_pb2.ShmRef
    """Where it is."""
    result: T
    """What writing it gave."""


async def _put(size: int, write: Callable[[Payload], T], arena: Arena) -> _Put[T] | None:
    """Writes so many bytes; None where they are too few, or find no room."""
    offset = await arena.place(size) if size >= SHARED_BYTES else None
    if offset is None:
        return None
    try:
        result = await offload(size, write, arena.room(offset, size))
    except BaseException:
        arena.free(offset)
        raise
    return _Put(arena.ref(offset, size), result)


def _write_rows(block: Block, room: Payload) -> int:
    """Writes rows as ENCODING_RAW has them; their CRC-32C."""
    parts = block.rows
    if block.held is not block.wanted:
        parts = tuple(converted(part, held=block.held, wanted=block.wanted) for part in parts)
    width = parts[0].shape[1]
    np.concatenate(parts, out=room.view(parts[0].dtype).reshape(-1, width))
    crc32c: int = google_crc32c.value(room)
    return crc32c
