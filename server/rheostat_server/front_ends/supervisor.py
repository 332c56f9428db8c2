"""Starts front ends, answers their calls, and replaces those that die.

A front end that dies takes its own calls with it. Its clients see UNAVAILABLE, and the tasks that
answer its calls are cancelled as if each client had disconnected. Nobody else notices. A front end
that hangs is killed.
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
from rheostat_server.front_ends.grpc_server import Answer, in_grpc_notation
from rheostat_server.front_ends.records import (
    Kind,
    RecordConnection,
    read_call_body,
    seconds_body,
)
from rheostat_server.front_ends.remote_call import RemoteCall
from rheostat_server.message_parts import Payload

_LOG = logging.getLogger(__name__)

_START_SECONDS = 60.0
"""Seconds that a front end has to listen."""

_RESTART_SECONDS = 1.0
"""Seconds between two starts in place of a front end that does not start, or dies soon."""

_SOON = 10.0
"""A front end that lives for fewer seconds has died soon."""

_PING_SECONDS = 10.0
"""Seconds between two pings of a front end."""

_MISSED_PINGS = 3
"""Pings without an answer in a row after which a front end is killed. More than one, because the
server itself may have been stopped in between."""

_STOP_SECONDS = 5.0
"""Seconds after the end of its calls within which a front end must end."""

_ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""Errors of addresses that a machine does not have. `localhost` often has a second one like that,
which gRPC leaves out too."""

_SOCKET_BYTES = 4 << 20
"""Bytes that the kernel may hold of what the two sides tell each other, if it allows as much."""


