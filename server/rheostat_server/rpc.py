"""The one place where a handler's exceptions become statuses.

Every rpc of `rheostat.v1` passes through `ErrorInterceptor`: a `RheostatError` becomes its status
with details, anything else INTERNAL with a generic text and a log entry. Streams are written here
too, so that a handler's generator is closed at once when its caller goes away. Messages are read
here too: gRPC itself would answer bytes that are no message with UNKNOWN and a Python repr, and
protobuf would skip fields that it does not know. Large messages are read one at a time.
"""

import asyncio
import inspect
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import NamedTuple, NoReturn, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from rheostat_server.errors import (
    DeadlinePassed,
    Defect,
    InvalidValue,
    MessageTooLarge,
    NotImplementedHere,
    RheostatError,
    UnknownField,
)
from rheostat_server.limits import (
    CONTROL_MESSAGE_BYTES,
    LARGE_MESSAGE_BYTES,
    OFFLOAD_BYTES,
    TENSOR_MESSAGE_BYTES,
)
from rheostat_server.status import DETAILS_KEY, to_status
from rheostat_server.unknown_fields import unknown_field

_LOG = logging.getLogger(__name__)

_OURS = "/rheostat.v1."
_CONTROL = "/rheostat.v1.EngineService/"

_INSTEAD = {
    "PatchService/CaptureRun": (
        "call Generate with max_tokens 1 and a capture into a run (CaptureSpec.run)"
    ),
    "PatchService/Sweep": (
        "steer a site in a Generate call for each cell, and compare with with_baseline"
    ),
}
"""What can be done in place of an rpc that is not served yet."""

_LOGGED = 400
"""Characters of a refusal's text in the log; clients choose parts of it."""

Request = TypeVar("Request")
Response = TypeVar("Response")
Context = grpc.aio.ServicerContext[Message, Message]
AnyContext = grpc.aio.ServicerContext[Request, Response]
Unary = Callable[[Request, AnyContext[Request, Response]], Awaitable[Response]]
Stream = Callable[[Request, AnyContext[Request, Response]], AsyncGenerator[Response, None]]


class Calls:
    """Counts the calls that run."""

    def __init__(self) -> None:
        """No call runs."""
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a call while the context lasts."""
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def until_none(self) -> None:
        """Returns once no call runs."""
        await self._idle.wait()


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps exceptions of all handlers of our services."""

    def __init__(self, calls: Calls) -> None:
        """An interceptor that counts in `calls`."""
        self._calls = calls
        self._turn = asyncio.Lock()

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
        return _wrapped(method, handler, self._calls, self._turn)


def _wrapped(
    method: str,
    handler: "grpc.RpcMethodHandler[Request, Response]",
    calls: Calls,
    turn: asyncio.Lock,
) -> "grpc.RpcMethodHandler[Request, Response]":
    decode, encode = handler.request_deserializer, handler.response_serializer
    if decode is not None:
        decode = _later(_reader(method, decode, streaming=handler.request_streaming))
    if handler.unary_unary is not None:
        one = _unary(method, cast(Unary[Request, Response], handler.unary_unary), calls, turn)
        return grpc.unary_unary_rpc_method_handler(one, decode, encode)
    if handler.stream_unary is not None:
        one = _unary(method, cast(Unary[Request, Response], handler.stream_unary), calls, turn)
        return grpc.stream_unary_rpc_method_handler(one, decode, encode)
    if handler.unary_stream is not None:
        many = _stream(method, cast(Stream[Request, Response], handler.unary_stream), calls, turn)
        return grpc.unary_stream_rpc_method_handler(many, decode, encode)
    many = _stream(method, cast(Stream[Request, Response], handler.stream_stream), calls, turn)
    return grpc.stream_stream_rpc_method_handler(many, decode, encode)


