"""Sends messages of a call without its task, while the task waits for something to send.

Why: waking the task of a call, and its chain of generators, takes longer than everything else that
a message with a token or a row costs.
"""

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from google.protobuf.message import Message

from rheostat_wire.message_parts import MessageParts


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class DirectMessages:
    """The functions that send messages of a call. They must not be used while its task runs."""

    has_room: Callable[[], bool]
    """Whether the next message may be sent. If not, the task has to send it, and wait."""
    send: Callable[[Message | MessageParts], None]
    """Sends a message of the call's response type, or its parts in wire format."""
    cheap: bool = True
    """Whether all calls may send in one iteration of the event loop. If not, they take turns."""


_CURRENT: ContextVar[weakref.ref[DirectMessages]] = ContextVar("messages of a rheostat call")
"""A weak reference, because tasks and timers that a call starts keep its context. The call refers
to one of them, and others outlive it."""


def offer_direct_messages(messages: DirectMessages) -> None:
    """Makes `direct_messages` return these functions in the current task.

    The caller must keep a reference to them as long as they may be used.
    """
    _CURRENT.set(weakref.ref(messages))


def direct_messages() -> DirectMessages | None:
    """The functions of the current task's call; None outside of a call."""
    reference = _CURRENT.get(None)
    return None if reference is None else reference()
