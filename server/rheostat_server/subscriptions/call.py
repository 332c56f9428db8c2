"""The calls of Subscribe."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing

from rheostat_server.subscriptions.event_stream import Outgoing
from rheostat_server.subscriptions.registry import Subscriptions
from rheostat_server.subscriptions.stream_call import call_events, read_opening
from rheostat_server.subscriptions.subscription import Subscription
from rheostat_wire.v1 import capture_service_pb2

Message = capture_service_pb2.SubscribeRequest


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
    opening = await read_opening(messages)
    resumed = opening.HasField("resume")
    if resumed:
        point = opening.resume
        subscription = subscriptions.resume(point.subscription_id, point.after_sequence)
    else:
        subscription = await subscriptions.open(opening)
    events = call_events(
        messages,
        subscriptions,
        subscription,
        resumed=resumed,
        credit=opening.credit_bytes,
        batched=opening.batches,
        attach=attach,
        handle=_handle,
    )
    async with aclosing(events):
        async for event in events:
            yield event


async def _handle(subscription: Subscription, message: Message, _: Callable[[], bool]) -> bool:
    if message.WhichOneof("action") != "proof":
        return False
    subscription.prove(message.proof.nonce)
    return True
