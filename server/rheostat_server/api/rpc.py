"""The boundary of all rpcs: reads requests, writes responses, and turns exceptions into statuses.

Every call of `rheostat.v1` passes through `Rpcs.answer`, whichever process speaks gRPC for it. A
`RheostatError` becomes its status with details. Any other exception becomes INTERNAL with a generic
text, and is logged.

Why streams are written here: a handler's generator is closed at once when its client disconnects.
Why requests are decoded here: gRPC would answer an invalid message with UNKNOWN and a Python repr.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import TypeAlias, TypeVar, cast

import grpc
import grpc.aio
from google.protobuf.message import Message
from google.rpc import status_pb2

from rheostat_server.api.incoming import Calls, Incoming, Reader
from rheostat_server.errors import DeadlinePassed, Defect, NotImplementedHere, RheostatError
from rheostat_server.errors.status import to_status
from rheostat_server.front_ends.call import Call
from rheostat_server.limits import CONTROL_MESSAGE_BYTES, SUBSCRIBE_OPEN_BYTES, TENSOR_MESSAGE_BYTES
from rheostat_server.tasks.direct_messages import DirectMessages, offer_direct_messages
from rheostat_server.tasks.interruption import Interruption
from rheostat_server.tasks.tracebacks import drop_tracebacks
from rheostat_wire.message_parts import MessageParts

_LOG = logging.getLogger(__name__)

_OURS = "/rheostat.v1."
_CONTROL = "/rheostat.v1.EngineService/"

_LARGEST = {"/rheostat.v1.CaptureService/Subscribe": SUBSCRIBE_OPEN_BYTES}
"""The largest message, in bytes, of rpcs with a lower limit than their service. The event loop
decodes messages, so a larger message is refused before it is decoded."""

_LOGGED_CHARACTERS = 400
"""Characters of a refusal's text in the log. It is cut because clients choose parts of it."""

Handler: TypeAlias = "grpc.RpcMethodHandler[object, object]"
Context = grpc.aio.ServicerContext[Message, Message]
"""The second argument of every behaviour. It is None: behaviours do not depend on the transport."""

Service = TypeVar("Service")


class Rpcs:
    """The methods of all services, which answer calls."""

    def __init__(self, calls: Calls) -> None:
        """No methods yet. `calls` counts the calls that run."""
        self._calls = calls
        self._methods: dict[str, _Method] = {}

    def add_service(
        self, add_to_server: Callable[[Service, grpc.aio.Server], None], service: Service
    ) -> None:
        """Adds the methods of a service.

        Args:
            add_to_server: the generated `add_..._to_server` function of the service.
            service: the implementation.
        """
        add_to_server(service, cast(grpc.aio.Server, self))

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Does nothing: `add_registered_method_handlers` gets the same handlers by name."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Adds methods by name, as generated functions do."""
        for name, handler in handlers.items():
            path = f"/{service}/{name}"
            self._methods[path] = _Method(path, handler)

    async def answer(self, path: str, call: Call) -> None:
        """Answers a call to its end.

        Args:
            path: the full name of its method, which must be one of `rheostat.v1`.
            call: the call.

        Raises:
            CancelledError: see `Call.fail`.
        """
        incoming: Incoming | None = None
        try:
            try:
                method = self._methods[path]
                method.check_served()
                incoming = self._calls.begin(control=method.control)
                await method.answer(call, incoming)
                return
            except asyncio.CancelledError as error:
                drop_tracebacks(error)
                raise
            except Exception as error:  # the boundary: every exception becomes a status
                status = _status(path, error)
                drop_tracebacks(error)
            await call.fail(status)
        finally:
            if incoming is not None:
                incoming.end()  # after the status is sent: until then the call counts as running


class _Method:
    """A method of a service."""

    def __init__(self, path: str, handler: Handler) -> None:
        """Reads the handler that a generated `add_..._to_server` function registered."""
        self._path = path
        self._request_streaming = handler.request_streaming
        self._behaviour = cast(
            Callable[[object, None], object],
            handler.unary_unary
            or handler.stream_unary
            or handler.unary_stream
            or handler.stream_stream,
        )
        self._streams = handler.response_streaming
        """Whether the method may have several responses."""
        self._responses = cast(
            Callable[[object, None], AsyncGenerator[object, None]],
            self._behaviour if self._streams else self._only_response,
        )
        # The stubs of methods that we do not implement are in the generated modules.
        self._served = not self._behaviour.__module__.endswith("_pb2_grpc")
        self._reader = Reader(handler.request_deserializer or bytes)
        self._encode = handler.response_serializer or cast(Callable[[object], bytes], bytes)
        self.control = path.startswith(_CONTROL)
        """Whether the method is one of EngineService."""
        largest = CONTROL_MESSAGE_BYTES if self.control else TENSOR_MESSAGE_BYTES
        self._most = _LARGEST.get(path, largest)

    def check_served(self) -> None:
        """Raises NotImplementedHere if nothing implements the method."""
        if not self._served:
            raise NotImplementedHere(f"{self._path.removeprefix(_OURS)} is not served yet")

    async def answer(self, call: Call, incoming: Incoming) -> None:
        """Answers a call, unless it fails.

        Raises:
            DeadlinePassed: the caller's deadline has passed.
            Exception: the call has failed.
        """
        remaining = call.time_remaining()
        if remaining is None:
            await self._answer(call, incoming)
            return
        try:
            async with asyncio.timeout(remaining) as limit:
                await self._answer(call, incoming)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlinePassed("the call's deadline passed") from error

    async def _answer(self, call: Call, incoming: Incoming) -> None:
        try:
            if not self._request_streaming:
                request = await incoming.only(call, self._reader, self._most)
                await self._write(self._responses(request, None), call)
                return
            async with aclosing(incoming.each(call, self._reader, self._most)) as messages:
                await self._write(self._responses(messages, None), call)
        finally:
            incoming.release()

    async def _write(self, responses: AsyncGenerator[object, None], call: Call) -> None:
        """Writes all responses. The messages of a list are sent together."""

        def encoded(response: object) -> bytes | MessageParts:
            return response if isinstance(response, MessageParts) else self._encode(response)

        direct = DirectMessages(
            call.has_room,
            lambda response: call.write_now(encoded(response)),
            cheap=call.writes_cheaply,
        )
        offer_direct_messages(direct)
        async with aclosing(responses):
            interruption = Interruption()
            stands_back = self._streams  # a single response ends its call, and frees what it uses
            async for response in responses:
                if stands_back:
                    stands_back = False
                    with interruption:
                        await call.stand_back()
                ready = response if isinstance(response, list) else [response]
                messages = [encoded(one) for one in ready]
                with interruption:
                    await call.write(*messages)
            with interruption:
                await call.flush()

    async def _only_response(self, request: object, context: None) -> AsyncGenerator[object, None]:
        """Yields the response of a method that has exactly one."""
        yield await cast(Awaitable[object], self._behaviour(request, context))


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


def _one_line(text: str) -> str:
    """The beginning of a text. Spaces replace line breaks and other unprintable characters."""
    return "".join(c if c.isprintable() else " " for c in text[:_LOGGED_CHARACTERS])
