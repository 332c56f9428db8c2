"""CaptureService: subscriptions to rows of requests, sinks and their artifacts."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from rheostat_server import validation
from rheostat_server.api.paging import fitting, from_token, page_size, parse_number, to_token
from rheostat_server.api.readiness import Readiness
from rheostat_server.api.rpc import Context
from rheostat_server.errors import MissingField, WarmingUp
from rheostat_server.sinks.guarded import ArtifactKey, SinkArtifact
from rheostat_server.sinks.wire import to_artifact, to_wire_layout
from rheostat_server.subscriptions.call import subscribe
from rheostat_server.subscriptions.event_stream import Outgoing
from rheostat_server.subscriptions.registry import gone_with_its_server
from rheostat_server.subscriptions.stream_call import read_resumption
from rheostat_wire.v1 import capture_service_pb2, capture_service_pb2_grpc

_pb = capture_service_pb2

_ARTIFACT_BYTES = 512
_SITE_BYTES = 16
"""Approximate bytes of an artifact, and of one of its sites, in an answer."""


class CaptureService(capture_service_pb2_grpc.CaptureServiceServicer):
    """Delivers captured rows."""

    def __init__(self, readiness: Readiness) -> None:
        """A service of the server in this state."""
        self._readiness = readiness

    async def Subscribe(  # type: ignore[override]  # `Rpcs` also sends messages in wire format
        self,
        request_iterator: AsyncIterator[capture_service_pb2.SubscribeRequest],
        context: Context,
    ) -> AsyncGenerator[Outgoing, None]:
        """Streams rows while requests run."""
        try:
            manager = self._readiness.manager()
        except WarmingUp:
            opening = await read_resumption(request_iterator)
            if opening is not None:
                raise gone_with_its_server(opening.resume.subscription_id) from None
            raise
        answers = subscribe(request_iterator, manager.subscriptions, manager.late_attachment.attach)
        async with aclosing(answers) as responses:
            async for response in responses:
                yield response

    async def ListSinks(
        self, request: capture_service_pb2.ListSinksRequest, context: Context
    ) -> capture_service_pb2.ListSinksResponse:
        """The sinks, by name."""
        listed = self._readiness.manager().sinks.listed()
        if request.page_token:
            (after,) = from_token(request.page_token, 1)
            listed = [sink for sink in listed if sink.name > after]
        page = listed[: page_size(request.page_size)]
        sinks = [
            _pb.Sink(
                name=sink.name,
                plugin_name=sink.plugin,
                layouts=[to_wire_layout(layout) for layout in sink.layouts],
                options=sink.options,
            )
            for sink in page
        ]
        token = to_token(page[-1].name) if len(page) < len(listed) else ""
        return _pb.ListSinksResponse(sinks=sinks, next_page_token=token)

    async def GetArtifacts(
        self, request: capture_service_pb2.GetArtifactsRequest, context: Context
    ) -> capture_service_pb2.GetArtifactsResponse:
        """The artifacts that sinks wrote for a request."""
        sinks = self._readiness.manager().sinks
        if not request.request_id:
            raise MissingField("a request id is required", field="request_id")
        validation.matches(request.request_id, validation.REQUEST_ID, "request_id")
        found, more = await sinks.lookup(
            request.request_id,
            request.sink_name,
            after=_artifact_key(request.page_token) if request.page_token else None,
            most=page_size(request.page_size),
        )
        page = fitting(found, _artifact_size)
        answer = _pb.GetArtifactsResponse(artifacts=[to_artifact(artifact) for artifact in page])
        if more or len(page) < len(found):
            sink, path, offset = page[-1].key
            answer.next_page_token = to_token(sink, path, str(offset))
        return answer


def _artifact_size(found: SinkArtifact) -> int:
    return _ARTIFACT_BYTES + _SITE_BYTES * len(found.artifact.sites)


def _artifact_key(token: str) -> ArtifactKey:
    """The last artifact of the previous page."""
    sink, path, offset = from_token(token, 3)
    return ArtifactKey(sink, path, parse_number(offset))
