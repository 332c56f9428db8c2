"""A client's call, as the server answers it: bytes in, bytes out, and one status.

`GrpcCall` is a call that this process got from gRPC. `remote_call.RemoteCall` is a call that a
front end got. Whoever answers a call does not notice which of the two it is.
"""

import asyncio
from collections.abc import Awaitable
from typing import NoReturn, Protocol

import grpc
import grpc.aio
from google.rpc import status_pb2

from rheostat_server.limits import STATUS_SECONDS
from rheostat_server.message_parts import MessageParts

DETAILS_KEY = "grpc-status-details-bin"
"""Key of the trailing metadata that holds a status with its details."""

Context = grpc.aio.ServicerContext[bytes, bytes]


class Call(Protocol):
    """A call that is being answered.

    If its client disconnects, the task that answers it is cancelled.
    """

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None if it has set none."""

    def connection(self) -> str | None:
        """The client's connection by which the call came; None if it is not known."""

    def received(self) -> bool:
        """Whether the next message has come, so that `read` returns at once."""

    async def read(self) -> bytes | None:
        """The client's next message; None once the client has closed its side of the stream.

        Raises:
            CancelledError: the client has disconnected.
        """

    async def send_headers(self) -> None:
        """Sends the headers of the response, once before the first message.

        gRPC would send them with the first message. While headers are being sent, gRPC cannot end a
        call with an error. So the task may not be cancelled here in order to call `fail`.

        Raises:
            CancelledError: the client has disconnected.
        """

    async def write(self, message: bytes | MessageParts) -> None:
        """Sends a message. Returns when gRPC has taken all but a few of the last messages.

        So a slow client slows its writer.

        Raises:
            CancelledError: the client has disconnected.
        """

    async def flush(self) -> None:
        """Returns when gRPC has taken all messages.

        Raises:
            CancelledError: the client has disconnected.
        """

    async def fail(self, status: status_pb2.Status) -> None:
        """Ends the call with a status that is not OK; nothing may be called afterwards.

        Messages that gRPC has not taken go first. If the client does not read them, they are
        dropped after `STATUS_SECONDS`.

        The caller's frame must hold no request, and must not be handling an exception. gRPC keeps
        the exception of its `abort` until a garbage collection, with all its frames.

        Raises:
            AbortError: the status was sent. It must reach gRPC.
            CancelledError: the client has disconnected, or did not read for `STATUS_SECONDS`.
        """


class GrpcCall:
    """A call of the gRPC server in this process."""

    def __init__(self, context: Context) -> None:
        """The call of a handler of `grpc.stream_stream_rpc_method_handler`, without codecs."""
        self._context = context

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None if it has set none."""
        return self._context.time_remaining()

    def connection(self) -> str:
        """The client's connection by which the call came."""
        return self._context.peer()

    def received(self) -> bool:
        """Nothing has: gRPC receives a message when it is read."""
        return False

    async def read(self) -> bytes | None:
        """The client's next message; None once the client has closed its side of the stream."""
        message = await self._context.read()
        if isinstance(message, bytes):
            return message
        # gRPC ends the stream of a client that disconnects like that of a client that has sent all.
        await asyncio.sleep(0)
        if self._context.cancelled():
            raise asyncio.CancelledError
        return None

    async def send_headers(self) -> None:
        """Sends the headers of the response, once before the first message."""
        await _sent(self._context.send_initial_metadata(()))

    async def write(self, message: bytes | MessageParts) -> None:
        """Sends a message. Returns when gRPC has taken it."""
        await _sent(
            self._context.write(message if isinstance(message, bytes) else message.joined())
        )

    async def flush(self) -> None:
        """Does nothing: `write` has waited for every message."""

    async def fail(self, status: status_pb2.Status) -> NoReturn:
        """Ends the call. If the client does not read, gRPC keeps the status until it does."""
        code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
        details = ((DETAILS_KEY, status.SerializeToString()),)
        sending = self._context.abort(code, status.message, trailing_metadata=details)
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                await _sent(sending)
        except TimeoutError:
            raise asyncio.CancelledError from None
        raise AssertionError("gRPC's abort always raises")


async def _sent(sending: Awaitable[None]) -> None:
    """Waits until headers, a message or a status are sent.

    Raises:
        CancelledError: the client has disconnected. In most cases gRPC raises this error itself.
            If a message waits for room in the connection, gRPC raises `InternalError` instead.
    """
    try:
        await sending
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error
