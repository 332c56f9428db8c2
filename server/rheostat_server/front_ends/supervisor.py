"""Starts front ends, answers their calls, and restarts front ends that die.

If a front end dies, only its own calls end. Its clients get UNAVAILABLE, and the tasks that answer
its calls are cancelled as if each client had disconnected. A front end that hangs is killed.
"""

import asyncio
import errno
import logging
import os
import socket
import sys
from contextlib import suppress

from grpc_health.v1.health_pb2 import HealthCheckResponse

from rheostat_server.errors import FrontEndFailed, PortInUse
from rheostat_server.front_ends.call import Answer
from rheostat_server.front_ends.call_starts import CallStarts
from rheostat_server.front_ends.call_tasks import CallTasks
from rheostat_server.front_ends.core_server import grpc_address
from rheostat_server.front_ends.record_connection import RecordConnection
from rheostat_server.front_ends.records import Kind, seconds_body
from rheostat_server.front_ends.shared_parts import SharedParts, create_memory

_LOG = logging.getLogger(__name__)

_START_SECONDS = 60.0
"""Timeout of the start of a front end."""

_RESTART_SECONDS = 1.0
"""Pause before a restart, if a front end did not start or lived shorter than `_SHORT_LIFE`."""

_SHORT_LIFE = 10.0
"""Seconds."""

_PING_SECONDS = 10.0
"""Seconds between two pings of a front end."""

_MISSED_PINGS = 3
"""Unanswered pings in a row after which a front end is killed. More than one, because the server
itself may have been suspended in between."""

_STOP_SECONDS = 5.0
"""Seconds after the grace period of calls within which a front end must end."""

