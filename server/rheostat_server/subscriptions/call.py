"""The calls of Subscribe."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing

from rheostat_server.errors import InvalidValue, MissingField
from rheostat_server.subscriptions.event_stream import Outgoing
from rheostat_server.subscriptions.registry import Subscriptions, gone_with_its_server
from rheostat_server.subscriptions.stream_call import call_events
from rheostat_server.subscriptions.subscription import Subscription
from rheostat_wire.v1 import capture_service_pb2

Message = capture_service_pb2.SubscribeRequest

_FIRST_MESSAGE_SECONDS = 1.0
"""Seconds for the first message of a call, on a server that refuses every call."""


async def subscribe(
    messages: AsyncIterator[Message],
    subscriptions: Subscriptions,
    attach: Callable[[Subscription], Awaitable[None]],
) -> AsyncGenerator[Outgoing, None]:
    """Answers a call of Subscribe.

    Args:
        messages: the client's messages.
        subscriptions: the open subscriptions.
        attach: attaches a new subscription to requests that already run.

    Raises:
        RheostatError: the call is refused, or the subscription has failed.
    """
    observer_capture = await _opening(messages)
    resumed = observer_capture.HasField("resume")
    if resumed:
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
        point = observer_capture.resume
        subscription = subscriptions.resume(point.subscription_id, point.after_sequence)
    else:
        subscription = await subscriptions.open(observer_capture)
    events = call_events(
        messages,
        subscriptions,
        subscription,
        resumed=resumed,
        credit=observer_capture.credit_bytes,
        batched=observer_capture.batches,
        attach=attach,
        handle=_handle,
    )
    async with aclosing(events):
        async for event in events:
            yield event


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


def _handle(subscription: Subscription, message: Message) -> bool:
    if message.WhichOneof("action") != "proof":
        return False
    subscription.prove(message.proof.nonce)
    return True


def _is_set(observer_capture: capture_service_pb2.SubscribeOpen, name: str) -> bool:
    return any(field.name == name for field, _ in observer_capture.ListFields())
