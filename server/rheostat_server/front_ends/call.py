"""The server's side of a client's call: bytes in, bytes out, and one status.

A `Forwarder` has gRPC's side. The two exchange records, inside this process or over a socket.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from google.rpc import code_pb2, status_pb2

from rheostat_server.front_ends.call_starts import CallStarts
from rheostat_server.front_ends.large_messages import ReceivedPieces
from rheostat_server.front_ends.records import CallBegin, First, Kind, read_count_body
from rheostat_server.limits import STATUS_SECONDS
from rheostat_server.tasks.futures import resolve
from rheostat_wire.message_parts import MessageParts, Payload

_ABANDONED = status_pb2.Status(
    code=code_pb2.INTERNAL, message="the server stopped answering the call; its log may say why"
).SerializeToString()

_WINDOW = 4
"""Messages that gRPC has not taken, above which `write` waits. The messages of one `write` are all
sent first, unless they are long."""

_WINDOW_BYTES = 64 << 10
"""Bytes of these messages, above which `write` waits before it sends the next message."""


class Send(Protocol):
    """A function that sends a record of the call to the forwarder."""

    def __call__(self, kind: Kind, *body: Payload) -> None:
        """Sends a record whose body is the concatenated parts."""


class Call:
    """A call. If its client disconnects, the task that answers it is cancelled."""

    def __init__(
        self,
        send: Send,
        begin: CallBegin,
        starts: CallStarts | None = None,
        *,
        writes_cheaply: bool = True,
    ) -> None:
        """Begins a call.

        Args:
            send: sends a record of the call to the forwarder.
            begin: what the forwarder has received.
            starts: the turns of calls to start; None: calls do not take turns.
            writes_cheaply: see `writes_cheaply`.
        """
        self._starts = starts
        self.writes_cheaply: Final = writes_cheaply
        """Whether `write_now` takes so little time that all calls may do it in one iteration."""
        self._send = send
        self._clock = asyncio.get_running_loop().time
        remaining = begin.remaining
        self._deadline = None if remaining is None else self._clock() + remaining
        self._connection = begin.connection or None
        self._received = begin.message if begin.first is First.HERE else None
        """The first message, until it is read."""
        self._coming = begin.first is First.COMING
        """Whether the first message is being received in pieces."""
        self._reading = self._coming or begin.first is First.READING
        """Whether the forwarder reads a message that `read` did not request."""
        self._read: asyncio.Future[bytes | None] | None = None
        self._pieces = ReceivedPieces()
        self._unwritten: deque[int] = deque()
        """Bytes of each message that gRPC has not taken."""
        self._unwritten_bytes = 0
        self._written: asyncio.Future[None] | None = None
        """Is resolved once at most `_most_unwritten` messages are left."""
        self._most_unwritten = 0
        self._half_closed = False
        self._done = False
        self._until_done: asyncio.Future[None] | None = None
        """Awaited by `fail` until the forwarder has sent the status; None before."""
        self.ended = False
        """Whether the server has sent END."""

    async def stand_back(self) -> None:
        """Returns when the first message may be sent; see `CallStarts.stand_back`."""
        if self._starts is not None:
            await self._starts.stand_back()

    def time_remaining(self) -> float | None:
        """Seconds until the client's deadline; None if there is none."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def connection(self) -> str | None:
        """The address of the client's connection; None if the first message was read before."""
        return self._connection

    def received(self) -> bool:
        """Whether the next message has arrived, so that `read` does not wait for the client.

        `read` may wait for the front end, which has the message.
        """
        return self._coming or self._received is not None

    async def read(self) -> bytes | None:
        """The client's next message; None once the client has closed its side of the stream.

        Raises:
            CancelledError: the client has disconnected.
        """
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

    async def write(self, *messages: bytes | MessageParts) -> None:
        """Sends messages. Returns when gRPC has taken all but a few of the last messages.

        So a slow client blocks its writer. Waiting for each message would wake the task twice per
        token. The given messages wait for each other only above `_WINDOW_BYTES`.

        Raises:
            CancelledError: the client has disconnected.
        """
        for message in messages:
            self.write_now(message)
            while self._unwritten_bytes > _WINDOW_BYTES:
                await self._until_written(min(_WINDOW, len(self._unwritten) - 1))
        while len(self._unwritten) > _WINDOW:
            await self._until_written(_WINDOW)

    def has_room(self) -> bool:
        """Whether `write` would not wait, so that `write_now` may be called."""
        return len(self._unwritten) < _WINDOW and self._unwritten_bytes < _WINDOW_BYTES

    def write_now(self, message: bytes | MessageParts) -> None:
        """Sends a message. To be called if `has_room`, while no other method runs."""
        parts = message if isinstance(message, MessageParts) else (message,)
        size = sum(map(len, parts))
        self._send(Kind.MESSAGE, *parts)
        self._unwritten.append(size)
        self._unwritten_bytes += size

    async def flush(self) -> None:
        """Returns when gRPC has taken all messages.

        Raises:
            CancelledError: the client has disconnected.
        """
        if self._unwritten:
            await self._until_written(0)

    async def _until_written(self, most: int) -> None:
        """Returns when gRPC has taken all messages but `most`."""
        self._most_unwritten = most
        self._written = asyncio.get_running_loop().create_future()
        await self._written

    async def fail(self, status: status_pb2.Status) -> None:
        """Ends the call with a status that is not OK. No method may be called afterwards.

        Returns when the status is sent. Earlier messages are sent first. If the client does not
        read them, they are dropped after `STATUS_SECONDS`.

        Raises:
            CancelledError: the client has disconnected, or did not read for `STATUS_SECONDS`.
        """
        self._end(status.SerializeToString())
        if self._done:
            return
        self._until_done = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(STATUS_SECONDS):
                await self._until_done
        except TimeoutError:
            raise asyncio.CancelledError from None

    def end(self) -> None:
        """Ends the call with OK, unless it has failed."""
        if not self.ended:
            self._end(b"")

    def abandon(self) -> None:
        """Ends the call with INTERNAL, unless it has ended.

        Otherwise the client would mistake an incomplete answer for a complete one.
        """
        if not self.ended:
            self._end(_ABANDONED)

    def _end(self, status: bytes) -> None:
        self.ended = True
        self._pieces.clear()
        self._send(Kind.END, status)

    def receive(self, kind: Kind, body: bytes) -> None:
        """Processes a record of the forwarder."""
        if kind is Kind.WRITTEN:
            for _ in range(read_count_body(body)):
                self._unwritten_bytes -= self._unwritten.popleft()
            if len(self._unwritten) <= self._most_unwritten:
                resolve(self._written, None)
        elif kind is Kind.PIECE:
            if not self.ended:  # otherwise nothing reads the message
                self._pieces.add(body)
        elif kind is Kind.MESSAGE:
            body = self._pieces.complete(body)
            self._coming = False
            if self._reading:
                self._reading, self._received = False, body
            else:
                resolve(self._read, body)
        elif kind is Kind.HALF_CLOSED:
            self._half_closed = True
            resolve(self._read, None)
        elif kind is Kind.DONE:
            self._pieces.clear()
            self._done = True
            resolve(self._until_done, None)


Answer = Callable[[str, Call], Awaitable[None]]
"""Answers a call to its end. The first argument is the full name of the method."""
