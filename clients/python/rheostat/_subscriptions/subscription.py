"""A subscription of the synchronous client."""

from __future__ import annotations

from rheostat._event_streams.stream import EventStream
from rheostat._subscriptions.events import SubscriptionEvent
from rheostat._subscriptions.state import SubscriptionInfo
from rheostat_wire.v1.capture_service_pb2 import SubscribeResponse


class Subscription(EventStream[SubscribeResponse, SubscriptionEvent], SubscriptionInfo):
    """Captured rows of other requests: an iterator of events.

        with engine.subscribe(capture=rheostat.Capture("resid_post"), every=True) as subscription:
            for event in subscription:
                if isinstance(event, rheostat.CapturedRows):
                    print(event.request_id, event.sites, event.positions, event.values.shape)

    Iterating waits for events until the subscription is closed. One thread iterates; others may
    close it. If the connection breaks, the client reconnects, and every event arrives exactly once.

    Iterating raises `DataLoss` if rows are missing or damaged, `Unavailable` if reconnecting fails
    for a minute, `NotFound` if the server has ended the subscription, `ResourceExhausted` if this
    client was too slow, and `Aborted` if another call continues the subscription. Closing ends the
    loop. If the thread that closed it early begins another loop, it gets `Refused`.
    """

    def leave(self) -> None:
        """Stop reading, so that `Engine.resume` can continue within the server's resume window.

        Returns when the server has every acknowledgement, or after 5 seconds. With ``ack="auto"``
        all events are acknowledged except the last that was read.
        """
        self._worker.leave()
