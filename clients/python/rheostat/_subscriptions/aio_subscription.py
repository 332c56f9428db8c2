"""A subscription of the asyncio client."""

from __future__ import annotations

from rheostat._event_streams.aio_stream import EventStream
from rheostat._subscriptions.events import SubscriptionEvent
from rheostat._subscriptions.state import SubscriptionInfo
from rheostat_wire.v1.capture_service_pb2 import SubscribeResponse


class Subscription(EventStream[SubscribeResponse, SubscriptionEvent], SubscriptionInfo):
    """Captured rows of other requests, as `rheostat.Subscription`.

        async with engine.subscribe(capture=Capture("resid_post"), every=True) as subscription:
            async for event in subscription:
                ...

    It is open once it has been entered, or once the first event has arrived. One task iterates. If
    this task is cancelled while it waits, no event is lost. Closing ends the loop. If the task that
    closed it early begins another loop, it gets `Refused`.
    """

    async def leave(self) -> None:
        """Stop reading, so that it can be resumed, as `rheostat.Subscription.leave`."""
        await self._worker.leave()
