"""A watch of the synchronous client."""

from __future__ import annotations

from rheostat._event_streams.stream import EventStream
from rheostat._watches.controls import WatchControls
from rheostat._watches.events import WatchEvent
from rheostat_wire.v1.monitor_service_pb2 import WatchResponse


class Watch(EventStream[WatchResponse, WatchEvent], WatchControls):
    """What probes read of requests that others run: an iterator of events.

        with engine.watch(probes=mood, labels={"team": "red"}) as watch:
            for event in watch:
                if isinstance(event, rheostat.WatchedSignals):
                    for readings in event:
                        if readings[mood].max() > 2:
                            watch.stop(readings.request_id, "too gloomy")

    Iterating waits for events until the watch is closed. One thread iterates; others may act on
    requests, and close it. If the connection breaks, the client reconnects, and every event arrives
    exactly once. If this client is gone for good, the requests do what ``on_lost`` says.

    Iterating raises `DataLoss` if readings are missing, `Unavailable` if reconnecting fails for the
    server's resume window, `NotFound` if the server has ended the watch, and `ResourceExhausted` if
    this client was too slow. Closing ends the loop. If the thread that closed it early begins
    another loop, it gets `Refused`.
    """
