"""One call of Subscribe: carries out its client's messages while it sends events.

Invariant: the subscription outlives the call, unless it fails or the client closes its side of the
stream. The client's messages are handled before the call ends.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing

from rheostat_server.errors import InvalidValue, MissingField, RheostatError, Superseded
from rheostat_server.message_parts import MessageParts
from rheostat_server.subscriptions.messages import Response
from rheostat_server.subscriptions.registry import Subscriptions, gone_with_its_server
from rheostat_server.subscriptions.subscription import Subscription
from rheostat_server.tasks.interruption import interrupter
from rheostat_wire.v1 import capture_service_pb2

Message = capture_service_pb2.SubscribeRequest

_FIRST_MESSAGE_SECONDS = 1.0
"""Seconds for the first message of a call, on a server that refuses every call."""

_CLOSE_SECONDS = 0.2
"""Seconds after the end of the client's stream, after which the subscription is closed. If the
connection broke instead, the call is cancelled earlier, and the subscription stays."""


async def subscribe(
    messages: AsyncIterator[Message],
    subscriptions: Subscriptions,
    attach: Callable[[Subscription], Awaitable[None]],
) -> AsyncGenerator[Response | MessageParts, None]:
    """Answers a call of Subscribe.

    Args:
        messages: the client's messages.
        subscriptions: the open subscriptions.
        attach: attaches a new subscription to requests that already run.

    Raises:
        RheostatError: the call is refused, or the subscription has failed.
    """
    observer_capture = await _opening(messages)
    if observer_capture.HasField("resume"):
        for name in (
            "filter",
            "shared_memory",
            "namespace",
            "buffer_bytes",
            "overload",
            "captures",
        ):
            if _is_set(observer_capture, name):
                raise InvalidValue("cannot be set beside resume", field=f"open.{name}")
        subscription = subscriptions.resume(observer_capture.resume)
    else:
        subscription = await subscriptions.open(observer_capture)
    call = object()
    left = asyncio.Event()
    reading: asyncio.Task[None] | None = None
    named = observer_capture.HasField("resume")  # whether the client has the subscription's id
    try:
        if not observer_capture.HasField("resume"):
            await attach(subscription)
        reading = asyncio.create_task(
            _read_messages(messages, subscription, call, left, subscriptions.discard)
        )
        responding = subscription.messages(
            call, observer_capture.credit_bytes, interrupter(), batched=observer_capture.batches
        )
        async with aclosing(responding) as responses:
            async for response in responses:
                named = True
                yield response
    except Superseded:
        if not left.is_set():
            raise
    finally:
        if named:
            subscriptions.disconnected(subscription, call)
        else:
            subscriptions.discard(subscription)
        if reading is not None:
            reading.cancel()
            await asyncio.wait({reading})


async def refuse_resumption(messages: AsyncIterator[Message]) -> None:
    """Refuses to resume a subscription while the server loads its model.

    Raises:
        SubscriptionNotFound: the client's first message resumes a subscription. The subscription
            ended with an earlier server, because this server has not opened any yet.
    """
    with contextlib.suppress(TimeoutError, MissingField):
        async with asyncio.timeout(_FIRST_MESSAGE_SECONDS):
            observer_capture = await _opening(messages)
            if observer_capture.HasField("resume"):
                raise gone_with_its_server(observer_capture.resume.subscription_id)


async def _opening(messages: AsyncIterator[Message]) -> capture_service_pb2.SubscribeOpen:
    async for message in messages:
        if message.WhichOneof("action") != "open":
            raise MissingField("the first message is open", field="open")
        return message.open
    raise MissingField("the first message is open", field="open")


async def _read_messages(
    messages: AsyncIterator[Message],
    subscription: Subscription,
    call: object,
    left: asyncio.Event,
    discard: Callable[[Subscription], None],
) -> None:
    """Handles the client's messages. An invalid message ends the call.

    Args:
        messages: the client's messages.
        subscription: the subscription that the call reads.
        call: identifies the call.
        left: set when the client leaves.
        discard: ends a subscription, and drops the events that wait.
    """
    try:
        async for message in messages:
            if not subscription.read_by(call):
                return
            if message.HasField("leave"):
                left.set()
                if message.leave.end:
                    subscription.leave(call)  # the call ends with OK, not with the error
                    discard(subscription)
                subscription.interrupt(call, Superseded("its client has left"))
                return
            _handle(message, subscription)
        await asyncio.sleep(_CLOSE_SECONDS)
        if subscription.read_by(call):
            subscription.close()
    except RheostatError as error:
        subscription.interrupt(call, error)


def _handle(message: Message, subscription: Subscription) -> None:
    action = message.WhichOneof("action")
    if action == "credit":
        subscription.allow(message.credit.bytes)
    elif action == "ack":
        subscription.acknowledge(message.ack.sequence)
    elif action == "proof":
        subscription.prove(message.proof.nonce)
    elif action == "open":
        raise InvalidValue("only the first message is open", field="open")
    else:
        raise MissingField("one of credit, ack, proof and leave is required")


def _is_set(observer_capture: capture_service_pb2.SubscribeOpen, name: str) -> bool:
    return any(field.name == name for field, _ in observer_capture.ListFields())
