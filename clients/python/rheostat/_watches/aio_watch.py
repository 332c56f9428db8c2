"""A watch of the asyncio client."""

from __future__ import annotations

from rheostat._event_streams.aio_stream import EventStream
from rheostat._watches.controls import WatchControls
from rheostat._watches.events import WatchEvent
from rheostat_wire.v1.monitor_service_pb2 import WatchResponse


class Watch(EventStream[WatchResponse, WatchEvent], WatchControls):
    """What probes read of requests that others run, as `rheostat.Watch`.

        async with engine.watch(probes=mood, every=True) as watch:
            async for event in watch:
                ...

    It is open once it has been entered, or once the first event has arrived. One task iterates. If
    this task is cancelled while it waits, no event is lost. Closing ends the loop. If the task that
    closed it early begins another loop, it gets `Refused`. `stop` is not awaited.
    """
