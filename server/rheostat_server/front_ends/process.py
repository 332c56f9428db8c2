"""A front end: a process that speaks gRPC with clients, and forwards their calls to the server.

    python -m rheostat_server.front_ends.process --fd 7 --memory 8 --host 127.0.0.1 --port 50051

It has no state of models or requests, and imports neither torch nor vLLM. It exits as soon as the
socket to the server is closed, for any reason.

Its calls are in `forwarder`.
"""

import argparse
import asyncio
import os
import signal
import socket
from collections.abc import Callable

from rheostat_server.errors import PortInUse
from rheostat_server.front_ends.core_server import FairLock
from rheostat_server.front_ends.forwarder import Forwarder
from rheostat_server.front_ends.record_connection import RecordConnection
from rheostat_server.front_ends.records import Kind, read_seconds_body
from rheostat_server.front_ends.shared_parts import SharedParts
from rheostat_server.tasks.allocator import keep_freed_memory
from rheostat_server.tasks.futures import resolve
from rheostat_server.tasks.garbage import collect_in_time, collect_rarely

_DIRECT_BYTES = 64 << 10
"""Bytes of the most records that the thread that has made them writes to the socket itself."""

_SERVER_LOST = 1
"""The exit status if the connection to the server is lost."""


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
        self._passed = False
        """Whether `_pass` will be called."""

    @property
    def backlogged(self) -> bool:
        """Whether records wait for the socket."""
        return self._passed or self._full or bool(self._large)

    async def open(self, connected: socket.socket) -> None:
        """Begins to receive from a socket."""
        transport, _ = await self._loop.create_connection(lambda: self, sock=connected)
        transport.set_write_buffer_limits(high=0)
        self._socket = connected

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        with self._lock:
            super().data_received(data)

    def resume_writing(self) -> None:
        """Called by asyncio once it has written everything."""
        with self._lock:
            super().resume_writing()
            self._report()

    def _schedule(self) -> None:
        """Does nothing, because the records are written before the lock is released."""

    def write_all(self) -> None:
        """Writes the records that were sent. To be called before the lock is released."""
        if self._passed:
            return
        few = sum(map(len, self._outgoing)) <= _DIRECT_BYTES
        if self._outgoing and few and self._socket is not None and not self._full:
            records = b"".join(self._outgoing)
            try:
                written = self._socket.send(records)
            except BlockingIOError:
                written = 0
            except OSError:
                return  # the event loop finds that the connection is lost
            self._outgoing = [memoryview(records)[written:]] if written < len(records) else []
        if self._outgoing or (self._large and not self._full):
            self._passed = True
            self._loop.call_soon_threadsafe(self._pass)

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
    """A forwarder, and its connection to the server."""

    def __init__(self, shared: SharedParts) -> None:
        lock = FairLock(lambda: self._forwarder.before_release())
        self._connection = _ServerConnection(
            lock, self._receive, self._lost, lambda: self._forwarder.read_early()
        )
        self._connection.received_parts = shared
        self._lock = lock
        self._forwarder = Forwarder(lock, self._connection, backlog=self._connection)
        self._stop: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        """The grace period of calls in seconds; set by the record STOP."""

    @property
    def idle(self) -> bool:
        """Whether no call runs."""
        return self._forwarder.idle

    async def run(self, connection: socket.socket, host: str, port: int) -> None:
        """Serves until the server sends STOP."""
        await self._connection.open(connection)
        try:
            self._forwarder.start(host, port, shared_port=True)
        except PortInUse as error:
            self.send(Kind.NOT_LISTENING, 0, str(error).encode())
            await self._stop
            return
        self.send(Kind.LISTENING)
        await self._forwarder.stop(await self._stop)
        self._connection.close()

    def send(self, kind: Kind, number: int = 0, *body: bytes) -> None:
        """Sends a record. To be called without the lock."""
        with self._lock:
            self._connection.send(kind, number, *body)

    def _receive(self, kind: Kind, number: int, body: bytes) -> None:
        if kind is Kind.HEALTH:
            self._forwarder.set_health(body[0])
        elif kind is Kind.PING:
            self._connection.send(Kind.PONG)
        elif kind is Kind.STOP:
            resolve(self._stop, read_seconds_body(body))
        else:
            self._forwarder.receive(kind, number, body)

    def _lost(self) -> None:
        if not self._stop.done():
            os._exit(_SERVER_LOST)  # no call can be answered


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
