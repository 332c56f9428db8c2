"""Calls that are answered where gRPC is spoken: health and reflection."""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, status_pb2
from grpc_health.v1 import health, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from rheostat_server.front_ends.core_server import CoreCall, FairLock
from rheostat_server.tasks.futures import keep, resolve
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

_LOG = logging.getLogger(__name__)

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

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_HealthContext = grpc.aio.ServicerContext[HealthCheckRequest, HealthCheckResponse]


class _Aborted(Exception):
    """Ends a call with a status."""

    def __init__(self, status: status_pb2.Status) -> None:
        self.status = status


class LocalCalls:
    """Answers calls of health and reflection in tasks of the event loop."""

    def __init__(self, lock: FairLock) -> None:
        """No call runs. `lock` is that of the gRPC server."""
        self._lock = lock
        self._handlers: dict[str, Handler] = {}
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        served = _Health()
        self.set_health: Final = served.set
        """Sets the answer of health checks for the server and all its services."""
        server = cast(grpc.aio.Server, self)  # the generated functions call two of its methods
        health_pb2_grpc.add_HealthServicer_to_server(served, server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflects = reflection.aio.ReflectionServicer(names)
        add = reflection_pb2_grpc.add_ServerReflectionServicer_to_server
        add(reflects, server)  # type: ignore[no-untyped-call]  # it has no annotations

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Does nothing: `add_registered_method_handlers` gets the same handlers by name."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Adds methods by name, as generated functions do."""
        self._handlers.update({f"/{service}/{name}": each for name, each in handlers.items()})

    def answers(self, call: CoreCall) -> bool:
        """Begins to answer a call, in any thread; returns False if no handler has its method."""
        handler = self._handlers.get(call.path)
        if handler is not None:
            self._loop.call_soon_threadsafe(self._begin, handler, call)
        return handler is not None

    def _begin(self, handler: Handler, call: CoreCall) -> None:
        task = keep(self._tasks, self._answer(handler, call))
        with self._lock:
            call.open(lambda: self._loop.call_soon_threadsafe(task.cancel))

    async def _answer(self, handler: Handler, call: CoreCall) -> None:
        status: status_pb2.Status | None = None
        try:
            await _Answer(handler, call, self._lock).run()
        except _Aborted as aborted:
            status = aborted.status
        except DecodeError:
            status = status_pb2.Status(code=code_pb2.INVALID_ARGUMENT)
        except Exception:  # the boundary: an exception becomes a status
            _LOG.exception("%s failed", call.path)
            status = status_pb2.Status(code=code_pb2.INTERNAL, message="the server has a defect")
        with self._lock:
            call.end(status, lambda: None)


class _Answer:
    """The answer to a call, and the context that its handler gets."""

    def __init__(self, handler: Handler, call: CoreCall, lock: FairLock) -> None:
        self._handler = handler
        self._call = call
        self._lock = lock
        self._loop = asyncio.get_running_loop()

    async def run(self) -> None:
        """Answers the call to its end."""
        handler = self._handler
        behaviour: Any = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        requests = self._requests()
        request = requests if handler.request_streaming else await anext(requests, None)
        if request is None:
            raise _Aborted(status_pb2.Status(code=code_pb2.INVALID_ARGUMENT))
        answer = behaviour(request, self)
        if inspect.isasyncgen(answer):
            async for response in answer:
                await self.write(response)
        elif handler.response_streaming:
            await answer
        else:
            await self.write(await answer)

    async def write(self, response: object) -> None:
        """Sends a response."""
        taken: asyncio.Future[bool] = self._loop.create_future()
        encode: Any = self._handler.response_serializer
        message = encode(response)
        with self._lock:
            self._call.write(message, partial(self._resolve, taken))
        if not await taken:
            raise asyncio.CancelledError

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """Ends the call with a status."""
        raise _Aborted(status_pb2.Status(code=code.value[0], message=details))

    async def _requests(self) -> AsyncIterator[Any]:
        decode: Any = self._handler.request_deserializer
        while True:
            read: asyncio.Future[bytes | None] = self._loop.create_future()
            with self._lock:
                self._call.read(partial(self._resolve, read))
            message = await read
            if message is None:
                return
            yield decode(message)

    def _resolve(self, future: "asyncio.Future[Any]", result: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(resolve, future, result)


class _Health(health_pb2_grpc.HealthServicer):
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
        self, request: HealthCheckRequest, context: _HealthContext
    ) -> HealthCheckResponse:
        """The last status."""
        if request.service not in HEALTH_NAMES:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return HealthCheckResponse(status=self._status)

    async def Watch(self, request: HealthCheckRequest, context: _HealthContext) -> None:
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
