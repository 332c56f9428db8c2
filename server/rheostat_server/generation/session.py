"""A session: a request whose client may change its steering while it runs.

Why events are joined
    A session that sets a gain with every token gets three events for each: the gain's answer, the
    signals that the client answers next, and the token. A message costs more than its event. So the
    events that are ready at the same time are sent in one message, if the client reads batches.

Invariants: each update is answered once. If it came before the last sample ended, its answer
precedes the receipt. No event waits for a later one.
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
from rheostat_server.limits import BATCH_EVENTS, RETRY_SECONDS, UNREAD_ANSWERS
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
Happening = Response | CapturedRows | Notice

_BATCH_BYTES = 64 << 10
"""Bytes of events up to which another event is joined."""


async def run_session(
    messages: ClientMessages[Message], manager: RequestManager
) -> AsyncGenerator[Answer | MessageParts, None]:
    """Runs a session: applies its client's messages, and yields the answers.

    Raises:
        RheostatError: the request could not start, or failed.
    """
    opening = await _opening(messages)
    begun = False
    try:
        admitted = await admit(opening.start, manager.admission, changeable=True)

        async def listen(active: ActiveRequest) -> None:
            await _Control(active, messages).listen()

        send = _joined if opening.batches else _one_by_one
        async with (
            aclosing(run(admitted, manager, listen)) as happenings,
            aclosing(send(happenings)) as answers,
        ):
            async for answer in answers:
                begun = True
                yield answer
    except RheostatError as error:
        if error.field and not begun:
            error.field = f"start.{error.field}"
        raise


async def _opening(messages: ClientMessages[Message]) -> Message:
    async for message in messages:
        if message.WhichOneof("action") != "start":
            break
        if message.update_id:
            raise InvalidValue("start has no update_id", field="update_id")
        return message
    raise MissingField("a session's first message is start", field="start")


async def _one_by_one(
    happenings: AsyncGenerator[Happening | None, None],
) -> AsyncGenerator[Answer | MessageParts, None]:
    """Makes a message of each event."""
    async for happening in happenings:
        if happening is not None:
            yield _to_wire(happening)


async def _joined(
    happenings: AsyncGenerator[Happening | None, None],
) -> AsyncGenerator[Answer | MessageParts, None]:
    """Joins the events between two waits, except captured rows, which are large."""
    events: list[Answer] = []
    size = 0
    try:
        async for happening in happenings:
            rows: MessageParts | None = None
            if happening is not None:
                message = _to_wire(happening)
                if isinstance(message, Answer):
                    events.append(message)
                    size += message.ByteSize()
                    if size < _BATCH_BYTES and len(events) < BATCH_EVENTS:
                        continue
                else:
                    rows = message
            if events:
                yield _batch(events)
                events, size = [], 0
            if rows is not None:
                yield rows
    except RheostatError:
        if events:
            yield _batch(events)
        raise
    if events:
        yield _batch(events)


def _batch(events: list[Answer]) -> Answer:
    """One message with all events."""
    return events[0] if len(events) == 1 else Answer(batch=_pb.SessionEventBatch(events=events))


def _to_wire(happening: Happening) -> Answer | MessageParts:
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
        if message.batches:
            raise InvalidValue("is set beside start", field="batches")
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
