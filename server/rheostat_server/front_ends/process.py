"""A front end: a process that speaks gRPC with clients, and forwards their calls to the server.

    python -m rheostat_server.front_ends.process --fd 7 --memory 8 --host 127.0.0.1 --port 50051

It has no state of models or requests, and imports neither torch nor vLLM. It exits as soon as the
socket to the server is closed, for any reason.
"""

import argparse
import asyncio
import os
import signal
import socket
from collections import deque
from typing import Final

import grpc.aio
from google.rpc import status_pb2

from rheostat_server.errors import PortInUse
from rheostat_server.front_ends.call import Call
from rheostat_server.front_ends.grpc_server import GrpcServer
from rheostat_server.front_ends.records import (
    CallBegin,
    First,
    Kind,
    RecordConnection,
    call_body,
    count_body,
    read_seconds_body,
)
from rheostat_server.front_ends.shared_parts import SharedParts
from rheostat_server.limits import STATUS_SECONDS
from rheostat_server.tasks.allocator import keep_freed_memory
from rheostat_server.tasks.garbage import collect_in_time, collect_rarely

_EAGER_READS = 4
"""Calls at a time whose first message is read before the server asks for it. Only a few, because
gRPC keeps the received part of each message. Calls that begin together are read one after another.
"""

_EAGER_SECONDS = 0.005
"""Seconds to wait for the first message of a call, before the call is forwarded without it."""

_WRITTEN_BATCH = 3
"""Messages that gRPC has taken after which a WRITTEN record is sent while others follow."""

_SERVER_LOST = 1
"""The exit status if the connection to the server is lost."""


class _EagerReads:
    """The reads of first messages that the server has not asked for."""

    def __init__(self) -> None:
        self._running = 0
        self._waiting: dict[_ForwardedCall, None] = {}
        """Calls that wait to be read, oldest first."""

    def add(self, call: "_ForwardedCall") -> None:
        """Reads the first message of a call, now or after other calls."""
        if self._running == _EAGER_READS:
            self._waiting[call] = None
        else:
            self._running += 1
            call.start_reading()

    def remove(self, call: "_ForwardedCall") -> None:
        """Does not read a call that waits, because the server asks for its message."""
        self._waiting.pop(call, None)

    def end(self, _: "asyncio.Task[None]") -> None:
        """Ends a read, and starts the next one."""
        self._running -= 1
        if self._waiting:
            call = next(iter(self._waiting))
            del self._waiting[call]
            self.add(call)


