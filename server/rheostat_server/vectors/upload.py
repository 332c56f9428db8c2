"""Uploads of vectors: reads a header and chunks, and checks the chunks against the header.

The elements of all uploads together take at most `UPLOADED_BYTES`, from the header until the vector
is stored or refused. An upload that is too slow is refused, so that it does not occupy memory. A
stored header does not keep the rest of its message in memory.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import NamedTuple

from rheostat_server import validation
from rheostat_server.errors import (
    DigestMismatch,
    InvalidValue,
    MessageTooLarge,
    MissingField,
    QueueFull,
    RheostatError,
    StoreFull,
    TruncatedUpload,
    VectorShape,
)
from rheostat_server.limits import (
    CHUNK_BYTES,
    LAYERS,
    NAME_DESCRIPTION_BYTES,
    POINTS,
    RETRY_SECONDS,
    UPLOADED_BYTES,
    VECTOR_BYTES,
)
from rheostat_server.selectors.sites import refuse_unknown_layers
from rheostat_server.tasks.offload import offload
from rheostat_server.tasks.uploads import drain, next_message
from rheostat_server.tensors import FloatType, float_type
from rheostat_server.validation import field_path
from rheostat_server.vectors.store import Vector, make_vector, vector_rows
from rheostat_wire.v1 import steering_service_pb2, types_pb2

Messages = AsyncIterator[steering_service_pb2.PutVectorRequest]


class Upload(NamedTuple):
    """An uploaded vector with its header."""

    header: steering_service_pb2.VectorHeader
    vector: Vector


class Uploads:
    """Receives the uploads of a server."""

    def __init__(self) -> None:
        self._reserved = 0
        self._converting = asyncio.Lock()

    @asynccontextmanager
    async def receive(
        self, messages: Messages, width: int, layers: int, capacity: int
    ) -> AsyncIterator[Upload]:
        """Reads an upload to its end. Its memory is reserved while the context lasts.

        `width` is W of the model, `layers` its number of layers, `capacity` the bytes of the store.

        Raises:
            InvalidArgument: the upload does not match its header.
            ResourceExhausted: it is too large, or other uploads leave too little memory.
        """
        with ExitStack() as stack:
            try:
                header = await _read_header(messages, width, layers, capacity)
                stack.enter_context(self._reserve(header.total_bytes))
                vector = await self._read_vector(header, messages)
            except RheostatError:
                await drain(messages, lambda message: len(message.chunk))
                raise
            yield Upload(header, vector)

    @contextmanager
    def _reserve(self, size: int) -> Iterator[None]:
        if self._reserved + size > UPLOADED_BYTES:
            raise QueueFull(
                f"the upload has {size} bytes; other uploads leave "
                f"{UPLOADED_BYTES - self._reserved} of {UPLOADED_BYTES}. Try again later",
                field="header.total_bytes",
                retry_after=RETRY_SECONDS,
            )
        self._reserved += size
        try:
            yield
        finally:
            self._reserved -= size

    async def _read_vector(
        self, header: steering_service_pb2.VectorHeader, messages: Messages
    ) -> Vector:
        data = bytearray()
        begun = asyncio.get_running_loop().time()
        total, path = header.total_bytes, "header.total_bytes"
        while (message := await next_message(messages, begun, len(data), total, path)) is not None:
            if _part(message) == "header":
                raise InvalidValue("only the first message is a header", field="header")
            _append(data, message.chunk, total)
        if len(data) < total:
            raise TruncatedUpload(f"{len(data)} of {total} bytes came", field=path)
        # `make_vector` needs several times the memory of the vector, so one runs at a time.
        async with self._converting:
            vector = await offload(len(data), _make, header, data)
        if header.digest and header.digest != vector.digest:
            raise DigestMismatch(
                f"the bytes have the digest {vector.digest.hex()}", field="header.digest"
            )
        return vector


async def _read_header(
    messages: Messages, width: int, layers: int, capacity: int
) -> steering_service_pb2.VectorHeader:
    async for message in messages:
        if _part(message) != "header":
            raise MissingField("the first message is the header", field="header")
        _check_header(message.header, width, layers, capacity)
        return _copy(message.header)
    raise TruncatedUpload("the upload ended without a header", field="header")


def _part(message: steering_service_pb2.PutVectorRequest) -> str:
    return validation.required(message.WhichOneof("part"), "", "header and chunk")


def _copy(header: steering_service_pb2.VectorHeader) -> steering_service_pb2.VectorHeader:
    """Copies a header, because any part of a message keeps all of it in memory."""
    copy = steering_service_pb2.VectorHeader()
    copy.CopyFrom(header)
    return copy


def _make(header: steering_service_pb2.VectorHeader, data: bytearray) -> Vector:
    kind = float_type(header.dtype, "header.dtype")
    rows, width = header.shape
    return make_vector(kind, rows, width, bytes(data), "chunk")


def check_label(name: str, description: str, path: str) -> None:
    """Checks a name, which may be empty, and its description.

    Raises:
        InvalidValue: the name is invalid, or the description is too long.
    """
    if name:
        validation.matches(name, validation.VECTOR_NAME, field_path(path, "name"))
    validation.text_bytes(description, NAME_DESCRIPTION_BYTES, field_path(path, "description"))


def check_default_sites(sites: types_pb2.SiteSet, layer_count: int, path: str) -> None:
    """Checks the default sites of a name, for a model with `layer_count` layers.

    Raises:
        InvalidValue: there are too many.
        UnknownLayer: the model does not have one of the layers.
    """
    validation.check_count(len(sites.points), POINTS, field_path(path, "points"), "points")
    validation.check_count(
        len(sites.list.layers), LAYERS, field_path(path, "list.layers"), "layers"
    )
    refuse_unknown_layers(sites, layer_count, path)


def _append(data: bytearray, chunk: bytes, total: int) -> None:
    if not 1 <= len(chunk) <= CHUNK_BYTES:
        raise InvalidValue(f"a chunk has 1 to {CHUNK_BYTES} bytes", field="chunk")
    if len(data) + len(chunk) > total:
        raise InvalidValue(f"more than the header's {total} bytes came", field="chunk")
    data += chunk


def _check_header(
    header: steering_service_pb2.VectorHeader, width: int, layers: int, capacity: int
) -> None:
    kind = float_type(header.dtype, "header.dtype")
    _check_shape(header, width, kind)
    if header.digest and len(header.digest) != hashlib.sha256().digest_size:
        raise InvalidValue("a digest has 32 bytes", field="header.digest")
    check_label(header.name, header.description, "header")
    check_default_sites(header.sites, layers, "header.sites")
    total = header.total_bytes
    if total > VECTOR_BYTES:
        raise MessageTooLarge(
            f"{total} bytes; a vector has at most {VECTOR_BYTES}", field="header.total_bytes"
        )
    if total > capacity:
        raise StoreFull(
            f"the vector has {total} bytes; the whole store has {capacity}. Raise the server's "
            "--vector-store-mib",
            field="header.total_bytes",
        )


def _check_shape(header: steering_service_pb2.VectorHeader, width: int, kind: FloatType) -> None:
    expected = vector_rows(header.shape, width, "header.shape") * width * kind.itemsize
    if header.total_bytes != expected:
        raise VectorShape(
            f"dtype and shape need {expected} bytes; total_bytes is {header.total_bytes}",
            field="header.total_bytes",
            metadata={"expected": str(expected), "got": str(header.total_bytes)},
        )
