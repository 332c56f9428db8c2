"""Rows on their way into messages and shared memory, straight from where the engine left them."""

import math
from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import google_crc32c
import numpy as np

from rheostat_server.capture.row_tensors import elements
from rheostat_server.capture.stream import Block
from rheostat_server.limits import SHARED_BYTES
from rheostat_server.offload import offload
from rheostat_server.subscriptions.shared_memory import Arena, Payload
from rheostat_wire.dtypes import StoredArray
from rheostat_wire.v1 import tensor_pb2

T = TypeVar("T")


async def write_shared(block: Block, arena: Arena, tensor: tensor_pb2.Tensor) -> int:
    """Makes a tensor of a block's rows, in shared memory where there is room; bytes of payload."""
    if block.capture.form.encoding != tensor_pb2.ENCODING_RAW:
        size = await offload(block.work, write_inline, block, tensor)
        await move_shared(tensor, arena)
        return size
    size = math.prod(_shape(block)) * block.capture.kind.itemsize
    put = await _put(size, partial(_write_rows, block), arena)
    if put is None:
        return await offload(block.work, write_inline, block, tensor)
    _describe(block, tensor)
    tensor.shm.CopyFrom(put.ref)
    tensor.crc32c = put.result
    return size


async def move_shared(tensor: tensor_pb2.Tensor, arena: Arena) -> None:
    """Moves a tensor's payload into shared memory, if there is room."""
    payload = np.frombuffer(tensor.inline, np.uint8)
    moved = await _put(len(payload), lambda room: np.copyto(room, payload), arena)
    if moved is not None:
        tensor.shm.CopyFrom(moved.ref)


def write_inline(block: Block, tensor: tensor_pb2.Tensor) -> int:
    """Makes a tensor of a block's rows, inside its message; bytes of payload."""
    if block.capture.form.encoding != tensor_pb2.ENCODING_RAW:
        tensor.CopyFrom(block.encoded())
        return len(tensor.inline)
    payload = b"".join(part.data for part in _elements(block))  # each copy of a megabyte counts
    _describe(block, tensor)
    tensor.inline = payload
    tensor.crc32c = google_crc32c.value(payload)
    return len(payload)


def _shape(block: Block) -> tuple[int, int, int]:
    return len(block.sites), len(block.positions), block.capture.numbers


def _describe(block: Block, tensor: tensor_pb2.Tensor) -> None:
    tensor.dtype = block.capture.kind.wire
    tensor.shape.extend(_shape(block))
    tensor.encoding = tensor_pb2.ENCODING_RAW


def _elements(block: Block) -> list[StoredArray]:
    """The rows of each site as they travel, [positions, numbers]."""
    return [elements(part, block.capture, block.held) for part in block.parts]


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
    except Exception:  # not where it is cancelled: the thread may still write
        arena.free(offset)
        raise
    return _Put(arena.ref(offset, size), result)


def _write_rows(block: Block, room: Payload) -> int:
    """Writes rows as ENCODING_RAW has them; their CRC-32C."""
    parts = _elements(block)
    np.concatenate(parts, out=room.view(parts[0].dtype).reshape(-1, parts[0].shape[1]))
    crc32c: int = google_crc32c.value(room)
    return crc32c
