"""A front end: a process that speaks gRPC with clients, and passes their calls to the server.

    python -m rheostat_server.front_ends.process --fd 7 --host 127.0.0.1 --port 50051

It knows nothing of models or requests, and imports neither torch nor vLLM. It ends with the server:
as soon as the socket to the server is closed, whatever has happened there.
"""

import argparse
import asyncio
import os
import signal
import socket
from typing import Final

import grpc.aio
from google.rpc import status_pb2
from grpc_health.v1.health_pb2 import HealthCheckResponse

from rheostat_server.errors import PortInUse
from rheostat_server.front_ends.call import Call
from rheostat_server.front_ends.grpc_server import GrpcServer
from rheostat_server.front_ends.records import (
    Kind,
    RecordConnection,
    call_body,
    read_seconds_body,
)

_LOST = 1
"""The exit status if the server has gone without a word."""


class FrontEnd:
    """The calls of this process."""

    def __init__(self) -> None:
        """Nothing is connected yet; see `run`."""
        self._connection = RecordConnection(self._receive, self._lost)
        self._server = GrpcServer(self._forward, share_port=True)
        self._calls: dict[int, _ForwardedCall] = {}
        self._begun = 0
        self._stop: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        """The seconds that calls may still take, once the server has told this process to end."""
        self._health: asyncio.Task[None] | None = None

    async def run(self, connection: socket.socket, host: str, port: int) -> None:
        """Serves until the server says that the front end must end."""
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self._connection, sock=connection)
        await self._server.set_health(HealthCheckResponse.NOT_SERVING)
        try:
            await self._server.start(host, port)
        except PortInUse as error:
            self._connection.send(Kind.NOT_LISTENING, body=str(error).encode())
            await self._stop
            return
        self._connection.send(Kind.LISTENING)
        await self._server.stop(await self._stop)
        self._connection.close()

    async def _forward(self, path: str, call: Call) -> None:
        """Passes a call to the server, and its answer to the client."""
        number = self._begun = (self._begun + 1) & 0xFFFF_FFFF
        forwarded = self._calls[number] = _ForwardedCall(number, call, self._connection)
        self._connection.send(Kind.BEGIN, number, call_body(path, call.time_remaining()))
        try:
            status = await forwarded.run()
            if status is not None:
                await call.fail(status)
        finally:
            forwarded.close()
            del self._calls[number]
            self._connection.send(Kind.DONE, number)

    def _receive(self, kind: Kind, number: int, body: bytes) -> None:
        if kind is Kind.HEALTH:
            self._health = asyncio.create_task(self._server.set_health(body[0]))
        elif kind is Kind.STOP:
            if not self._stop.done():
                self._stop.set_result(read_seconds_body(body))
        elif (call := self._calls.get(number)) is not None:
            call.receive(kind, body)

    def _lost(self) -> None:
        if not self._stop.done():
            os._exit(_LOST)  # there is nobody to answer any call


class _ForwardedCall:
    """A call between its client and the server."""

    def __init__(self, number: int, call: Call, connection: RecordConnection) -> None:
        self._number: Final = number
        self._call = call
        self._connection = connection
        self._message: bytes | None = None
        """The message that the server wants to be written next."""
        self._end: bytes | None = None
        """The status with which the server has ended the call."""
        self._news = asyncio.Event()
        self._writer: asyncio.Task[object] | None = None
        self._reader: asyncio.Task[None] | None = None

    async def run(self) -> status_pb2.Status | None:
        """Writes the server's messages until it ends the call; returns the status, None for OK."""
        begun = False
        while True:
            await self._news.wait()
            self._news.clear()
            if self._end is not None:
                return status_pb2.Status.FromString(self._end) if self._end else None
            if self._message is not None:
                if not begun:
                    await self._call.send_headers()
                    begun = True
                await self._write(self._message)

    def receive(self, kind: Kind, body: bytes) -> None:
        """Takes a record of the server."""
        if kind is Kind.MESSAGE:
            self._message = body
            self._news.set()
        elif kind is Kind.READ:
            self._reader = asyncio.create_task(self._read())
        elif kind is Kind.END:
            self._end, self._message = body, None
            self._news.set()
            if self._writer is not None:
                self._writer.cancel()

    def close(self) -> None:
        """Stops reading."""
        if self._reader is not None:
            self._reader.cancel()

    async def _write(self, message: bytes) -> None:
        """Writes a message, unless the server has ended the call or ends it meanwhile."""
        if self._end is not None:
            return
        self._writer = task = asyncio.current_task()
        assert task is not None
        try:
            await self._call.write(message)
        except asyncio.CancelledError:
            if self._end is None:
                raise
            task.uncancel()
            return
        finally:
            self._writer = self._message = None
        self._connection.send(Kind.WRITTEN, self._number)

    async def _read(self) -> None:
        try:
            message = await self._call.read()
        except (grpc.aio.InternalError, grpc.aio.UsageError):
            return  # the client has disconnected, of which the call's own task learns
        if message is None:
            self._connection.send(Kind.HALF_CLOSED, self._number)
        else:
            self._connection.send(Kind.MESSAGE, self._number, message)


def main() -> None:
    """Runs a front end until the server ends it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fd", type=int, required=True, help="of the socket to the server")
    parser.add_argument("--host", required=True, help="address to listen on")
    parser.add_argument("--port", type=int, required=True, help="port to listen on")
    arguments = parser.parse_args()
    # Ctrl-C and service managers signal all processes of a group. The server drains first.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(_run(arguments.fd, arguments.host, arguments.port))


async def _run(descriptor: int, host: str, port: int) -> None:
    await FrontEnd().run(socket.socket(fileno=descriptor), host, port)


if __name__ == "__main__":
    main()
