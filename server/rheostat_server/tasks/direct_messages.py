"""Sends messages of a call without its task, while the task waits for something to send.

Why: waking the task of a call, and its chain of generators, takes longer than everything else that
a message with a token costs.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple

from google.protobuf.message import Message


class DirectMessages(NamedTuple):
    """The functions that send messages of a call. They must not be used while its task runs."""

    has_room: Callable[[], bool]
    """Whether the next message may be sent. If not, the task has to send it, and wait."""
    send: Callable[[Message], None]
    """Sends a message of the call's response type."""


_CURRENT: ContextVar[DirectMessages | None] = ContextVar("messages of a rheostat call")


def offer_direct_messages(messages: DirectMessages) -> None:
    """Makes `direct_messages` return these functions in the current task."""
    _CURRENT.set(messages)


def direct_messages() -> DirectMessages | None:
    """The functions of the current task's call; None outside of a call."""
    return _CURRENT.get(None)
