"""The interface of a client's call: bytes in, bytes out, and one status.

`GrpcCall` is a call that this process received from gRPC. `remote_call.RemoteCall` is a call that a
front end received. The code that answers a call does not depend on which it is.
"""

import asyncio
from collections.abc import Awaitable
from typing import NoReturn, Protocol

import grpc
import grpc.aio
from google.rpc import status_pb2

from rheostat_server.limits import STATUS_SECONDS
from rheostat_wire.message_parts import MessageParts

DETAILS_KEY = "grpc-status-details-bin"
"""Key of the trailing metadata that holds a status with its details."""

Context = grpc.aio.ServicerContext[bytes, bytes]

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
        """Sends a message. Returns when gRPC has taken it.

        gRPC sends the headers with the first message, unless they were sent before. That is faster:
        a separate write takes a fifth of a front end's time for a call.
        """
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

    def has_room(self) -> bool:
        """False, because gRPC sends a message only when its coroutine is awaited."""
        return False

    def write_now(self, message: bytes | MessageParts) -> NoReturn:
        """Is never called, because there is never room."""
        raise AssertionError("there is no room")

    async def flush(self) -> None:
        """Does nothing, because `write` waits for every message."""

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
