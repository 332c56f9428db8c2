"""A session: a request whose client may change its steering while it runs.

Invariant: each update is answered once. If it came before the last sample ended, its answer
precedes the receipt.
"""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from rheostat_server.admission.admit import admit
from rheostat_server.delivery.row_messages import CapturedRows
from rheostat_server.errors import (
    Defect,
    InvalidValue,
    MissingField,
    QueueFull,
    RheostatError,
)
from rheostat_server.generation.responses import run
from rheostat_server.generation.sample import Response
from rheostat_server.limits import RETRY_SECONDS, UNREAD_ANSWERS
from rheostat_server.requests.active_request import ActiveRequest
from rheostat_server.requests.manager import RequestManager
from rheostat_server.requests.response_queue import Notice
from rheostat_server.requests.steering_change import Change, refused
from rheostat_server.tasks.client_messages import ClientMessages
from rheostat_wire.message_parts import MessageParts
from rheostat_wire.v1 import generation_pb2, generation_service_pb2

_LOG = logging.getLogger(__name__)

_pb = generation_service_pb2
Message = generation_service_pb2.SessionRequest
Answer = generation_service_pb2.SessionResponse


async def run_session(
    messages: ClientMessages[Message], manager: RequestManager
) -> AsyncGenerator[Answer | MessageParts, None]:
    """Runs a session: applies its client's messages, and yields the answers.

    Raises:
        RheostatError: the request could not start, or failed.
    """
    request = await _opening(messages)
    begun = False
    try:
        admitted = await admit(request, manager.admission, changeable=True)

        async def listen(active: ActiveRequest) -> None:
            await _Control(active, messages).listen()

        async with aclosing(run(admitted, manager, listen)) as happenings:
            async for happening in happenings:
                begun = True
                yield _to_wire(happening)
    except RheostatError as error:
        if error.field and not begun:
            error.field = f"start.{error.field}"
        raise


async def _opening(messages: ClientMessages[Message]) -> generation_service_pb2.GenerateRequest:
    async for message in messages:
        if message.WhichOneof("action") != "start":
            break
        if message.update_id:
            raise InvalidValue("start has no update_id", field="update_id")
        return message.start
    raise MissingField("a session's first message is start", field="start")


def _to_wire(happening: Response | CapturedRows | Notice) -> Answer | MessageParts:
    if isinstance(happening, CapturedRows):
        return happening.as_field(_pb.SessionResponse.CAPTURED_FIELD_NUMBER)
    if isinstance(happening, generation_pb2.UpdateApplied):
        return _pb.SessionResponse(applied=happening)
    if isinstance(happening, generation_pb2.UpdateRefused):
        return _pb.SessionResponse(refused=happening)
    kind = happening.WhichOneof("event")
    assert kind is not None
    answer = _pb.SessionResponse()
    getattr(answer, kind).CopyFrom(getattr(happening, kind))
    return answer


class _Control:
    """Carries out a client's messages to a running request."""

    def __init__(self, active: ActiveRequest, messages: ClientMessages[Message]) -> None:
        self._active = active
        self._messages = messages
        self._last_number = 0

    async def listen(self) -> None:
        """Reads the client's messages, until the client sends no more."""
        try:
            async for message in self._messages:
                self._hear(message)
        except RheostatError as error:
            self._active.fail(error)
        except Exception as error:  # the task ends here, so any error must fail the request
            request_id = self._active.admitted.request_id
            _LOG.error("session %s failed", request_id, exc_info=error)
            self._active.fail(Defect("the server could not read the session's messages"))

    def _hear(self, message: Message) -> None:
        self._active.pending_notices += 1
        if self._active.pending_notices > UNREAD_ANSWERS:
            self._active.fail(
                QueueFull(
                    f"{UNREAD_ANSWERS} answers wait to be read; read what the session sends",
                    retry_after=RETRY_SECONDS,
                )
            )
            return
        try:
            self._begin(message)
        except RheostatError as error:
            self._active.notify(refused(message.update_id, error))

    def _begin(self, message: Message) -> None:
        """Ends the request, or submits a change of its steering.

        Raises:
            RheostatError: the message is refused.
        """
        action = message.WhichOneof("action")
        if action is None:
            raise MissingField("one of steering, stop and gain is required")
        if action == "start":
            raise InvalidValue("only a session's first message is start", field="start")
        if message.update_id <= self._last_number:
            raise InvalidValue(
                f"update ids must rise; the last was {self._last_number}", field="update_id"
            )
        self._last_number = message.update_id
        if action == "stop":
            self._active.abort()
            self._active.notify(generation_pb2.UpdateApplied(update_id=message.update_id))
            return
        assert self._active.control is not None  # a session's request can be changed
        what = message.gain if action == "gain" else message.steering
        release = self._messages.keep()

        def answer(notice: Notice) -> None:
            release()
            self._active.notify(notice)

        try:
            self._active.control.submit(Change(message.update_id, what, answer))
        except RheostatError:
            release()
            raise
