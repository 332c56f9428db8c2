"""Upload and download of vectors in chunks. gRPC pulls the messages of an upload one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

from google.protobuf.message import Message

from rheostat._arrays import VectorData
from rheostat._errors import DataLoss, ServerError
from rheostat._steering.vectors import Vector, read_vector
from rheostat_wire.v1 import steering_service_pb2

Progress: TypeAlias = Callable[[int, int], None]
"""Called with (bytes sent, bytes in all), for an upload on gRPC's own thread."""

_CHUNK = 1024 * 1024


class VectorUpload:
    """The header of a vector, then its chunks. An exception of ``progress`` ends the upload."""

    failure: BaseException | None = None
    """The exception of ``progress``. gRPC discards it, so the connection raises it."""

    def __init__(
        self,
        header: steering_service_pb2.VectorHeader,
        data: VectorData,
        progress: Progress | None,
    ) -> None:
        self._header = header
        self._data = data.data
        self._progress = progress

    def __iter__(self) -> Iterator[Message]:
        """The messages; calls ``progress`` for a chunk when the message after it is pulled."""
        yield steering_service_pb2.PutVectorRequest(header=self._header)
        for start in range(0, len(self._data), _CHUNK):
            chunk = self._data[start : start + _CHUNK]
            yield steering_service_pb2.PutVectorRequest(chunk=chunk)
            self._report(start + len(chunk))

    def _report(self, sent: int) -> None:
        if self._progress is None:
            return
        try:
            self._progress(sent, len(self._data))
        except BaseException as error:
            self.failure = error
            raise RuntimeError("the upload's progress callback raised") from error


class VectorAccumulator:
    """Turns `GetVectorResponse` messages into a `Vector` that holds its numbers."""

    def __init__(self) -> None:
        self._info: steering_service_pb2.VectorInfo | None = None
        self._chunks: list[bytes] = []

    def add(self, message: steering_service_pb2.GetVectorResponse) -> list[None]:
        """Store the next chunk."""
        if message.WhichOneof("part") == "info":
            self._info = message.info
        else:
            self._chunks.append(message.chunk)
        return []

    def result(self) -> Vector:
        """The vector. Raises DataLoss if its bytes do not have its digest."""
        if self._info is None:
            raise ServerError("the server sent a vector without a header")
        vector = read_vector(self._info, b"".join(self._chunks))
        if vector.rows is not None and vector.rows.digest.hex() != vector.digest:
            raise DataLoss(
                f"the received bytes do not have the digest of {vector.label}",
                reason="REASON_DIGEST_MISMATCH",
            )
        return vector