_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors of addresses that a machine does not have. `localhost` often has such a second address,
which gRPC skips too."""

_SOCKET_BYTES = 256 << 10
"""Size of the socket buffers. Linux doubles the value. It is small because small records
wait for what is in the buffers, such as pieces of large messages."""


class FrontEnds:
    """The front ends of a server: `count` processes."""

    def __init__(self, count: int, answer: Answer) -> None:
        self._count = count
        self._answer = answer
        self._starts = CallStarts()
        self._host, self._port = "", 0
        self._reserved: list[socket.socket] = []
        self._health = int(HealthCheckResponse.NOT_SERVING)
        self._front_ends: list[_FrontEnd] = []
        self._restarters: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int) -> int:
        """Starts the processes; returns the port when all of them listen on it.

        Raises:
            PortInUse: a process cannot listen.
            FrontEndFailed: a process does not start.
        """
        self._reserved = _reserve(host, port)
        self._host, self._port = host, self._reserved[0].getsockname()[1]
        self._front_ends = [self._new() for _ in range(self._count)]
        try:
            async with asyncio.TaskGroup() as starts:
                for front_end in self._front_ends:
                    starts.create_task(front_end.start())
        except ExceptionGroup as errors:
            await self.stop(0)  # the task group has ended all starts, so no process is missed
            raise errors.exceptions[0] from None
        except BaseException:
            await self.stop(0)
            raise
        self._restarters = [
            asyncio.create_task(self._restart_forever(index)) for index in range(self._count)
        ]
        return self._port

    @property
    def process_ids(self) -> list[int]:
        """The ids of the processes."""
        return [front_end.process_id for front_end in self._front_ends]

    def set_health(self, status: int) -> None:
        """Sets the answer of health checks for the server and all its services."""
        self._health = status
        for front_end in self._front_ends:
            front_end.set_health(status)

    async def stop(self, grace: float) -> None:
        """Ends the processes, which end running calls after `grace` seconds."""
        for task in self._restarters:
            task.cancel()
        await asyncio.gather(*self._restarters, return_exceptions=True)
        await asyncio.gather(*(front_end.stop(grace) for front_end in self._front_ends))
        for reserved in self._reserved:
            reserved.close()

    def _new(self) -> "_FrontEnd":
        return _FrontEnd(self._host, self._port, self._answer, self._starts)

    async def _restart_forever(self, index: int) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            begun = clock()
            code = await self._front_ends[index].ended()
            _LOG.error(
                "front end %d has ended with exit status %d, and its calls with it; restarting it",
                index,
                code,
            )
            if clock() - begun < _SHORT_LIFE:
                await asyncio.sleep(_RESTART_SECONDS)
            self._front_ends[index] = await self._start_until_success(index)

    async def _start_until_success(self, index: int) -> "_FrontEnd":
        while True:
            started = self._new()
            try:
                await started.start()
            except Exception as error:  # the server needs its front end, so it retries any failure
                _LOG.error("front end %d cannot start: %s", index, error)
                await started.stop(0)
                await asyncio.sleep(_RESTART_SECONDS)
            except BaseException:
                await started.stop(0)
                raise
            else:
                started.set_health(self._health)
                return started


class _FrontEnd:
    """One process, and the calls that it has forwarded."""

    def __init__(self, host: str, port: int, answer: Answer, starts: CallStarts) -> None:
        self._host = host
        self._port = port
        self._connection = RecordConnection(self._receive, self._lost)
        self.calls = CallTasks(self._connection.send, answer, starts)
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._responsive = False
        """Whether a record has arrived since the last ping."""

    @property
    def process_id(self) -> int:
        return 0 if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts the process; returns when it listens.

        Raises:
            PortInUse: it cannot listen.
            FrontEndFailed: it does not start.
        """
        own_end, child_end = socket.socketpair()
        for end in (own_end, child_end):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
        with child_end:
            try:
                self._process = await self._execute(child_end.fileno())
            except OSError as error:
                own_end.close()
                raise FrontEndFailed(f"a front end cannot be started: {error}") from error
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self._connection, sock=own_end)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await self._listening
        except TimeoutError as error:
            raise FrontEndFailed(
                f"a front end did not listen within {_START_SECONDS:g} s"
            ) from error

    async def _execute(self, descriptor: int) -> asyncio.subprocess.Process:
        memory = create_memory()
        try:
            self._connection.sent_parts = SharedParts(memory)
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # a module in the working directory must not replace a standard module
                "-m",
                "rheostat_server.front_ends.process",
                f"--fd={descriptor}",
                f"--memory={memory}",
                f"--host={self._host}",
                f"--port={self._port}",
                pass_fds=[descriptor, memory],
                stdin=asyncio.subprocess.DEVNULL,
                process_group=0,  # Ctrl-C would end it before it can ignore signals
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        finally:
            os.close(memory)

    async def ended(self) -> int:
        """Waits for the end of the process and kills it if it hangs; returns its exit status."""
        assert self._process is not None
        pings = asyncio.create_task(self._kill_if_hung(self._process))
        try:
            return await self._process.wait()
        finally:
            pings.cancel()

    async def _kill_if_hung(self, process: asyncio.subprocess.Process) -> None:
        missed = 0
        while missed < _MISSED_PINGS:
            self._responsive = False
            self._connection.send(Kind.PING)
            await asyncio.sleep(_PING_SECONDS)
            missed = 0 if self._responsive else missed + 1
        _LOG.error("a front end has answered none of %d pings and is killed", _MISSED_PINGS)
        with suppress(ProcessLookupError):
            process.kill()

    def set_health(self, status: int) -> None:
        self._connection.send(Kind.HEALTH, 0, bytes([status]))

    async def stop(self, grace: float) -> None:
        """Ends the process; kills it if it does not end."""
        if self._process is None:
            return
        self._connection.send(Kind.STOP, 0, seconds_body(grace))
        try:
            async with asyncio.timeout(grace + _STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    def _receive(self, kind: Kind, number: int, body: bytes) -> None:
        self._responsive = True
        if kind is Kind.LISTENING:
            self._finish_start(None)
        elif kind is Kind.NOT_LISTENING:
            self._finish_start(PortInUse(body.decode(errors="replace")))
        else:
            self.calls.receive(kind, number, body)

    def _finish_start(self, error: Exception | None) -> None:
        if self._listening.done():
            return
        if error is None:
            self._listening.set_result(None)
        else:
            self._listening.set_exception(error)
            self._listening.exception()  # without a waiter, asyncio would log it

    def _lost(self) -> None:
        self._finish_start(FrontEndFailed("a front end has ended before it listened"))
        self.calls.cancel()


def _reserve(host: str, port: int) -> list[socket.socket]:
    """Sockets that are bound to each address of a host and do not listen.

    They keep the port while front ends restart, and front ends can still listen on it. If `port` is
    0, the first socket finds a free port for all.

    Raises:
        PortInUse: an address cannot be bound.
    """
    reserved: list[socket.socket] = []
    absent: OSError | None = None
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, (name, _, *scope) in addresses:
            try:
                bound = _bind(family, kind, protocol, (name, port, *scope))
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                absent = error
            else:
                reserved.append(bound)
                port = bound.getsockname()[1]
        if not reserved and absent is not None:
            raise absent
    except OSError as error:
        for bound in reserved:
            bound.close()
        raise PortInUse.of(grpc_address(host, port), error) from error
    return reserved


def _bind(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> socket.socket:
    bound = socket.socket(family, kind, protocol)
    try:
        # Connections of an earlier server keep its port for a minute, unless this is set.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        # From now on only the front ends can bind the port.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        bound.close()
        raise
    return bound
