"""Calls that a front end answers itself: health and reflection."""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, status_pb2

from rheostat_server.front_ends.call import resolve
from rheostat_server.front_ends.core_server import CoreCall, FairLock

_LOG = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class _Aborted(Exception):
    """Ends a call with a status."""

    def __init__(self, status: status_pb2.Status) -> None:
        self.status = status


class LocalCalls:
    """Answers calls with handlers, as `grpc.aio` does, in tasks of the event loop."""

    def __init__(self, lock: FairLock) -> None:
        """Has no handlers yet. `lock` is that of the server."""
        self._lock = lock
        self._handlers: dict[str, Handler] = {}
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

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
        task = self._loop.create_task(self._answer(handler, call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
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
            status = status_pb2.Status(code=code_pb2.INTERNAL)
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
