"""The boundary of all rpcs: reads requests, writes responses, and turns exceptions into statuses.

Every rpc of `rheostat.v1` passes through `ErrorInterceptor`. A `RheostatError` becomes its status
with details. Any other exception becomes INTERNAL with a generic text, and is logged.

Why streams are written here: a handler's generator is closed at once when its client disconnects.
Why requests are decoded here: gRPC would answer an invalid message with UNKNOWN and a Python repr.
"""

import asyncio
import inspect
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    aclosing,
    asynccontextmanager,
)
from functools import partial
from typing import NoReturn, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.rpc import status_pb2

from rheostat_server.errors import (
    DeadlinePassed,
    Defect,
    NotImplementedHere,
    RheostatError,
)
from rheostat_server.incoming import Calls, Incoming, Reader
from rheostat_server.interruption import Interruption
from rheostat_server.limits import (
    CONTROL_MESSAGE_BYTES,
    STATUS_SECONDS,
    SUBSCRIBE_OPEN_BYTES,
    TENSOR_MESSAGE_BYTES,
)
from rheostat_server.status import DETAILS_KEY, to_status

_LOG = logging.getLogger(__name__)

_OURS = "/rheostat.v1."
_CONTROL = "/rheostat.v1.EngineService/"

_LARGEST = {"/rheostat.v1.CaptureService/Subscribe": SUBSCRIBE_OPEN_BYTES}
"""The largest message, in bytes, of rpcs with a lower limit than their service. The event loop
decodes messages, so a larger message is refused before it is decoded."""

_INSTEAD = {
    "PatchService/CaptureRun": (
        "call Generate with max_tokens 1 and a capture into a run (CaptureSpec.run)"
    ),
    "PatchService/Sweep": (
        "steer a site in a Generate call for each cell, and compare with with_baseline"
    ),
}
"""Alternatives to rpcs that are not served yet."""

_LOGGED = 400
"""Characters of a refusal's text in the log; clients choose parts of it."""

Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext[Message, Message]
AnyContext = grpc.aio.ServicerContext[Request, Response]
Unary = Callable[[Request, AnyContext[Request, Response]], Awaitable[Response]]
Stream = Callable[[Request, AnyContext[Request, Response]], AsyncGenerator[Response, None]]
Begun = Callable[[AnyContext[Request, Response], Incoming], AbstractAsyncContextManager[Request]]

Place = Callable[[], AbstractContextManager[Incoming]]
"""Counts a call while the context lasts; see `Calls.begun`."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps exceptions of all handlers of our services."""

    def __init__(self, calls: Calls) -> None:
        """An interceptor that counts in `calls`."""
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails],
            Awaitable["grpc.RpcMethodHandler[Request, Response] | None"],
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Request, Response] | None":
        """Wraps the handler of a call."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_OURS):
            return handler
        return _wrapped(method, handler, self._calls)


def _wrapped(
    method: str, handler: "grpc.RpcMethodHandler[Request, Response]", calls: Calls
) -> "grpc.RpcMethodHandler[Request, Response]":
    """Wraps a handler, which then receives its requests as a stream of bytes; see `incoming`."""
    reader = Reader(handler.request_deserializer or cast(Callable[[bytes], Request], bytes))
    encode = handler.response_serializer
    control = method.startswith(_CONTROL)
    most = _LARGEST.get(method, CONTROL_MESSAGE_BYTES if control else TENSOR_MESSAGE_BYTES)
    behaviour = (
        handler.unary_unary or handler.stream_unary or handler.unary_stream or handler.stream_stream
    )

    @asynccontextmanager
    async def begun(
        context: AnyContext[Request, Response], incoming: Incoming
    ) -> AsyncIterator[Request]:
        """The behaviour's argument: the message, or an iterator of messages."""
        try:
            async with _deadline(context):
                if not handler.request_streaming:
                    yield await incoming.only(context, reader, most)
                    return
                async with aclosing(incoming.each(context, reader, most)) as messages:
                    yield cast(Request, messages)
        finally:
            incoming.release()

    place = partial(calls.begun, control=control)
    if handler.response_streaming:
        many = _stream(method, cast(Stream[Request, Response], behaviour), begun, place)
        return grpc.stream_stream_rpc_method_handler(many, None, encode)
    one = _unary(method, cast(Unary[Request, Response], behaviour), begun, place)
    return grpc.stream_unary_rpc_method_handler(one, None, encode)