def _unary(
    method: str, behaviour: Unary[Request, Response], calls: Calls, turn: asyncio.Lock
) -> Callable[[Request, AnyContext[Request, Response]], Awaitable[Response]]:
    async def handle(request: Request, context: AnyContext[Request, Response]) -> Response:
        try:
            _check_served(method, inspect.iscoroutinefunction(behaviour))
            with calls.counted():
                async with _deadline(context):
                    return await behaviour(await _readable(request, turn), context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # the boundary: whatever it is, the wire gets a status
            await _abort(method, context, error)

    return handle


def _stream(
    method: str, behaviour: Stream[Request, Response], calls: Calls, turn: asyncio.Lock
) -> Callable[[Request, AnyContext[Request, Response]], Awaitable[None]]:
    async def handle(request: Request, context: AnyContext[Request, Response]) -> None:
        try:
            _check_served(method, inspect.isasyncgenfunction(behaviour))
            with calls.counted():
                async with _deadline(context):
                    messages = behaviour(await _readable(request, turn), context)
                    async with aclosing(messages):
                        async for message in messages:
                            await _write(context, message)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # the boundary: whatever it is, the wire gets a status
            await _abort(method, context, error)

    return handle


async def _write(context: AnyContext[Request, Response], message: Response) -> None:
    """Sends a message.

    Raises:
        CancelledError: the client has gone. gRPC raises the same in most cases, but an error of
            its own if the client goes while the message waits for room in the connection.
    """
    try:
        await context.write(message)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


class _Refused(NamedTuple):
    """Stands for a message that is refused. gRPC takes no error from where messages are read."""

    error: RheostatError


class _Large:
    """Stands for a large message that has not been parsed."""

    def __init__(self, data: bytes, decode: Callable[[bytes], object]) -> None:
        self._data = data
        self._decode = decode

    async def parsed(self, turn: asyncio.Lock) -> object:
        """The message; can be asked for once.

        `turn` is held during the next iteration of the event loop, in which others get their turn.
        """
        async with turn:
            data, self._data = self._data, b""  # gRPC holds this object for longer than the call
            message = self._decode(data)
            await asyncio.sleep(0)
        return message


def _later(decode: Callable[[bytes], Request]) -> Callable[[bytes], Request]:
    """Leaves large messages to `_readable`, because gRPC parses all that have come at once."""

    def read(data: bytes) -> Request:
        if len(data) > LARGE_MESSAGE_BYTES:
            return cast(Request, _Large(data, decode))
        return decode(data)

    return read


def _reader(
    method: str, decode: Callable[[bytes], Request], *, streaming: bool
) -> Callable[[bytes], Request]:
    """Reads messages; `_readable` raises for those that are refused."""

    def refused(error: RheostatError) -> Request:
        return cast(Request, _Refused(error))

    most = CONTROL_MESSAGE_BYTES if method.startswith(_CONTROL) else TENSOR_MESSAGE_BYTES

    def read(data: bytes) -> Request:
        if len(data) > most:
            text = f"the request has {len(data)} bytes; this service takes at most {most}"
            return refused(MessageTooLarge(text))
        try:
            request = decode(data)
        except DecodeError:
            return refused(InvalidValue("the request cannot be decoded as a message of this rpc"))
        if not isinstance(request, Message):
            return request
        path = unknown_field(request, data)
        if path is not None:
            return refused(_unknown(path))
        return _lean(request, len(data)) if streaming else request

    return read


def _unknown(path: str) -> UnknownField:
    return UnknownField(
        f"this server does not know the field {path or 'somewhere in the request'}; "
        "GetModel lists the features that it serves",
        field=path,
        metadata={"path": path},
    )


def _lean(request: Request, size: int) -> Request:
    """A message of `size` bytes that takes no more memory than its fields.

    gRPC holds a stream's last message until the next one comes, and a message holds the bytes of
    fields that were sent more than once.
    """
    if size > OFFLOAD_BYTES and isinstance(request, Message) and request.ByteSize() < size:
        copy = type(request)()
        copy.CopyFrom(request)
        return copy
    return request


async def _readable(request: Request, turn: asyncio.Lock) -> Request:
    """A request, or a stream of requests, that raises instead of giving a refused one.

    Raises:
        RheostatError: it is one request, and is refused.
    """
    if isinstance(request, AsyncIterator):
        return cast(Request, _each_readable(request, turn))
    if isinstance(request, _Large):
        request = cast(Request, await request.parsed(turn))
    if isinstance(request, _Refused):
        raise request.error
    return request


async def _each_readable(
    requests: AsyncIterator[Request], turn: asyncio.Lock
) -> AsyncGenerator[Request, None]:
    async for request in requests:
        yield await _readable(request, turn)


@asynccontextmanager
async def _deadline(context: AnyContext[Request, Response]) -> AsyncIterator[None]:
    """Ends what runs inside when the caller's deadline passes."""
    remaining = context.time_remaining()
    try:
        async with asyncio.timeout(remaining) as limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlinePassed("the call's deadline passed") from error


def _check_served(method: str, served: bool) -> None:
    """Ours are coroutines and asynchronous generators; the generated stand-ins are neither."""
    if not served:
        name = method.removeprefix(_OURS)
        instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise NotImplementedHere(f"{name} is not served yet{instead}")


async def _abort(method: str, context: AnyContext[Request, Response], error: Exception) -> NoReturn:
    if isinstance(error, RheostatError):
        known = error
        _LOG.info("%s refused: %s: %s", method, known.reason, _one_line(known.message))
    else:
        incident = uuid.uuid4().hex[:12]
        _LOG.error("%s failed, incident %s", method, incident, exc_info=error)
        known = Defect(
            f"the server has a defect; its log says more under incident {incident}",
            metadata={"incident": incident},
        )
    status = to_status(known)
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    await context.abort(
        code, status.message, trailing_metadata=((DETAILS_KEY, status.SerializeToString()),)
    )


def _one_line(text: str) -> str:
    """A text's beginning, with spaces for line breaks and whatever else does not print."""
    return "".join(c if c.isprintable() else " " for c in text[:_LOGGED])
