"""The server's side of a call that a front end received."""

import asyncio
from collections import deque
from typing import Protocol

from google.rpc import code_pb2, status_pb2

from rheostat_server.front_ends.call import resolve
from rheostat_server.front_ends.records import CallBegin, First, Kind, read_count_body
from rheostat_server.limits import STATUS_SECONDS
from rheostat_wire.message_parts import MessageParts, Payload

_ABANDONED = status_pb2.Status(
    code=code_pb2.CANCELLED, message="the server stopped answering the call"
).SerializeToString()

_WINDOW = 4
"""Messages that a call sends before the front end's gRPC has taken the first of them."""

_WINDOW_BYTES = 64 << 10
"""Bytes of these messages. A longer message is sent alone."""


class Send(Protocol):
    """A function that sends a record of the call to the front end."""

    def __call__(self, kind: Kind, *body: Payload) -> None:
        """Sends a record whose body is the concatenated parts."""


class RemoteCall:
    """A call of a front end. See `Call`."""

    def __init__(self, send: Send, begin: CallBegin) -> None:
        self._send = send
        self._clock = asyncio.get_running_loop().time
        remaining = begin.remaining
        self._deadline = None if remaining is None else self._clock() + remaining
        self._connection = begin.connection or None
        self._received = begin.message if begin.first is First.HERE else None
        """The first message, until it is read."""
        self._reading = begin.first is First.READING
        """Whether the front end reads a message that `read` did not request."""
        self._read: asyncio.Future[bytes | None] | None = None
        self._unwritten: deque[int] = deque()
        """Bytes of each message that the front end's gRPC has not taken."""
        self._unwritten_bytes = 0
        self._written: asyncio.Future[None] | None = None
        """Is resolved once at most `_most_unwritten` messages are left."""
        self._most_unwritten = 0
        self._half_closed = False
        self._done = asyncio.Event()
        self.ended = False
        """Whether the server has sent END."""

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None if there is none."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def connection(self) -> str | None:
        """The address of the client's connection; None if the first message came with the call."""
        return self._connection

    def received(self) -> bool:
        """Whether the next message has arrived, so that `read` does not wait."""
        return self._received is not None

    async def read(self) -> bytes | None:
        """The client's next message; None once the client has closed its side of the stream."""
        if self._received is not None:
            message, self._received = self._received, None
            return message
        if self._half_closed:
            return None
        self._read = asyncio.get_running_loop().create_future()
        if not self._reading:
            self._send(Kind.READ)
        self._reading = False
        return await self._read

    async def write(self, message: bytes | MessageParts) -> None:
        """Sends a message. Returns when the front end's gRPC has taken all but a few of the last.

        Waiting for each message would wake the task twice per token.
        """
        self.write_now(message)
        while len(self._unwritten) > _WINDOW or self._unwritten_bytes > _WINDOW_BYTES:
            await self._until_written(min(_WINDOW, len(self._unwritten) - 1))

    @property
    def writes_cheaply(self) -> bool:
        """True, because the front end does most of the work."""
        return True

    def has_room(self) -> bool:
        """Whether the front end's gRPC has taken all but a few of the last messages."""
        return len(self._unwritten) < _WINDOW and self._unwritten_bytes < _WINDOW_BYTES

    def write_now(self, message: bytes | MessageParts) -> None:
        """Sends a message."""
        parts = message if isinstance(message, MessageParts) else (message,)
        size = sum(map(len, parts))
        self._send(Kind.MESSAGE, *parts)
        self._unwritten.append(size)
        self._unwritten_bytes += size

    async def flush(self) -> None:
        """Returns when the front end's gRPC has taken all messages."""
        if self._unwritten:
            await self._until_written(0)

    async def _until_written(self, most: int) -> None:
        """Returns when the front end's gRPC has taken all messages but `most`."""
        self._most_unwritten = most
        self._written = asyncio.get_running_loop().create_future()
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

        Otherwise the client would mistake an incomplete answer for a complete one.
        """
        if not self.ended:
            self._end(_ABANDONED)

    def _end(self, status: bytes) -> None:
        self.ended = True
        self._send(Kind.END, status)

    def receive(self, kind: Kind, body: bytes) -> None:
        """Processes a record of the front end."""
        if kind is Kind.WRITTEN:
            for _ in range(read_count_body(body)):
                self._unwritten_bytes -= self._unwritten.popleft()
            if len(self._unwritten) <= self._most_unwritten:
                resolve(self._written, None)
        elif kind is Kind.MESSAGE:
            if self._reading:
                self._reading, self._received = False, body
            else:
                resolve(self._read, body)
        elif kind is Kind.HALF_CLOSED:
            self._half_closed = True
            resolve(self._read, None)
        elif kind is Kind.DONE:
            self._done.set()
