"""A session: a request whose client may change its steering while it runs.

Invariants: each update is answered once. If it came before the last sample ended, its answer
precedes the receipt.
"""

import logging
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing

from rheostat_server.admission.admit import admit
from rheostat_server.delivery.row_messages import CapturedRows
from rheostat_server.errors import Defect, InvalidValue, MissingField, QueueFull, RheostatError
from rheostat_server.generation.joined_events import Event, joined_events
from rheostat_server.generation.responses import run
from rheostat_server.limits import RETRY_SECONDS, UNREAD_ANSWERS
from rheostat_server.requests.active_request import ActiveRequest
from rheostat_server.requests.manager import RequestManager
from rheostat_server.requests.response_queue import Notice
from rheostat_server.requests.steering_change import Change, refused
from rheostat_server.tasks.client_messages import ClientMessages
from rheostat_server.tasks.direct_messages import direct_messages
from rheostat_wire.message_parts import MessageParts
from rheostat_wire.v1 import generation_pb2, generation_service_pb2

_LOG = logging.getLogger(__name__)

Message = generation_service_pb2.SessionRequest
Answer = generation_service_pb2.SessionResponse

_CAPTURED = Answer.CAPTURED_FIELD_NUMBER


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
        if opening.start.batches:
            raise InvalidValue("is for Generate: set it beside start", field="batches")
        admitted = await admit(opening.start, manager.admission, changeable=True)

        def listen(active: ActiveRequest) -> Coroutine[None, None, None]:
            return _Control(active, messages).listen()

        if opening.batches:
            happenings = run(admitted, manager, listen, direct_messages(), _answer)
            sent = joined_events(happenings, _answer, _CAPTURED)
        else:
            happenings = run(admitted, manager, listen)
            sent = _one_by_one(happenings)
        async with aclosing(happenings), aclosing(sent) as answers:
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
    happenings: AsyncGenerator[Event | CapturedRows | None, None],
) -> AsyncGenerator[Answer | MessageParts, None]:
    """Makes a message of each event."""
    async for happening in happenings:
        if isinstance(happening, CapturedRows):
            yield happening.as_field(_CAPTURED)
        elif happening is not None:
            yield _answer([happening])


def _answer(events: Sequence[Event]) -> Answer:
    """One message with all events. They are copied into it, each once."""
    answer = Answer()
    if len(events) == 1:
        _put(events[0], answer)
    else:
        for event in events:
            _put(event, answer.batch.events.add())
    return answer


def _put(event: Event, answer: Answer) -> None:
    """Copies an event into a message."""
    if isinstance(event, generation_pb2.UpdateApplied):
        answer.applied.CopyFrom(event)
    elif isinstance(event, generation_pb2.UpdateRefused):
        answer.refused.CopyFrom(event)
    else:
        kind = event.WhichOneof("event")
        assert kind is not None
        getattr(answer, kind).CopyFrom(getattr(event, kind))


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
