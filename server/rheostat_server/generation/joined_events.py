"""Joins events of a request in messages, because a message costs more than an event.

A step that a client watches makes two or three events for each of its streams: the signals, the
token, and in a session the answer to a gain. Events that are ready at the same time are sent in one
message, if the client reads such messages.

Invariants: events keep their order. No event waits for a later one.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeAlias, TypeVar

from google.protobuf.message import Message

from rheostat_server.delivery.row_messages import CapturedRows
from rheostat_server.errors import RheostatError
from rheostat_server.generation.sample import Response
from rheostat_server.limits import BATCH_EVENTS
from rheostat_server.requests.response_queue import Notice
from rheostat_wire.message_parts import MessageParts

Event: TypeAlias = Response | Notice
"""An event of a request, without captured rows."""

JoinedT = TypeVar("JoinedT", bound=Message)

JoinEvents: TypeAlias = Callable[[Sequence[Event]], JoinedT]
"""Makes one message of one or several events."""

JOINED_BYTES = 64 << 10
"""Bytes of events up to which another event is joined."""

JOINED_EVENTS = BATCH_EVENTS
"""Most events in a message."""


async def joined_events(
    happenings: AsyncGenerator[Event | CapturedRows | None, None],
    join: JoinEvents[JoinedT],
    captured_field: int,
) -> AsyncGenerator[JoinedT | MessageParts, None]:
    """Joins the events between two waits, except captured rows, which are large.

    Args:
        happenings: events, captured rows, and None before each wait.
        join: makes one message of events.
        captured_field: number of the field of captured rows in such a message.
    """
    events: list[Event] = []
    size = 0
    try:
        async for happening in happenings:
            rows: MessageParts | None = None
            if isinstance(happening, CapturedRows):
                rows = happening.as_field(captured_field)
            elif happening is not None:
                events.append(happening)
                size += happening.ByteSize()
                if size < JOINED_BYTES and len(events) < JOINED_EVENTS:
                    continue
            if events:
                yield join(events)
                events, size = [], 0
            if rows is not None:
                yield rows
    except RheostatError:
        if events:
            yield join(events)
        raise
    if events:
        yield join(events)
