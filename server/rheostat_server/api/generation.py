"""GenerationService: prompts in; tokens, tensors and a receipt out."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from rheostat_server.admission.admit import admit
from rheostat_server.api.readiness import Readiness
from rheostat_server.api.rpc import Context
from rheostat_server.delivery.row_messages import CapturedRows
from rheostat_server.errors import InvalidValue, MissingField, RheostatError
from rheostat_server.generation.explain import explain
from rheostat_server.generation.joined_events import Event, joined_events
from rheostat_server.generation.responses import run
from rheostat_server.generation.session import run_session
from rheostat_server.prompts.prompts import PromptTokens
from rheostat_server.tasks.client_messages import ClientMessages
from rheostat_server.tasks.direct_messages import direct_messages
from rheostat_server.tasks.offload import offload
from rheostat_wire.message_parts import MessageParts
from rheostat_wire.v1 import generation_service_pb2, generation_service_pb2_grpc, types_pb2

_pb = generation_service_pb2

Response = generation_service_pb2.GenerateResponse

_CAPTURED = Response.CAPTURED_FIELD_NUMBER

_TOKEN_BYTES = 32
"""Bytes that `offload` counts for a token of an answer."""


class GenerationService(generation_service_pb2_grpc.GenerationServiceServicer):
    """Runs and explains requests."""

    def __init__(self, readiness: Readiness) -> None:
        """A service of the server in this state."""
        self._readiness = readiness

    async def Generate(  # type: ignore[override]  # `Rpcs` also sends messages in wire format
        self, request: generation_service_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[generation_service_pb2.GenerateResponse | MessageParts, None]:
        """Runs one request."""
        manager = self._readiness.manager()
        begun = False
        try:
            admitted = await admit(request, manager.admission)
            join = _joined if request.batches and admitted.signals is not None else None
            happenings = run(admitted, manager, direct=direct_messages(), join=join)
            sent = happenings if join is None else joined_events(happenings, join, _CAPTURED)
            async with aclosing(happenings), aclosing(sent) as responses:
                async for response in responses:
                    begun = True
                    if isinstance(response, CapturedRows):
                        yield response.as_field(_CAPTURED)
                    elif isinstance(response, (Response, MessageParts)):  # there are no notices
                        yield response
        except RheostatError:
            manager.counts.refused += not begun
            raise

    async def Session(  # type: ignore[override]  # as in Generate
        self,
        request_iterator: ClientMessages[generation_service_pb2.SessionRequest],
        context: Context,
    ) -> AsyncGenerator[generation_service_pb2.SessionResponse | MessageParts, None]:
        """Runs one request whose steering its client may change."""
        manager = self._readiness.manager()
        begun = False
        try:
            async with aclosing(run_session(request_iterator, manager)) as responses:
                async for response in responses:
                    begun = True
                    yield response
        except RheostatError:
            manager.counts.refused += not begun
            raise

    async def Explain(
        self, request: generation_service_pb2.ExplainRequest, context: Context
    ) -> generation_service_pb2.ExplainResponse:
        """Describes what a request would do."""
        manager = self._readiness.manager()
        if not request.HasField("request"):
            raise MissingField("a request is required", field="request")
        try:
            return await explain(await admit(request.request, manager.admission), manager)
        except RheostatError as error:
            if error.field:
                error.field = f"request.{error.field}"
            raise

    async def Tokenize(
        self, request: generation_service_pb2.TokenizeRequest, context: Context
    ) -> generation_service_pb2.TokenizeResponse:
        """Token ids, text and offsets."""
        special = True
        if request.HasField("add_special_tokens"):
            special = request.add_special_tokens
            if not request.HasField("text"):
                raise InvalidValue("is for a text", field="add_special_tokens")
        prompts = self._readiness.manager().prompts
        prompt = await prompts.resolve(request, with_text=True, special=special)
        return await offload(_TOKEN_BYTES * len(prompt.token_ids), _tokens, prompt)


def _joined(events: Sequence[Event]) -> Response:
    """One message with all events."""
    several = [event for event in events if isinstance(event, Response)]  # a request has no notices
    if len(several) == 1:
        return several[0]
    return Response(batch=_pb.GenerateEventBatch(events=several))


def _tokens(prompt: PromptTokens) -> generation_service_pb2.TokenizeResponse:
    return _pb.TokenizeResponse(
        token_ids=types_pb2.TokenIds(ids=prompt.token_ids),
        text=prompt.text or "",
        starts=[start for start, _ in prompt.offsets or ()],
        ends=[end for _, end in prompt.offsets or ()],
    )
