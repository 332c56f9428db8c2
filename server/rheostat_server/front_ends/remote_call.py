"""A call that a front end got from its client, as the server answers it."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from google.rpc import code_pb2, status_pb2

from rheostat_server.front_ends.records import Kind
from rheostat_server.limits import STATUS_SECONDS

T = TypeVar("T")

_ABANDONED = status_pb2.Status(
    code=code_pb2.CANCELLED, message="the server stopped answering the call"
).SerializeToString()

Send = Callable[[Kind, bytes], None]
"""Sends a record of the call to the front end."""


class RemoteCall:
    """A call of a front end. See `Call`."""

    def __init__(self, send: Send, remaining: float | None) -> None:
        """A call that begins now.

        Args:
            send: sends a record of the call.
            remaining: seconds until the client's deadline; None if it has set none.
        """
        self._send = send
        self._clock = asyncio.get_running_loop().time
        self._deadline = None if remaining is None else self._clock() + remaining
        self._read: asyncio.Future[bytes | None] | None = None
        self._written: asyncio.Future[None] | None = None
        self._half_closed = False
        self._done = asyncio.Event()
        self.ended = False
        """Whether the front end was told how the call ends."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None if it has set none."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    async def read(self) -> bytes | None:
        """The client's next message; None once the client has closed its side of the stream."""
        if self._half_closed:
            return None
        self._read = asyncio.get_running_loop().create_future()
        self._send(Kind.READ, b"")
        return await self._read

    async def send_headers(self) -> None:
        """Does nothing: the front end sends the headers before the first message."""

    async def write(self, message: bytes) -> None:
        """Sends a message. Returns when the front end's gRPC has taken it."""
        self._written = asyncio.get_running_loop().create_future()
        self._send(Kind.MESSAGE, message)
        await self._written

    async def fail(self, status: status_pb2.Status) -> None:
        """Ends the call, and waits until the front end has sent the status."""
        self._end(status.SerializeToString())
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                await self._done.wait()
        except TimeoutError:
            raise asyncio.CancelledError from None

    def end(self) -> None:
        """Ends the call with OK, unless it has failed."""
        if not self.ended:
            self._end(b"")

    def abandon(self) -> None:
        """Ends the call with CANCELLED, unless it has ended.

        Its client must not take an answer that broke off for a complete one.
        """
        if not self.ended:
            self._end(_ABANDONED)

    def _end(self, status: bytes) -> None:
        self.ended = True
        self._send(Kind.END, status)

    def receive(self, kind: Kind, body: bytes) -> None:
        """Takes a record of the front end."""
        if kind is Kind.WRITTEN:
            _resolve(self._written, None)
        elif kind is Kind.MESSAGE:
            _resolve(self._read, body)
        elif kind is Kind.HALF_CLOSED:
            self._half_closed = True
            _resolve(self._read, None)
        elif kind is Kind.DONE:
            self._done.set()


def _resolve(future: "asyncio.Future[T] | None", result: T) -> None:
    """Gives a future its result, unless nobody waits for it any more."""
    if future is not None and not future.done():
        future.set_result(result)
