"""MonitorService: watches."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from rheostat_server.api.readiness import Readiness
from rheostat_server.api.rpc import Context
from rheostat_server.errors import WarmingUp
from rheostat_server.monitors.call import watch
from rheostat_server.monitors.registry import gone_with_its_server
from rheostat_server.subscriptions.event_stream import Outgoing
from rheostat_server.subscriptions.stream_call import read_resumption
from rheostat_server.tasks.client_messages import ClientMessages
from rheostat_wire.v1 import monitor_service_pb2, monitor_service_pb2_grpc


class MonitorService(monitor_service_pb2_grpc.MonitorServiceServicer):
    """Delivers what probes read of requests, and carries out what watchers say."""

    def __init__(self, readiness: Readiness) -> None:
        """A service of the server in this state."""
        self._readiness = readiness

    async def Watch(  # type: ignore[override]  # `Rpcs` also sends messages in wire format
        self,
        request_iterator: ClientMessages[monitor_service_pb2.WatchRequest],
        context: Context,
    ) -> AsyncGenerator[Outgoing, None]:
        """Streams readings while requests run."""
        try:
            manager = self._readiness.manager()
        except WarmingUp:
            opening = await read_resumption(request_iterator)
            if opening is not None:
                raise gone_with_its_server(opening.resume.watch_id) from None
            raise
        answers = watch(request_iterator, manager.watches, manager.watched)
        async with aclosing(answers) as responses:
            async for response in responses:
                yield response
