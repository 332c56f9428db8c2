"""CaptureService: rows of requests that others run, sinks and what they wrote."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from rheostat._proto.v1 import capture_service_pb2, capture_service_pb2_grpc
from rheostat_server import checks
from rheostat_server.errors import MissingField, WarmingUp
from rheostat_server.readiness import Readiness
from rheostat_server.rpc import Context
from rheostat_server.sinks import to_artifact, to_wire_layout
from rheostat_server.subscriptions.call import refuse_resumption, subscribe

_pb = capture_service_pb2

_ARTIFACTS = 1 << 16
"""Most artefacts of an answer."""


class CaptureService(capture_service_pb2_grpc.CaptureServiceServicer):
    """Delivers captured rows."""

    def __init__(self, readiness: Readiness) -> None:
        """A service of the server in this state."""
        self._readiness = readiness

    async def Subscribe(
        self,
        request_iterator: AsyncIterator[capture_service_pb2.SubscribeRequest],
        context: Context,
    ) -> AsyncGenerator[capture_service_pb2.SubscribeResponse, None]:
        """Rows as they are made."""
        try:
            host = self._readiness.host()
        except WarmingUp:
            await refuse_resumption(request_iterator)
            raise
        answers = subscribe(request_iterator, host.subscriptions, host.attaching.attach)
        async with aclosing(answers) as responses:
            async for response in responses:
                yield response

    async def ListSinks(
        self, request: capture_service_pb2.ListSinksRequest, context: Context
    ) -> capture_service_pb2.ListSinksResponse:
        """The sinks, by name."""
        sinks = [
            _pb.Sink(
                name=one.name,
                plugin_name=one.plugin,
                layouts=[to_wire_layout(layout) for layout in one.layouts],
                options=one.options,
            )
            for one in self._readiness.host().sinks.listed()
        ]
        return _pb.ListSinksResponse(sinks=sinks)

    async def GetArtifacts(
        self, request: capture_service_pb2.GetArtifactsRequest, context: Context
    ) -> capture_service_pb2.GetArtifactsResponse:
        """What sinks wrote for a request."""
        sinks = self._readiness.host().sinks
        if not request.request_id:
            raise MissingField("a request id is required", field="request_id")
        checks.matches(request.request_id, checks.REQUEST_ID, "request_id")
        page = await sinks.lookup(request.request_id, request.sink_name, most=_ARTIFACTS)
        return _pb.GetArtifactsResponse(artifacts=[to_artifact(one) for one in page.found])
