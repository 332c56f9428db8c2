"""The calls of Watch."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial

from rheostat_server import validation
from rheostat_server.errors import (
    InvalidValue,
    MissingField,
    NotSupported,
    RequestNotFound,
    RheostatError,
)
from rheostat_server.errors.status import to_status
from rheostat_server.limits import LABEL_VALUE_BYTES
from rheostat_server.monitors.registry import Watches, gone_with_its_server
from rheostat_server.monitors.watch import Response, Watch
from rheostat_server.subscriptions.event_stream import Outgoing
from rheostat_server.subscriptions.stream_call import call_events
from rheostat_wire.v1 import monitor_service_pb2

Message = monitor_service_pb2.WatchRequest

StopRequest = Callable[[Watch, str, str], bool]
"""Ends a request that a watch watches, by its id and with a label; returns whether it ran."""

_FIRST_MESSAGE_SECONDS = 1.0
"""Seconds for the first message of a call, on a server that refuses every call."""


async def watch(
    messages: AsyncIterator[Message],
    watches: Watches,
    stop: StopRequest,
    running: Callable[[Watch], None],
) -> AsyncGenerator[Outgoing, None]:
    """Answers a call of Watch.

    Args:
        messages: the client's messages.
        watches: the open watches.
        stop: ends a request.
        running: tells a new watch of the requests that already run.

    Raises:
        RheostatError: the call is refused, or the watch has failed.
    """
    opened = await _opening(messages)
    resumed = opened.HasField("resume")
    if resumed:
        for field, _ in opened.ListFields():
            if field.name not in ("resume", "credit_bytes", "batches"):
                raise InvalidValue("cannot be set beside resume", field=f"open.{field.name}")
        found = watches.resume(opened.resume.watch_id, opened.resume.after_sequence)
    else:
        found = await watches.open(opened)

    async def attach(new: Watch) -> None:
        running(new)

    events = call_events(
        messages,
        watches,
        found,
        resumed=resumed,
        credit=opened.credit_bytes,
        batched=opened.batches,
        attach=attach,
        handle=partial(_handle, stop),
    )
    async with aclosing(events):
        async for event in events:
            yield event


async def refuse_resumption(messages: AsyncIterator[Message]) -> None:
    """Refuses to resume a watch while the server loads its model.

    Raises:
        WatchNotFound: the client's first message resumes a watch. The watch ended with an earlier
            server, because this server has not opened any yet.
    """
    with contextlib.suppress(TimeoutError, MissingField):
        async with asyncio.timeout(_FIRST_MESSAGE_SECONDS):
            opened = await _opening(messages)
            if opened.HasField("resume"):
                raise gone_with_its_server(opened.resume.watch_id)


async def _opening(messages: AsyncIterator[Message]) -> monitor_service_pb2.WatchOpen:
    async for message in messages:
        if message.WhichOneof("action") != "open":
            raise MissingField("the first message is open", field="open")
        return message.open
    raise MissingField("the first message is open", field="open")


def _handle(stop: StopRequest, found: Watch, message: Message) -> bool:
    """Carries out a message that acts on a request, and answers it."""
    match message.WhichOneof("action"):
        case "stop":
            number = message.stop.update_id
        case "steer":
            number = message.steer.update_id
        case _:
            return False
    response = Response()
    try:
        found.check_update(number)
        if message.HasField("steer"):
            raise NotSupported(
                "watches do not steer yet: stop the request, or steer it from its own session",
                field="steer",
            )
        _stop(stop, found, message.stop)
        response.applied.update_id = number
    except RheostatError as error:
        response.refused.update_id = number
        response.refused.status.CopyFrom(to_status(error))
    found.answer(response)
    return True


def _stop(stop: StopRequest, found: Watch, message: monitor_service_pb2.WatchStop) -> None:
    validation.matches(message.request_id, validation.REQUEST_ID, "stop.request_id")
    validation.text_bytes(message.label, LABEL_VALUE_BYTES, "stop.label")
    if not stop(found, message.request_id, message.label):
        raise RequestNotFound(
            "no running request of this watch has this id", field="stop.request_id"
        )
