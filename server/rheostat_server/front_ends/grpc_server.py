"""The gRPC server of a server without front ends, which speaks gRPC in the server's process.

A front end's `Forwarder` works here as there. It hands over records in memory, not over a socket.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from rheostat_server.front_ends.call import Answer
from rheostat_server.front_ends.call_starts import CallStarts
from rheostat_server.front_ends.call_tasks import CallTasks
from rheostat_server.front_ends.core_server import FairLock
from rheostat_server.front_ends.forwarder import Forwarder
from rheostat_server.front_ends.records import Kind
from rheostat_wire.message_parts import Payload

_RECORDS = 64
"""Records that the event loop receives in one iteration. While a client begins thousands of calls,
tokens wait for these records and not for all that have come."""


class _ToServer:
    """Records of the forwarder, which both threads send to the event loop."""

    def __init__(self, receive: Callable[[Kind, int, bytes], None]) -> None:
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._records: deque[tuple[Kind, int, bytes]] = deque()
        self._scheduled = False
        """Whether `_receive_some` will be called."""

    def send(self, kind: Kind, call: int = 0, *body: Payload) -> None:
        """Sends a record."""
        self._records.append((kind, call, b"".join(body)))

    def write_all(self) -> None:
        """Lets the event loop receive the records that were sent, in order."""
        if self._records and not self._scheduled:
            self._scheduled = True
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._receive_some)

    def _receive_some(self) -> None:
        count = _RECORDS
        if len(self._records) > count:
            self._loop.call_soon(self._receive_some)
        else:
            self._scheduled = False  # before the count, because the other thread may add some
            count = len(self._records)
        for _ in range(count):
            self._receive(*self._records.popleft())


class GrpcServer:
    """A gRPC server with the services of `rheostat.v1`, health and reflection.

    No other process can listen on its port. Otherwise a second server would get half of the calls.
    """

    def __init__(self, answer: Answer) -> None:
        """Does not listen yet."""
        self._lock = FairLock(lambda: self._forwarder.before_release())
        self.calls = CallTasks(self._send, answer, CallStarts(), writes_cheaply=False)
        """The calls that run."""
        to_server = _ToServer(self.calls.receive)
        # No message is read early: asking for it costs little here, and the server limits reads.
        self._forwarder = Forwarder(self._lock, to_server, backlog=None)
        self._sent: list[tuple[Kind, int, bytes]] = []
        """Records for the forwarder."""
        self._started = False

    async def start(self, host: str, port: int) -> int:
        """Listens, and begins to accept calls; returns the port.

        Raises:
            PortInUse: the address is in use or not allowed.
        """
        port = self._forwarder.start(host, port, shared_port=False)
        self._started = True
        return port

    def set_health(self, status: int) -> None:
        """Sets the answer of health checks for the server and all its services."""
        self._forwarder.set_health(status)

    async def stop(self, grace: float) -> None:
        """Accepts no further calls, and ends running calls after `grace` seconds.

        Does nothing if the server has not started, or was stopped before.
        """
        if self._started:
            self._started = False
            await self._forwarder.stop(grace)
            self.calls.cancel()

    def _send(self, kind: Kind, call: int = 0, *body: Payload) -> None:
        """Sends a record to the forwarder, with others of this iteration of the event loop.

        So the lock is acquired once for all. The thread of gRPC's events often waits for it.
        """
        if not self._sent:
            asyncio.get_running_loop().call_soon(self._forward)
        self._sent.append((kind, call, b"".join(body)))

    def _forward(self) -> None:
        sent, self._sent = self._sent, []
        with self._lock:
            for kind, call, body in sent:
                self._forwarder.receive(kind, call, body)
