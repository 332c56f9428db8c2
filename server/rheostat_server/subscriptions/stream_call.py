"""One call of a stream of events: handles its client's messages while it sends events.

Invariant: the stream outlives the call, unless it fails or the client closes its side. The client's
messages are handled before the call ends.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import Literal, Protocol, TypeVar

from google.protobuf.message import Message as ProtobufMessage

from rheostat_server.errors import InvalidValue, MissingField, RheostatError, Superseded
from rheostat_server.subscriptions.event_stream import Outgoing
from rheostat_server.subscriptions.stream_registry import EventStreams, S
from rheostat_server.tasks.interruption import interrupter
from rheostat_wire.v1 import capture_service_pb2, monitor_service_pb2

_CLOSE_SECONDS = 0.2
"""Seconds after the end of the client's stream, after which the events end. If the connection broke
instead, the call is cancelled earlier, and the stream of events stays."""


_FIRST_MESSAGE_SECONDS = 1.0
"""Seconds for the first message of a call, on a server that refuses every call."""


Open_co = TypeVar("Open_co", bound=ProtobufMessage, covariant=True)


class ClientMessage(Protocol[Open_co]):
    """A message that may open a stream."""

    @property
    def open(self) -> Open_co:
        """Opens or resumes a stream."""

    def WhichOneof(self, oneof_group: Literal["action"], /) -> str | None:
        """The name of the field of `action` that is set."""


C = TypeVar("C", capture_service_pb2.SubscribeRequest, monitor_service_pb2.WatchRequest)


async def read_opening(messages: AsyncIterator[ClientMessage[Open_co]]) -> Open_co:
    """The first message of a call.

    Raises:
        MissingField: it does not open a stream.
        InvalidValue: it resumes a stream, and sets what is fixed since that was opened.
    """
    message = await anext(messages, None)
    if message is None or message.WhichOneof("action") != "open":
        raise MissingField("the first message is open", field="open")
    opening = message.open
    if opening.HasField("resume"):
        for field, _ in opening.ListFields():
            if field.name not in ("resume", "credit_bytes", "batches"):
                raise InvalidValue("cannot be set beside resume", field=f"open.{field.name}")
    return opening


async def read_resumption(messages: AsyncIterator[ClientMessage[Open_co]]) -> Open_co | None:
    """The first message of a call if it resumes a stream, and arrives soon.

    A server that loads its model refuses every call. It must say that the stream ended with an
    earlier server, or its client would go on resuming it.
    """
    with suppress(TimeoutError, MissingField):
        async with asyncio.timeout(_FIRST_MESSAGE_SECONDS):
            opening = await read_opening(messages)
            return opening if opening.HasField("resume") else None
    return None


async def call_events(
    messages: AsyncIterator[C],
    streams: EventStreams[S],
    stream: S,
    *,
    resumed: bool,
    credit: int,
    batched: bool,
    attach: Callable[[S], Awaitable[None]],
    handle: Callable[[S, C, Callable[[], bool]], Awaitable[bool]],
) -> AsyncGenerator[Outgoing, None]:
    """Yields the messages of a call, whose first message of the client was read.

    Args:
        messages: the client's further messages.
        streams: the open streams.
        stream: the stream that the call reads.
        resumed: whether the client resumes the stream, so that it has its id.
        credit: bytes of payload that may be sent at first.
        batched: whether the client reads several events in a message.
        attach: attaches a new stream to requests that already run.
        handle: handles a message of any other kind than credit, ack and leave; returns whether it
            handles the kind. Its last argument returns whether the call still reads the stream.

    Raises:
        RheostatError: the stream has failed.
    """
    call = object()
    left = asyncio.Event()
    reading: asyncio.Task[None] | None = None
    named = resumed
    try:
        if not resumed:
            await attach(stream)
        reading = asyncio.create_task(
            _read_messages(messages, stream, call, left, streams.discard, handle)
        )
        responding = stream.messages(call, credit, interrupter(), batched=batched)
        async with aclosing(responding) as responses:
            async for response in responses:
                named = True
                yield response
    except Superseded:
        if not left.is_set():
            raise
    finally:
        if named:
            streams.disconnected(stream, call)
        else:
            streams.discard(stream)
        if reading is not None:
            reading.cancel()
            await asyncio.wait({reading})


async def _read_messages(
    messages: AsyncIterator[C],
    stream: S,
    call: object,
    left: asyncio.Event,
    discard: Callable[[S], None],
    handle: Callable[[S, C, Callable[[], bool]], Awaitable[bool]],
) -> None:
    """Handles the client's messages. An invalid message ends the call.

    Args:
        messages: the client's messages.
        stream: the stream that the call reads.
        call: identifies the call.
        left: set when the client leaves.
        discard: ends a stream, and drops the events that wait.
        handle: see `call_events`.
    """
    reads = partial(stream.read_by, call)
    try:
        async for message in messages:
            if not reads():
                return
            action = message.WhichOneof("action")
            if action == "leave":
                left.set()
                if message.leave.end:
                    stream.dismiss()
                    stream.leave(call)  # the call ends with OK, not with the error
                    discard(stream)
                stream.interrupt(call, Superseded("its client has left"))
                return
            if action == "credit":
                stream.allow(message.credit.bytes)
            elif action == "ack":
                stream.acknowledge(message.ack.sequence)
            elif action == "open":
                raise InvalidValue("only the first message is open", field="open")
            elif not await handle(stream, message, reads):
                raise MissingField("one of the actions of this message is required")
        await asyncio.sleep(_CLOSE_SECONDS)
        if reads():
            stream.dismiss()
            stream.close()
    except RheostatError as error:
        stream.interrupt(call, error)