class FrontEnds:
    """The front ends of a server."""

    def __init__(self, count: int, answer: Answer) -> None:
        """Starts nothing yet.

        Args:
            count: number of processes.
            answer: answers the calls of their clients.
        """
        self._count = count
        self._answer = answer
        self._host, self._port = "", 0
        self._reserved: list[socket.socket] = []
        self._health = int(HealthCheckResponse.NOT_SERVING)
        self._front_ends: list[_FrontEnd] = []
        self._keeping: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int) -> int:
        """Starts the processes; returns the port when all of them listen on it.

        Raises:
            PortInUse: one cannot listen.
            FrontEndFailed: one does not start.
        """
        self._reserved = _reserve(host, port)
        self._host, self._port = host, self._reserved[0].getsockname()[1]
        self._front_ends = [self._new() for _ in range(self._count)]
        try:
            async with asyncio.TaskGroup() as starts:
                for front_end in self._front_ends:
                    starts.create_task(front_end.start())
        except ExceptionGroup as errors:
            await self.stop(0)  # no start is under way, so that none is left behind
            raise errors.exceptions[0] from None
        except BaseException:
            await self.stop(0)
            raise
        self._keeping = [asyncio.create_task(self._keep(index)) for index in range(self._count)]
        return self._port

    @property
    def process_ids(self) -> list[int]:
        """The ids of the processes."""
        return [front_end.process_id for front_end in self._front_ends]

    def set_health(self, status: int) -> None:
        """Sets what health checks answer for the server and all its services."""
        self._health = status
        for front_end in self._front_ends:
            front_end.set_health(status)

    async def stop(self, grace: float) -> None:
        """Ends the processes, which end the calls that run after `grace` seconds."""
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await asyncio.gather(*(front_end.stop(grace) for front_end in self._front_ends))
        for reserved in self._reserved:
            reserved.close()

    def _new(self) -> "_FrontEnd":
        return _FrontEnd(self._host, self._port, self._answer)

    async def _keep(self, index: int) -> None:
        """Replaces a front end whenever it dies."""
        clock = asyncio.get_running_loop().time
        while True:
            begun = clock()
            code = await self._front_ends[index].ended()
            _LOG.error(
                "front end %d has ended with exit status %d, and its calls with it; another starts",
                index,
                code,
            )
            if clock() - begun < _SOON:
                await asyncio.sleep(_RESTART_SECONDS)
            self._front_ends[index] = await self._started(index)

    async def _started(self, index: int) -> "_FrontEnd":
        """A new front end, after as many starts as it takes."""
        while True:
            started = self._new()
            try:
                await started.start()
            except Exception as error:  # whatever it is, the server needs its front end
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
    """One process, and the calls that it has passed on."""

    def __init__(self, host: str, port: int, answer: Answer) -> None:
        self._host = host
        self._port = port
        self._answer = answer
        self._connection = RecordConnection(self._receive, self._lost)
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._calls: dict[int, tuple[RemoteCall, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks that answer calls. A call may have ended while its task still cleans up."""
        self._heard = False
        """Whether a record came since the last ping."""

    @property
    def process_id(self) -> int:
        return 0 if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts the process; returns when it listens.

        Raises:
            PortInUse: it cannot listen.
            FrontEndFailed: it does not start.
        """
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SOCKET_BYTES)
        with theirs:
            try:
                self._process = await self._execute(theirs.fileno())
            except OSError as error:
                ours.close()
                raise FrontEndFailed(f"a front end cannot be started: {error}") from error
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self._connection, sock=ours)
        try:
            async with asyncio.timeout(_START_SECONDS):
                await self._listening
        except TimeoutError as error:
            raise FrontEndFailed(
                f"a front end did not listen within {_START_SECONDS:g} s"
            ) from error

    async def _execute(self, descriptor: int) -> asyncio.subprocess.Process:
        """Starts the process with its end of the socket."""
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # a module in the working directory must not replace one of Python's
            "-m",
            "rheostat_server.front_ends.process",
            f"--fd={descriptor}",
            f"--host={self._host}",
            f"--port={self._port}",
            pass_fds=[descriptor],
            stdin=asyncio.subprocess.DEVNULL,
            process_group=0,  # Ctrl-C would end it before it can ignore signals
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

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
            self._heard = False
            self._connection.send(Kind.PING)
            await asyncio.sleep(_PING_SECONDS)
            missed = 0 if self._heard else missed + 1
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
        self._heard = True
        if kind is Kind.BEGIN:
            self._begin(number, body)
        elif kind is Kind.LISTENING:
            self._listens(None)
        elif kind is Kind.NOT_LISTENING:
            self._listens(PortInUse(body.decode(errors="replace")))
        elif (begun := self._calls.get(number)) is not None:
            call, task = begun
            call.receive(kind, body)
            if kind is Kind.DONE:
                del self._calls[number]
                if not call.ended:
                    task.cancel()  # the client has disconnected

    def _begin(self, number: int, body: bytes) -> None:
        begin = read_call_body(body)

        def send(kind: Kind, *body: Payload) -> None:
            self._connection.send(kind, number, *body)

        call = RemoteCall(send, begin)
        task = asyncio.create_task(_answered(self._answer, begin.method, call))
        self._calls[number] = call, task
        self._tasks.add(task)
        task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _LOG.error("a call was not answered to its end", exc_info=error)

    def _listens(self, error: Exception | None) -> None:
        if self._listening.done():
            return
        if error is None:
            self._listening.set_result(None)
        else:
            self._listening.set_exception(error)
            self._listening.exception()  # nobody may wait for it any more

    def _lost(self) -> None:
        self._listens(FrontEndFailed("a front end has ended before it listened"))
        for call, task in self._calls.values():
            call.receive(Kind.DONE, b"")
            task.cancel()
        self._calls.clear()


def _reserve(host: str, port: int) -> list[socket.socket]:
    """Sockets that are bound to each address of a host and do not listen.

    Front ends can listen there beside them, and nobody else can take the port when they restart. If
    `port` is 0, the first socket finds a free port for all.

    Raises:
        PortInUse: an address cannot be bound.
    """
    reserved: list[socket.socket] = []
    absent: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, (name, _, *scope) in found:
            try:
                bound = _bound(family, kind, protocol, (name, port, *scope))
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
        raise PortInUse.of(in_grpc_notation(host, port), error) from error
    return reserved


def _bound(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> socket.socket:
    bound = socket.socket(family, kind, protocol)
    try:
        # Connections of an earlier server keep its port for a minute, unless this is set.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        # From now on nobody can bind the port but our front ends.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        bound.close()
        raise
    return bound


async def _answered(answer: Answer, path: str, call: RemoteCall) -> None:
    """Answers a call. The front end learns of its end, however it comes."""
    try:
        await answer(path, call)
        call.end()
    finally:
        call.abandon()
