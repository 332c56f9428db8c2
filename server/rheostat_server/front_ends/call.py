"""The interface of a client's call: bytes in, bytes out, and one status.

`GrpcCall` is a call that this process received from gRPC. `remote_call.RemoteCall` is a call that a
front end received. The code that answers a call does not depend on which it is.
"""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import NoReturn, Protocol, TypeVar, cast

import grpc
import grpc.aio
from google.rpc import status_pb2

from rheostat_server.limits import STATUS_SECONDS
from rheostat_server.tasks.eager import finish_without_task
from rheostat_wire.message_parts import MessageParts

_LOG = logging.getLogger(__name__)

DETAILS_KEY = "grpc-status-details-bin"
"""Key of the trailing metadata that holds a status with its details."""

Context = grpc.aio.ServicerContext[bytes, bytes]

T = TypeVar("T")

_WITH_HEADERS = 16 << 10
"""Bytes of the longest first message that is sent with the headers. By default HTTP/2 lets a server
send 64 KiB before the client reads, so the headers do not wait for that."""


class Call(Protocol):
    """A call. If its client disconnects, the task that answers it is cancelled."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None if there is none."""

    def connection(self) -> str | None:
        """The address of the client's connection; None if it is unknown."""

    def received(self) -> bool:
        """Whether the next message has arrived, so that `read` does not wait."""

    async def read(self) -> bytes | None:
        """The client's next message; None once the client has closed its side of the stream.

        Raises:
            CancelledError: the client has disconnected.
        """

    async def write(self, message: bytes | MessageParts) -> None:
        """Sends a message. Returns when gRPC has taken all but a few of the last messages.

        So a slow client blocks its writer.

        Raises:
            CancelledError: the client has disconnected.
        """

    @property
    def writes_cheaply(self) -> bool:
        """Whether `write_now` takes so little time that all calls may do it in one iteration."""

    def has_room(self) -> bool:
        """Whether `write` would not wait, so that `write_now` may be called."""

    def write_now(self, message: bytes | MessageParts) -> None:
        """Sends a message. To be called if `has_room`, while no other method runs."""

    async def flush(self) -> None:
        """Returns when gRPC has taken all messages.

        Raises:
            CancelledError: the client has disconnected.
        """

    async def fail(self, status: status_pb2.Status) -> None:
        """Ends the call with a status that is not OK. No method may be called afterwards.

        Earlier messages are sent first. If the client does not read them, they are dropped after
        `STATUS_SECONDS`.

        The caller's frame must not refer to a request or handle an exception, because gRPC keeps
        the exception of its `abort`, with all frames, until it has released the call.

        Raises:
            AbortError: the status was sent. It must reach gRPC.
            CancelledError: the client has disconnected, or did not read for `STATUS_SECONDS`.
        """


class GrpcCall:
    """A call of the gRPC server in this process, whose handler has no codecs."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._headers: asyncio.Future[None] | None = None
        """Sends the headers of the response; None before the first message."""
        self._writing = False
        """Whether gRPC has not taken the message of `write_now`."""
        self._written: asyncio.Future[None] | None = None
        """Is resolved once gRPC has taken it; None if nobody waits for that."""
        self._broken = False
        """Whether gRPC has refused a message of `write_now`, because the client has gone."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None if it has set none."""
        return self._context.time_remaining()

    def connection(self) -> str:
        """The address of the client's connection."""
        return self._context.peer()

    def received(self) -> bool:
        """False, because gRPC receives a message only when `read` is called."""
        return False

    async def read(self) -> bytes | None:
        """The client's next message; None once the client has closed its side of the stream."""
        message = await self._context.read()
        if isinstance(message, bytes):
            return message
        # gRPC reports a disconnected client like a client that has closed its side.
        await asyncio.sleep(0)
        if self._context.cancelled():
            raise asyncio.CancelledError
        return None

    async def write(self, message: bytes | MessageParts) -> None:
        """Sends a message. Returns when gRPC has taken it, which takes one message at a time.

        gRPC sends the headers with the first message, unless they were sent before. That is faster:
        alone, they take about as long as a message.
        """
        await self.flush()
        joined = message if isinstance(message, bytes) else message.joined()
        if self._headers is None:
            with_headers = len(joined) <= _WITH_HEADERS
            sending = (
                self._context.write(joined)
                if with_headers
                else self._context.send_initial_metadata(())
            )
            self._headers = asyncio.ensure_future(_sent(sending))
            await asyncio.shield(self._headers)  # a cancelled write would never send the headers
            if with_headers:
                return
        await _sent(self._context.write(joined))

    @property
    def writes_cheaply(self) -> bool:
        """False, because gRPC takes longer for a message than the rest of the server."""
        return False

    def has_room(self) -> bool:
        """Whether gRPC has taken the headers and the last message."""
        if self._writing or self._broken or self._headers is None:
            return False
        return self._headers.done()

    def write_now(self, message: bytes | MessageParts) -> None:
        """Sends a message."""
        joined = message if isinstance(message, bytes) else message.joined()
        self._writing = True
        writing = cast(Coroutine[object, None, None], self._context.write(joined))
        finish_without_task(writing, self._on_written)

    def _on_written(self, error: Exception | None) -> None:
        self._writing = False
        if error is not None:
            if not isinstance(error, grpc.aio.BaseError):
                _LOG.error("a message was not sent", exc_info=error)
            self._broken = True
        if self._written is not None and not self._written.done():
            self._written.set_result(None)

    async def flush(self) -> None:
        """Returns when gRPC has taken the message of `write_now`."""
        if self._writing:
            self._written = asyncio.get_running_loop().create_future()
            await self._written
            self._written = None
        if self._broken:
            raise asyncio.CancelledError

    async def fail(self, status: status_pb2.Status) -> NoReturn:
        """Ends the call. gRPC keeps the status until the client reads it."""
        code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
        details = ((DETAILS_KEY, status.SerializeToString()),)
        context = self._context
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                if self._headers is not None:
                    await self._headers  # while they are being sent, gRPC cannot send a status
                await _sent(context.abort(code, status.message, trailing_metadata=details))
        except TimeoutError:
            raise asyncio.CancelledError from None
        finally:
            # gRPC's context keeps the exception of `abort`, whose traceback refers to this frame.
            # Without these references, both are freed with the context, not by a collection.
            del context, self._context
        raise AssertionError("gRPC's abort always raises")


async def _sent(sending: Awaitable[None]) -> None:
    """Waits until headers, a message or a status are sent.

    Raises:
        CancelledError: the client has disconnected. In most cases gRPC raises this error itself.
            If a message waits for flow control, gRPC raises `InternalError` instead.
    """
    try:
        await sending
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


def resolve(future: "asyncio.Future[T] | None", result: T) -> None:
    """Sets the result of a future, if there is one and its waiter was not cancelled."""
    if future is not None and not future.done():
        future.set_result(result)
