"""A front end: a process that speaks gRPC with clients, and forwards their calls to the server.

    python -m rheostat_server.front_ends.process --fd 7 --memory 8 --host 127.0.0.1 --port 50051

It has no state of models or requests, and imports neither torch nor vLLM. It exits as soon as the
socket to the server is closed, for any reason.

It has two threads. One handles the events of gRPC, the other those of the event loop: records of
the server, and timers. Both run the functions of calls, in turn; see `core_server`.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Final, cast

import grpc.aio
from google.rpc import status_pb2
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from rheostat_server.errors import PortInUse
from rheostat_server.front_ends.core_server import CoreCall, CoreServer, FairLock
from rheostat_server.front_ends.grpc_server import PATHS, SERVICES, Health
from rheostat_server.front_ends.local_calls import LocalCalls
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

_LOG = logging.getLogger(__name__)

_EAGER_READS = 4
"""Calls at a time whose first message is read before the server asks for it. Only a few, because
gRPC keeps the received part of each message. Calls that begin together are read one after another.
"""

_EAGER_SECONDS = 0.005
"""Seconds to wait for the first message of a call, before the call is forwarded without it."""

_DISCONNECT_SECONDS = 0.005
"""Seconds within which gRPC reports that a client has disconnected, after the end of its messages.
"""

_WRITTEN_BATCH = 3
"""Messages that gRPC has taken after which a WRITTEN record is sent while others follow."""

_DIRECT_BYTES = 64 << 10
"""Bytes of the most records that the thread that has made them writes to the socket itself."""

_SERVER_LOST = 1
"""The exit status if the connection to the server is lost."""

_UNKNOWN = status_pb2.Status(code=12, message="Method not found!")  # UNIMPLEMENTED, as gRPC says it


class _EagerReads:
    """The reads of first messages that the server has not asked for.

    None begins while records wait for the socket to the server. Otherwise the messages of hundreds
    of calls would wait here when the server is slow.
    """

    def __init__(self, connection: "_ServerConnection") -> None:
        self._connection = connection
        self._running = 0
        self._waiting: dict[_ForwardedCall, None] = {}
        """Calls that wait to be read, oldest first."""

    def add(self, call: "_ForwardedCall") -> None:
        """Reads the first message of a call, now or after other calls."""
        self._waiting[call] = None
        self.resume()

    def remove(self, call: "_ForwardedCall") -> None:
        """Does not read a call that waits, because the server asks for its message."""
        self._waiting.pop(call, None)

    def end(self) -> None:
        """Ends a read, and starts the next one."""
        self._running -= 1
        self.resume()

    def resume(self) -> None:
        """Reads calls that wait, if they may be read now."""
        while self._waiting and self._running < _EAGER_READS and not self._connection.backlogged:
            call = next(iter(self._waiting))
            del self._waiting[call]
            self._running += 1
            call.start_reading()


class _ServerConnection(RecordConnection):
    """The connection to the server, which both threads use while they hold the lock.

    Records are written when the lock is released. The thread that holds it writes them itself,
    unless earlier ones wait for the socket. Waking the event loop for them would take longer.
    """

    def __init__(
        self,
        lock: FairLock,
        receive: Callable[[Kind, int, bytes], None],
        lost: Callable[[], None],
        all_written: Callable[[], None],
    ) -> None:
        """Calls `all_written` once the socket has taken records that had to wait for it."""
        super().__init__(receive, lost)
        self._lock = lock
        self._all_written = all_written
        self._loop = asyncio.get_running_loop()
        self._socket: socket.socket | None = None
        self._full = False
        """Whether earlier records wait for the socket."""
        self._passed = False
        """Whether `_pass` will be called."""

    @property
    def backlogged(self) -> bool:
        """Whether records wait for the socket."""
        return self._passed or self._full

    async def open(self, connected: socket.socket) -> None:
        """Begins to receive from a socket."""
        transport, _ = await self._loop.create_connection(lambda: self, sock=connected)
        transport.set_write_buffer_limits(high=0)
        self._socket = connected

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        with self._lock:
            super().data_received(data)

    def pause_writing(self) -> None:
        """Called by asyncio in `_pass` if the socket is full."""
        self._full = True

    def resume_writing(self) -> None:
        """Called by asyncio once it has written everything."""
        with self._lock:
            self._full = False
            self._report()

    def _schedule(self) -> None:
        """Does nothing, because the records are written before the lock is released."""

    def write_all(self) -> None:
        """Writes the records that were sent. To be called before the lock is released."""
        if not self._outgoing or self._passed:
            return
        few = sum(map(len, self._outgoing)) <= _DIRECT_BYTES
        if few and self._socket is not None and not self._full:
            records = b"".join(self._outgoing)
            try:
                written = self._socket.send(records)
            except BlockingIOError:
                written = 0
            except OSError:
                return  # the event loop finds that the connection is lost
            self._outgoing = [memoryview(records)[written:]] if written < len(records) else []
        if self._outgoing:
            self._passed = True
            self._loop.call_soon_threadsafe(self._pass)

    def write_large(self) -> None:
        """Writes the records that were sent, if the last one is large.

        Then it counts as `backlogged` before the lock is released.
        """
        if self._outgoing and len(self._outgoing[-1]) > _DIRECT_BYTES:
            self.write_all()

    def _pass(self) -> None:
        """Gives the records to asyncio."""
        with self._lock:
            self._passed = False
            self._flush()
            self._report()

    def _report(self) -> None:
        if not self.backlogged:
            self._all_written()


class FrontEnd:
    """The calls of this process."""

    def __init__(self, shared: SharedParts) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = FairLock(self._before_release)
        self._connection = _ServerConnection(
            self._lock, self._receive, self._lost, lambda: self._eager.resume()
        )
        self._connection.received_parts = shared
        self._server = CoreServer(self._lock, self._begin)
        self._health = Health()
        self._local = LocalCalls(self._lock)
        server = cast(grpc.aio.Server, self._local)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflects = reflection.aio.ReflectionServicer(names)
        add = reflection_pb2_grpc.add_ServerReflectionServicer_to_server
        add(reflects, server)  # type: ignore[no-untyped-call]  # it has no annotations
        self._calls: dict[int, _ForwardedCall] = {}
        self._begun = 0
        self._eager = _EagerReads(self._connection)
        self._unforwarded: dict[_ForwardedCall, float] = {}
        """When each call began that is not forwarded yet, oldest first."""
        self._timer_set = False
        """Whether `_forward_late` will be called."""
        self._stop: asyncio.Future[float] = self._loop.create_future()
        """The grace period of calls in seconds; set by the record STOP."""

    @property
    def idle(self) -> bool:
        """Whether no call runs."""
        return not self._calls

    async def run(self, connection: socket.socket, host: str, port: int) -> None:
        """Serves until the server sends STOP."""
        await self._connection.open(connection)
        try:
            self._server.start(host, port)
        except PortInUse as error:
            self.send(Kind.NOT_LISTENING, 0, str(error).encode())
            await self._stop
            return
        self.send(Kind.LISTENING)
        await self._end_calls(await self._stop)
        self._server.close()
        self._connection.close()

    def send(self, kind: Kind, number: int = 0, *body: bytes) -> None:
        """Sends a record. To be called without the lock."""
        with self._lock:
            self._connection.send(kind, number, *body)

    def later(
        self, seconds: float, number: int, action: "Callable[[_ForwardedCall], object]"
    ) -> None:
        """Does something with a call after a time, if it has not ended by then."""

        def act() -> None:
            with self._lock:
                if (call := self._calls.get(number)) is not None:
                    action(call)

        self._loop.call_soon_threadsafe(self._loop.call_later, seconds, act)

    def _begin(self, call: CoreCall) -> None:
        """Forwards a call to the server, or answers it here."""
        if call.path in PATHS:
            number = self._begun = (self._begun + 1) & 0xFFFF_FFFF
            forwarded = self._calls[number] = _ForwardedCall(number, call, self)
            forwarded.begin()
        elif not self._local.answers(call):
            call.open(lambda: None)
            call.end(_UNKNOWN, lambda: None)

    async def _end_calls(self, grace: float) -> None:
        """Accepts no further calls, and cancels those that run after `grace` seconds."""
        ended = asyncio.Event()
        with self._lock:
            self._server.shut_down(lambda: self._loop.call_soon_threadsafe(ended.set))
        try:
            async with asyncio.timeout(grace):
                await ended.wait()
        except TimeoutError:
            with self._lock:
                self._server.cancel_all()
            await ended.wait()

    def _receive(self, kind: Kind, number: int, body: bytes) -> None:
        if kind is Kind.HEALTH:
            self._health.set(body[0])
        elif kind is Kind.PING:
            self._connection.send(Kind.PONG)
        elif kind is Kind.STOP:
            if not self._stop.done():
                self._stop.set_result(read_seconds_body(body))
        elif (call := self._calls.get(number)) is not None:
            try:
                call.receive(kind, body)
            except Exception:  # one call must not end the others
                _LOG.exception("a record of a call could not be processed")
                call.close()

    def _lost(self) -> None:
        if not self._stop.done():
            os._exit(_SERVER_LOST)  # no call can be answered

    def add(self, call: "_ForwardedCall") -> None:
        """Reads the first message of a call. If that takes long, the call is forwarded without."""
        self._unforwarded[call] = time.monotonic()
        self._eager.add(call)

    def begin_call(self, call: "_ForwardedCall", first: First, message: bytes = b"") -> None:
        """Forwards a call to the server."""
        self._unforwarded.pop(call, None)
        self._eager.remove(call)
        connection = "" if first is First.HERE else call.connection()
        begin = CallBegin(call.path, call.time_remaining(), first, message, connection)
        self._connection.send(Kind.BEGIN, call.number, call_body(begin))

    def send_of(self, call: "_ForwardedCall", kind: Kind, *body: bytes) -> None:
        """Sends a record of a call. To be called with the lock."""
        self._connection.send(kind, call.number, *body)

    def end_first_read(self) -> None:
        """Notes that a first message was read and sent, and reads the next one."""
        self._connection.write_large()
        self._eager.end()

    def remove(self, call: "_ForwardedCall") -> None:
        """Forgets a call that is over."""
        self._unforwarded.pop(call, None)
        self._eager.remove(call)
        del self._calls[call.number]

    def _before_release(self) -> None:
        """Called before the lock is released."""
        self._connection.write_all()
        if self._unforwarded and not self._timer_set:
            self._timer_set = True
            first = next(iter(self._unforwarded.values()))
            delay = max(0.0, first + _EAGER_SECONDS - time.monotonic())
            self._loop.call_soon_threadsafe(self._loop.call_later, delay, self._forward_late)

    def _forward_late(self) -> None:
        """Forwards calls whose first message has not arrived in time."""
        with self._lock:
            self._timer_set = False
            late = time.monotonic() - _EAGER_SECONDS
            for call in [call for call, begun in self._unforwarded.items() if begun <= late]:
                call.begin_without()


class _ForwardedCall:
    """A call between its client and the server. It is used with the lock held."""

    def __init__(self, number: int, call: CoreCall, front_end: FrontEnd) -> None:
        self.number: Final = number
        self.path: Final = call.path
        self.time_remaining: Final = call.time_remaining
        self.connection: Final = call.connection
        self._call = call
        self._front_end = front_end
        self._begun = False
        """Whether the record BEGIN was sent."""
        self._reads_first = False
        """Whether a read counts as a first read."""
        self._messages: deque[bytes] = deque()
        """The server's messages that gRPC has not been given yet."""
        self._written = 0
        """Messages that gRPC has taken since the last WRITTEN record."""
        self._end: bytes | None = None
        """The status with which the server has ended the call."""
        self._ended = False
        """Whether gRPC was given the status."""
        self._closed = False

    def begin(self) -> None:
        """Forwards the call to the server, with its first message if that arrives soon."""
        self._call.open(self.close)
        self._front_end.add(self)

    def start_reading(self) -> None:
        """Reads the first message; see `_EagerReads`."""
        self._reads_first = True
        self._call.read(self._take_first)

    def begin_without(self) -> None:
        """Forwards the call without its first message."""
        self._begin(First.READING if self._reads_first else First.UNREAD)

    def receive(self, kind: Kind, body: bytes) -> None:
        """Processes a record of the server."""
        if kind is Kind.MESSAGE:
            if self._call.ready:
                self._call.write(body, self._count_written)
            else:
                self._messages.append(body)
        elif kind is Kind.READ:
            self._call.read(self._take)
        elif kind is Kind.END:
            self._end = body
            if self._call.ready:
                self._finish()
            else:
                self._front_end.later(STATUS_SECONDS, self.number, _ForwardedCall.drop_messages)

    def drop_messages(self) -> None:
        """Ends the call without the messages that its client has not read."""
        self._messages.clear()
        self._finish()

    def half_close(self) -> None:
        """Sends that the client has closed its side of the stream."""
        self._front_end.send_of(self, Kind.HALF_CLOSED)

    def close(self) -> None:
        """Stops reading and writing, and sends the record DONE."""
        if self._closed:
            return
        self._closed = True
        self._messages.clear()
        self._call.leave()
        self._front_end.remove(self)
        self._end_first_read()
        if self._begun:
            self._front_end.send_of(self, Kind.DONE)

    def _begin(self, first: First, message: bytes = b"") -> None:
        self._begun = True
        self._front_end.begin_call(self, first, message)

    def _count_written(self, taken: bool) -> None:
        """Called when gRPC has taken a message, or cannot. Writes the next one."""
        if self._closed:
            return
        if not taken:
            self.close()  # the client has disconnected
            return
        self._written += 1
        idle = not self._messages
        if not idle:
            self._call.write(self._messages.popleft(), self._count_written)
        if self._written == _WRITTEN_BATCH or idle:
            self._front_end.send_of(self, Kind.WRITTEN, count_body(self._written))
            self._written = 0
        if idle and self._end is not None:
            self._finish()

    def _finish(self) -> None:
        """Ends the call with the status of the server."""
        if self._ended or self._end is None:
            return
        self._ended = True
        if not self._end:
            self._call.end(None, lambda: None)
            self.close()
            return
        # Until its client reads the status, the call counts as running.
        self._front_end.later(STATUS_SECONDS, self.number, _ForwardedCall.close)
        self._call.end(status_pb2.Status.FromString(self._end), self.close)

    def _take_first(self, message: bytes | None) -> None:
        """Sends the first message, inside BEGIN if the call is not forwarded yet."""
        if self._closed:
            return
        if self._begun or message is None:
            if not self._begun:
                self._begin(First.READING)
            self._take(message)
        else:
            self._begin(First.HERE, message)
        self._end_first_read()

    def _take(self, message: bytes | None) -> None:
        """Sends a message of the client, or that it has closed its side of the stream.

        If a client disconnects, gRPC mostly reports the end of its messages first. Without the
        wait, the server could mistake an incomplete upload for a complete one.
        """
        if self._closed:
            return
        if message is None:
            self._front_end.later(_DISCONNECT_SECONDS, self.number, _ForwardedCall.half_close)
        else:
            self._front_end.send_of(self, Kind.MESSAGE, message)

    def _end_first_read(self) -> None:
        if self._reads_first:
            self._reads_first = False
            self._front_end.end_first_read()


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
