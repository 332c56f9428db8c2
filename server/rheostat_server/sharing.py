"""Rows on their way into shared memory, straight from where the engine left them."""

import math

import google_crc32c
import numpy as np

from rheostat._proto.v1 import tensor_pb2
from rheostat_server.capture_stream import Block
from rheostat_server.limits import SHARED_BYTES
from rheostat_server.offload import offload
from rheostat_server.shared_memory import Arena, Payload
from rheostat_server.tensors import converted


async def shared_tensor(block: Block, arena: Arena) -> tensor_pb2.Tensor:
    """The rows of a block as they travel: in shared memory, where there is room for them."""
    if block.form.encoding != tensor_pb2.ENCODING_RAW:
        tensor = await offload(block.work, block.encoded)
        await _move(tensor, arena)
        return tensor
    shape = (len(block.sites), len(block.positions), block.rows[0].shape[1])
    size = math.prod(shape) * block.wanted.itemsize
    offset = await arena.place(size) if size >= SHARED_BYTES else None
    if offset is None:
        return await offload(block.work, block.encoded)
    try:
        crc32c = await offload(size, _write_rows, block, arena.room(offset, size))
    except BaseException:
        arena.free(offset)
        raise
    return tensor_pb2.Tensor(
        dtype=block.wanted.wire,
        shape=shape,
        encoding=tensor_pb2.ENCODING_RAW,
        shm=arena.ref(offset, size),
        crc32c=crc32c,
    )


async def _move(tensor: tensor_pb2.Tensor, arena: Arena) -> None:
    payload = tensor.inline
    offset = await arena.place(len(payload)) if len(payload) >= SHARED_BYTES else None
    if offset is not None:
        arena.room(offset, len(payload))[:] = np.frombuffer(payload, np.uint8)
        tensor.shm.CopyFrom(arena.ref(offset, len(payload)))


def _write_rows(block: Block, room: Payload) -> int:
    """Writes rows as ENCODING_RAW has them; their CRC-32C."""
    parts = block.rows
    if block.held is not block.wanted:
        parts = tuple(converted(part, held=block.held, wanted=block.wanted) for part in parts)
    width = parts[0].shape[1]
    np.concatenate(parts, out=room.view(parts[0].dtype).reshape(-1, width))
    return google_crc32c.value(room)
