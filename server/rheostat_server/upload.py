"""An upload of one vector: a header, chunks, and a check that they are what the header says."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import NamedTuple

from rheostat._proto.v1 import steering_service_pb2
from rheostat_server import checks
from rheostat_server.checks import join
from rheostat_server.errors import (
    DigestMismatch,
    InvalidValue,
    MessageTooLarge,
    MissingField,
    RheostatError,
    StoreFull,
    TruncatedUpload,
    VectorShape,
)
from rheostat_server.limits import CHUNK_BYTES, LAYERS, VECTOR_BYTES
from rheostat_server.offload import offload
from rheostat_server.tensors import FloatType, float_type
from rheostat_server.vectors import Vector, make_vector, vector_rows

_DESCRIPTION_BYTES = 1024

_POINTS = 5

_PATIENCE = 1.0
"""Seconds for which a refused upload is read on."""


class Upload(NamedTuple):
    """A vector and what was said of it."""

    header: steering_service_pb2.VectorHeader
    vector: Vector


async def receive(
    messages: AsyncIterator[steering_service_pb2.PutVectorsRequest], width: int, capacity: int
) -> Upload:
    """Reads an upload to its end, also one that is refused.

    Python's asyncio gRPC reports a write that finds the call ended as INTERNAL, and loses the
    status that ended it. So a refusal waits, for a moment, until its sender has written.

    Args:
        messages: the header, then chunks.
        width: W of the model.
        capacity: bytes of the store.

    Raises:
        InvalidArgument: the upload is not what its header says.
        ResourceExhausted: it is too large.
    """
    try:
        return await _receive(messages, width, capacity)
    except RheostatError:
        await _read_on(messages)
        raise


async def _read_on(messages: AsyncIterator[steering_service_pb2.PutVectorsRequest]) -> None:
    left = VECTOR_BYTES
    with suppress(TimeoutError, RheostatError):
        async with asyncio.timeout(_PATIENCE):
            async for message in messages:
                left -= max(len(message.chunk), 1)
                if left < 0:
                    return


async def _receive(
    messages: AsyncIterator[steering_service_pb2.PutVectorsRequest], width: int, capacity: int
) -> Upload:
    header: steering_service_pb2.VectorHeader | None = None
    data = bytearray()
    async for message in messages:
        part = checks.required(message.WhichOneof("part"), "", "header and chunk")
        if header is None:
            if part != "header":
                raise MissingField("the first message is the header", field="header")
            header = message.header
            _check_header(header, width, capacity)
        elif part == "header":
            raise InvalidValue("only the first message is a header", field="header")
        else:
            _append(data, message.chunk, header.total_bytes)
    if header is None:
        raise TruncatedUpload("the upload ended without a header", field="header")
    if len(data) < header.total_bytes:
        raise TruncatedUpload(
            f"{len(data)} of {header.total_bytes} bytes came", field="header.total_bytes"
        )
    kind = float_type(header.dtype, "header.dtype")
    rows = header.shape[0]
    vector = await offload(len(data), make_vector, kind, rows, width, bytes(data), "chunk")
    if header.digest and header.digest != vector.digest:
        raise DigestMismatch(
            f"the bytes have the digest {vector.digest.hex()}", field="header.digest"
        )
    return Upload(header, vector)


def check_label(name: str, description: str, path: str) -> None:
    """Checks a name, which may be empty, and what is kept with it.

    Raises:
        InvalidValue: it is no name, or the description is too long.
    """
    if name:
        checks.matches(name, checks.VECTOR_NAME, join(path, "name"))
    if len(description.encode()) > _DESCRIPTION_BYTES:
        raise InvalidValue(
            f"has more than {_DESCRIPTION_BYTES} bytes", field=join(path, "description")
        )


def _append(data: bytearray, chunk: bytes, total: int) -> None:
    if not 1 <= len(chunk) <= CHUNK_BYTES:
        raise InvalidValue(f"a chunk has 1 to {CHUNK_BYTES} bytes", field="chunk")
    if len(data) + len(chunk) > total:
        raise InvalidValue(f"more than the header's {total} bytes came", field="chunk")
    data += chunk


def _check_header(header: steering_service_pb2.VectorHeader, width: int, capacity: int) -> None:
    kind = float_type(header.dtype, "header.dtype")
    _check_shape(header, width, kind)
    if header.digest and len(header.digest) != hashlib.sha256().digest_size:
        raise InvalidValue("a digest has 32 bytes", field="header.digest")
    check_label(header.name, header.description, "header")
    checks.at_most(len(header.sites.points), _POINTS, "header.sites.points", "points")
    checks.at_most(len(header.sites.list.layers), LAYERS, "header.sites.list.layers", "layers")
    total = header.total_bytes
    if total > VECTOR_BYTES:
        raise MessageTooLarge(
            f"{total} bytes; a vector has at most {VECTOR_BYTES}", field="header.total_bytes"
        )
    if total > capacity:
        raise StoreFull(
            f"{total} bytes; the whole store has {capacity}. Give it more with --vector-store-mib",
            field="header.total_bytes",
        )


def _check_shape(header: steering_service_pb2.VectorHeader, width: int, kind: FloatType) -> None:
    expected = vector_rows(header.shape, width, "header.shape") * width * kind.itemsize
    if header.total_bytes != expected:
        raise VectorShape(
            f"dtype and shape want {expected} bytes, total_bytes says {header.total_bytes}",
            field="header.total_bytes",
            metadata={"expected": str(expected), "got": str(header.total_bytes)},
        )