class FrontEnd:
    """The calls of this process."""

    def __init__(self, shared: SharedParts) -> None:
        self._connection = RecordConnection(self._receive, self._lost)
        self._connection.received_parts = shared
        self._server = GrpcServer(self._forward, share_port=True)
        self._calls: dict[int, _ForwardedCall] = {}
        self._begun = 0
        self._eager = _EagerReads()
        self._stop: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        """The grace period of calls in seconds; set by the record STOP."""

    @property
    def idle(self) -> bool:
        """Whether no call runs."""
        return not self._calls

    async def run(self, connection: socket.socket, host: str, port: int) -> None:
        """Serves until the server sends STOP."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self._connection, sock=connection)
        try:
            await self._server.start(host, port)
        except PortInUse as error:
            self._connection.send(Kind.NOT_LISTENING, 0, str(error).encode())
            await self._stop
            return
        self._connection.send(Kind.LISTENING)
        await self._server.stop(await self._stop)
        self._connection.close()

    async def _forward(self, path: str, call: Call) -> None:
        """Forwards a call to the server, and its answer to the client."""
        number = self._begun = (self._begun + 1) & 0xFFFF_FFFF
        forwarded = _ForwardedCall(number, path, call, self._connection, self._eager)
        self._calls[number] = forwarded
        try:
            forwarded.begin()
            status = await forwarded.run()
            if status is not None:
                await call.fail(status)
        finally:
            forwarded.close()
            del self._calls[number]

    def _receive(self, kind: Kind, number: int, body: bytes) -> None:
        if kind is Kind.HEALTH:
            self._server.set_health(body[0])
        elif kind is Kind.PING:
            self._connection.send(Kind.PONG)
        elif kind is Kind.STOP:
            if not self._stop.done():
                self._stop.set_result(read_seconds_body(body))
        elif (call := self._calls.get(number)) is not None:
            call.receive(kind, body)

    def _lost(self) -> None:
        if not self._stop.done():
            os._exit(_SERVER_LOST)  # no call can be answered


class _ForwardedCall:
    """A call between its client and the server."""

    def __init__(
        self,
        number: int,
        path: str,
        call: Call,
        connection: RecordConnection,
        eager: _EagerReads,
    ) -> None:
        self._number: Final = number
        self._eager = eager
        self._path = path
        self._call = call
        self._connection = connection
        self._begun = False
        """Whether the record BEGIN was sent."""
        self._messages: deque[bytes] = deque()
        """The server's messages that are not written yet."""
        self._written = 0
        """Messages that gRPC has taken since the last WRITTEN record."""
        self._end: bytes | None = None
        """The status with which the server has ended the call."""
        self._dropped = False
        """Whether a write was cancelled because the client does not read."""
        self._changed = asyncio.Event()
        self._writer: asyncio.Task[object] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Forwards the call to the server, with its first message if that arrives soon."""
        self._timer = asyncio.get_running_loop().call_later(_EAGER_SECONDS, self._begin_without)
        self._eager.add(self)

    def start_reading(self) -> None:
        """Reads the first message; see `_EagerReads`."""
        self._reader = asyncio.create_task(self._read_first())
        self._reader.add_done_callback(self._eager.end)

    async def run(self) -> status_pb2.Status | None:
        """Writes the server's messages until it ends the call; returns the status, None for OK."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._messages:
                await self._write()
            if self._end is not None:
                if self._timer is not None:
                    self._timer.cancel()
                return status_pb2.Status.FromString(self._end) if self._end else None

    def receive(self, kind: Kind, body: bytes) -> None:
        """Processes a record of the server."""
        if kind is Kind.MESSAGE:
            self._messages.append(body)
            self._changed.set()
        elif kind is Kind.READ:
            self._reader = asyncio.create_task(self._read())
        elif kind is Kind.END:
            self._end = body
            self._changed.set()
            if self._messages or self._writer is not None:
                loop = asyncio.get_running_loop()
                self._timer = loop.call_later(STATUS_SECONDS, self._drop_messages)

    def close(self) -> None:
        """Stops reading, and sends the record DONE."""
        self._eager.remove(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._reader is not None:
            self._reader.cancel()
        if self._begun:
            self._connection.send(Kind.DONE, self._number)

    def _begin_without(self) -> None:
        """Forwards the call without its first message."""
        self._eager.remove(self)
        self._begin(First.UNREAD if self._reader is None else First.READING)

    def _begin(self, first: First, message: bytes = b"") -> None:
        self._begun = True
        begin = CallBegin(self._path, self._call.time_remaining(), first, message)
        self._connection.send(Kind.BEGIN, self._number, call_body(begin))

    async def _write(self) -> None:
        """Writes the next message. `_drop_messages` may cancel it after the end of the call."""
        self._writer = task = asyncio.current_task()
        assert task is not None
        try:
            await self._call.write(self._messages.popleft())
        except asyncio.CancelledError:
            if not self._dropped:
                raise
            task.uncancel()
            return
        finally:
            self._writer = None
        self._written += 1
        if self._written == _WRITTEN_BATCH or not self._messages:
            self._connection.send(Kind.WRITTEN, self._number, count_body(self._written))
            self._written = 0

    def _drop_messages(self) -> None:
        """Ends the call without the messages that its client has not read."""
        self._messages.clear()
        if self._writer is not None:
            self._dropped = True
            self._writer.cancel()

    async def _read_first(self) -> None:
        """Reads the first message, and sends it inside BEGIN if the call is not forwarded yet."""
        message = await self._next_message()
        if not self._begun:
            if self._timer is not None:
                self._timer.cancel()
            if message is not None:
                self._begin(First.HERE, message)
                return
            self._begin(First.READING)
        self._send(message)

    async def _read(self) -> None:
        self._send(await self._next_message())

    async def _next_message(self) -> bytes | None:
        try:
            return await self._call.read()
        except (grpc.aio.InternalError, grpc.aio.UsageError):
            # The client has disconnected, so the task of the call is cancelled and ends this task.
            raise asyncio.CancelledError from None

    def _send(self, message: bytes | None) -> None:
        if message is None:
            self._connection.send(Kind.HALF_CLOSED, self._number)
        else:
            self._connection.send(Kind.MESSAGE, self._number, message)


def main() -> None:
    """Runs a front end until the server ends it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fd", type=int, required=True, help="of the socket to the server")
    parser.add_argument("--memory", type=int, required=True, help="see `shared_parts`")
    parser.add_argument("--host", required=True, help="address to listen on")
    parser.add_argument("--port", type=int, required=True, help="port to listen on")
    arguments = parser.parse_args()
    # Ctrl-C and service managers signal all processes of a group. The server drains first.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    keep_freed_memory()
    collect_rarely()
    asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> None:
    shared = SharedParts(arguments.memory)
    os.close(arguments.memory)
    connection = socket.socket(fileno=arguments.fd)
    front_end = FrontEnd(shared)
    collecting = asyncio.create_task(collect_in_time(lambda: front_end.idle))
    await front_end.run(connection, arguments.host, arguments.port)
    collecting.cancel()


if __name__ == "__main__":
    main()
