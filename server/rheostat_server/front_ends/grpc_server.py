"""The gRPC server of a process, which passes calls of `rheostat.v1` to a function."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import grpc
import grpc.aio
from google.protobuf.descriptor import FileDescriptor
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # has no stubs
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha import reflection

from rheostat_server.errors import PortInUse
from rheostat_server.front_ends.call import Call, Context, GrpcCall
from rheostat_server.limits import LOOKAHEAD_BYTES, TENSOR_MESSAGE_BYTES
from rheostat_wire.v1 import (
    capture_service_pb2,
    engine_service_pb2,
    generation_service_pb2,
    lens_service_pb2,
    monitor_service_pb2,
    run_service_pb2,
    steering_service_pb2,
    sweep_service_pb2,
)
from rheostat_wire.wakeups import all_wakeups_read

_FILES: tuple[FileDescriptor, ...] = (
    engine_service_pb2.DESCRIPTOR,
    generation_service_pb2.DESCRIPTOR,
    lens_service_pb2.DESCRIPTOR,
    steering_service_pb2.DESCRIPTOR,
    sweep_service_pb2.DESCRIPTOR,
    capture_service_pb2.DESCRIPTOR,
    run_service_pb2.DESCRIPTOR,
    monitor_service_pb2.DESCRIPTOR,
)

_DESCRIPTORS = [service for file in _FILES for service in file.services_by_name.values()]

SERVICES = tuple(service.full_name for service in _DESCRIPTORS)
"""Full names of the services of `rheostat.v1`."""

PATHS = frozenset(
    f"/{service.full_name}/{method.name}" for service in _DESCRIPTORS for method in service.methods
)
"""Full names of their methods."""

HEALTH_NAMES = ("", *SERVICES)
"""Names of services in health checks."""

HealthContext = grpc.aio.ServicerContext[HealthCheckRequest, HealthCheckResponse]

Answer = Callable[[str, Call], Awaitable[None]]
"""Answers a call to its end. The first argument is the full name of the method."""

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", TENSOR_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    # By default gRPC receives some MiB of each call ahead of reads, and more on fast networks.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
    # Calls may be silent for long, so clients may ping often.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)
"""Options of gRPC servers. The port may be shared or not, so it has no option here."""


_ACCEPTED = 16
"""Calls that gRPC's core accepts before the event loop has begun the first of them."""


class GrpcServer:
    """A gRPC server with the services of `rheostat.v1`, health and reflection.

    No other process can listen on its port. Otherwise a second server would get half of the calls.
    """

    def __init__(self, answer: Answer) -> None:
        self._health = Health()
        options = (*OPTIONS, ("grpc.so_reuseport", 0))
        with all_wakeups_read(), _accepting_ahead():
            self._server = grpc.aio.server(options=options)
        self._server.add_generic_rpc_handlers((_Handlers(answer),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, host: str, port: int) -> int:
        """Listens, and begins to accept calls; returns the port.

        Raises:
            PortInUse: the address is in use or not allowed.
        """
        address = grpc_address(host, port)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise PortInUse(f"cannot listen on {address}: it is in use or not allowed") from error
        await self._server.start()
        return port

    def set_health(self, status: int) -> None:
        """Sets the answer of health checks for the server and all its services."""
        self._health.set(status)

    async def stop(self, grace: float) -> None:
        """Accepts no further calls, and ends running calls after `grace` seconds."""
        await self._server.stop(grace)


class _AcceptingServer(cygrpc.AioServer):  # type: ignore[misc]  # has no stubs
    """The server of `grpc.aio`, which accepts several calls ahead.

    Why
        Without this, the core accepts the next call when the event loop has begun the last one. In
        grpcio 1.85 that takes six iterations of the loop for a call. If a client makes hundreds of
        calls and each iteration has other work, another client's call waits for seconds behind
        them. With calls that are accepted already, it takes two iterations.
    How
        `grpc.aio` requests a call, waits for it, and begins it. Here `_ACCEPTED` calls have been
        requested, and `grpc.aio` gets the oldest request. The core serves requests in order.

    The methods are private. If they have other names one day, calls are accepted as without this.
    """

    def __init__(self, *arguments: object) -> None:
        """See `grpc.aio.server`."""
        super().__init__(*arguments)
        self._requests: deque[asyncio.Task[object]] = deque()
        """Requests for calls that `grpc.aio` has not got, oldest first."""

    def _make_request_call_future(self, method: bytes | None) -> "asyncio.Future[object]":
        """Requests a call; returns the oldest request. `method` is None, or a health check."""
        if method is not None:
            request: asyncio.Future[object] = super()._make_request_call_future(method)
            return request
        while len(self._requests) < _ACCEPTED:
            made = super()._make_request_call_future(None)
            made.add_done_callback(_ignore_error)
            self._requests.append(made)
        return self._requests.popleft()

    async def _start_shutting_down(self) -> None:
        """Ends the calls that were accepted too late, so that the server does not wait for them."""
        await super()._start_shutting_down()
        self._requests.clear()


def _ignore_error(request: "asyncio.Task[object]") -> None:
    """Keeps asyncio from logging that a request has failed because the server shuts down."""
    if not request.cancelled():
        request.exception()


@contextmanager
def _accepting_ahead() -> Iterator[None]:
    """Makes the servers of `grpc.aio` that are created meanwhile accept calls ahead."""
    stock = cygrpc.AioServer
    cygrpc.AioServer = _AcceptingServer
    try:
        yield
    finally:
        cygrpc.AioServer = stock


def grpc_address(host: str, port: int) -> str:
    """An address in gRPC's notation, with IPv6 hosts in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Health(health_pb2_grpc.HealthServicer):
    """Answers health checks.

    gRPC's own servicer waits in `set` until each watcher has read the status before. So a client
    that does not read would block the server before it drains.
    """

    def __init__(self) -> None:
        self._status = int(HealthCheckResponse.NOT_SERVING)
        self._changed = asyncio.Event()

    def set(self, status: int) -> None:
        """Sets the answer for the server and all its services."""
        self._status = status
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(
        self, request: HealthCheckRequest, context: HealthContext
    ) -> HealthCheckResponse:
        """The last status."""
        if request.service not in HEALTH_NAMES:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return HealthCheckResponse(status=self._status)

    async def Watch(self, request: HealthCheckRequest, context: HealthContext) -> None:
        """Sends the status, and each change of it."""
        unknown = request.service not in HEALTH_NAMES
        last: int | None = None
        while True:
            changed = self._changed
            status = HealthCheckResponse.SERVICE_UNKNOWN if unknown else self._status
            if status != last:
                await context.write(HealthCheckResponse(status=status))
                last = status
            await changed.wait()


class _Handlers(grpc.GenericRpcHandler):
    """The handlers of the methods of `rheostat.v1`."""

    def __init__(self, answer: Answer) -> None:
        self._handlers = {path: _handler(path, answer) for path in PATHS}

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        return self._handlers.get(handler_call_details.method)


def _handler(path: str, answer: Answer) -> "grpc.RpcMethodHandler[bytes, bytes]":
    """A handler that streams bytes in both directions, which works for every kind of method."""

    async def handle(messages: object, context: Context) -> None:
        call = GrpcCall(context)
        del messages, context  # see GrpcCall.fail
        await answer(path, call)

    return grpc.stream_stream_rpc_method_handler(handle, None, None)
