"""A watch of the asyncio client."""

from __future__ import annotations

from rheostat._connection.aio_connection import Connection
from rheostat._event_streams.aio_stream import EventStream
from rheostat._watches.controls import WatchControls
from rheostat._watches.events import WatchEvent
from rheostat._watches.state import WatchState
from rheostat_wire.v1.monitor_service_pb2 import WatchRequest, WatchResponse


class Watch(EventStream[WatchResponse, WatchEvent], WatchControls):
    """What probes read of requests that others run, as `rheostat.Watch`.

        async with engine.watch(probes=mood, every=True) as watch:
            async for event in watch:
                ...

    It is open once it has been entered, or once the first event has arrived. One task iterates. If
    this task is cancelled while it waits, no event is lost. Closing ends the loop. If the task that
    closed it early begins another loop, it gets `Refused`. `stop` is not awaited.
    """

    def __init__(self, connection: Connection, state: WatchState) -> None:
        """Made by `Engine`; starts the call."""
        WatchControls.__init__(self, state)
        EventStream.__init__(self, connection, state)

    def _update(self, message: WatchRequest) -> int:
        return self._worker.act(lambda: self._state.update(message))