def _unary(
    method: str,
    behaviour: Unary[Request, Response],
    begun: Begun[Request, Response],
    place: Place,
) -> Callable[[object, AnyContext[Request, Response]], Awaitable[Response]]:
    async def answer(context: AnyContext[Request, Response], incoming: Incoming) -> Response:
        async with begun(context, incoming) as request:
            return await behaviour(request, context)

    async def handle(_: object, context: AnyContext[Request, Response]) -> Response:
        with ExitStack() as held:  # a call keeps its place while its status is on its way
            try:
                _check_served(method, inspect.iscoroutinefunction(behaviour))
                return await answer(context, held.enter_context(place()))
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # the boundary: whatever it is, the wire gets a status
                status = _status(method, error)
            return await _abort(context, status)

    return handle


def _stream(
    method: str,
    behaviour: Stream[Request, Response],
    begun: Begun[Request, Response],
    place: Place,
) -> Callable[[object, AnyContext[Request, Response]], Awaitable[None]]:
    async def answer(context: AnyContext[Request, Response], incoming: Incoming) -> None:
        async with (
            begun(context, incoming) as request,
            aclosing(behaviour(request, context)) as messages,
        ):
            interruption = Interruption()
            begun_writing = False
            async for message in messages:
                if not begun_writing:
                    # gRPC would send the headers with the first message. While headers are being
                    # sent, gRPC cannot end a call with an error.
                    await _sent(context.send_initial_metadata(()))
                    begun_writing = True
                with interruption.writing():
                    await _sent(context.write(message))

    async def handle(_: object, context: AnyContext[Request, Response]) -> None:
        with ExitStack() as held:  # a call keeps its place while its status is on its way
            try:
                _check_served(method, inspect.isasyncgenfunction(behaviour))
                await answer(context, held.enter_context(place()))
                return
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # the boundary: whatever it is, the wire gets a status
                status = _status(method, error)
            await _abort(context, status)

    return handle


async def _sent(sending: Awaitable[None]) -> None:
    """Waits until headers, a message or a status are sent.

    Raises:
        CancelledError: the client has disconnected. In most cases gRPC raises this error itself.
            If a message waits for room in the connection, gRPC raises `InternalError` instead.
    """
    try:
        await sending
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


@asynccontextmanager
async def _deadline(context: AnyContext[Request, Response]) -> AsyncIterator[None]:
    """Cancels the body when the caller's deadline passes, and raises DeadlinePassed."""
    remaining = context.time_remaining()
    try:
        async with asyncio.timeout(remaining) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlinePassed("the call's deadline passed") from error


def _check_served(method: str, served: bool) -> None:
    """Raises NotImplementedHere for generated methods, which are not asynchronous as ours are."""
    if not served:
        name = method.removeprefix(_OURS)
        instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise NotImplementedHere(f"{name} is not served yet{instead}")


def _status(method: str, error: Exception) -> status_pb2.Status:
    """The status of a call that an exception has ended. The exception is logged."""
    if isinstance(error, RheostatError):
        _LOG.info("%s refused: %s: %s", method, error.reason, _one_line(error.message))
        return to_status(error)
    incident = uuid.uuid4().hex[:12]
    _LOG.error("%s failed, incident %s", method, incident, exc_info=error)
    return to_status(
        Defect(
            f"the server has a defect; its log says more under incident {incident}",
            metadata={"incident": incident},
        )
    )


async def _abort(context: AnyContext[Request, Response], status: status_pb2.Status) -> NoReturn:
    """Ends a call with a status.

    The caller's frame must hold no request, and must not be handling an exception. gRPC keeps the
    exception of `abort` until a garbage collection, with all its frames and its context.

    The wait for a client that does not read ends after `STATUS_SECONDS`. gRPC keeps the status, so
    the client still receives it when it reads.

    Raises:
        CancelledError: the client has disconnected, or does not read.
    """
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    details = ((DETAILS_KEY, status.SerializeToString()),)
    sending = context.abort(code, status.message, trailing_metadata=details)
    try:
        async with asyncio.timeout(STATUS_SECONDS):
            await _sent(sending)
    except TimeoutError:
        raise asyncio.CancelledError from None
    raise AssertionError("gRPC's abort always raises")


def _one_line(text: str) -> str:
    """The beginning of a text. Spaces replace line breaks and other unprintable characters."""
    return "".join(c if c.isprintable() else " " for c in text[:_LOGGED])
