"""The event loop of the server's processes: asyncio's, without a stall of gRPC.

A thread of gRPC takes each event of all connections, such as a message that was received or sent,
and writes one byte to a socket to wake the loop. The loop then handles all events, but gRPC reads
only one byte. So on a busy loop the bytes pile up. When 278 are unread the thread waits in its
write, and every connection gets one event in each iteration of the loop: tokens came up to 1.7
seconds late. This loop reads all bytes at once.
"""

import asyncio
import functools
import socket
from collections.abc import Callable
from typing import Any, Protocol, TypeVarTuple

Arguments = TypeVarTuple("Arguments")

_HANDLER = "PollerCompletionQueue._handle_events"
"""The function of gRPC that handles events. A test fails if its name changes."""

_BYTES = 4096
"""More bytes than can wait in the socket."""


class HasFileno(Protocol):
    """An object with a file descriptor."""

    def fileno(self) -> int:
        """The descriptor."""


class EventLoop(asyncio.SelectorEventLoop):
    """An event loop that lets gRPC's thread never wait."""

    def add_reader(
        self,
        fd: int | HasFileno,
        callback: Callable[[*Arguments], Any],
        *args: *Arguments,
    ) -> None:
        """Calls `callback` when `fd` can be read; see asyncio."""
        handler = callback.func if isinstance(callback, functools.partial) else callback
        if isinstance(fd, socket.socket) and getattr(handler, "__qualname__", "") == _HANDLER:
            super().add_reader(fd, lambda: _with_all_bytes(fd, lambda: callback(*args)))
        else:
            super().add_reader(fd, callback, *args)


def _with_all_bytes(wakeups: socket.socket, handle: Callable[[], object]) -> None:
    """Reads all bytes but the last, which gRPC reads, and lets it handle all events."""
    waiting = len(wakeups.recv(_BYTES, socket.MSG_PEEK))
    if waiting > 1:
        wakeups.recv(waiting - 1)
    handle()
