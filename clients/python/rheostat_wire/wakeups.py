"""Keeps gRPC's thread from waiting for an asyncio event loop.

Why
    gRPC has one thread for the events of all connections of a process, such as a message that was
    received or sent. For each event, the thread writes one byte to a socket to wake the event loop.
    The loop then handles all events, but gRPC reads only one byte. So in a loop that has other
    work, unread bytes pile up. At 278 unread bytes the thread blocks in its write. From then on,
    all connections together get one event in each iteration of the loop, and tokens come seconds
    late. The same holds for uvloop.
How
    In each iteration, gRPC reads one byte and handles all events. Then the loop reads the bytes of
    the other events.
"""

import asyncio
import functools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVarTuple

Arguments = TypeVarTuple("Arguments")

_BYTES = 4096
"""More bytes than the socket can hold."""

_reading = threading.Lock()
"""Held while a loop handles events and reads their bytes, because the loops of all threads share
the socket."""


@contextmanager
def all_wakeups_read() -> Iterator[None]:
    """Makes the running loop read all bytes at once. Create objects of `grpc.aio` within.

    gRPC adds its socket to a loop when the first object of `grpc.aio` is created there, and removes
    the socket with the last object of the process. Meanwhile `add_reader` of the loop is replaced.
    This has no effect if the loop has objects of `grpc.aio` already, if no loop runs, or if the
    loop's methods cannot be replaced.
    """
    loop = running_loop()
    own = getattr(loop, "__dict__", None)
    if loop is None or own is None:
        yield
        return
    add_reader, before = loop.add_reader, own.get("add_reader")

    def add(fd: Any, callback: Callable[[*Arguments], Any], *args: *Arguments) -> None:
        handle = functools.partial(callback, *args)
        if isinstance(fd, socket.socket):
            add_reader(fd, lambda: _with_all_bytes(fd, handle))
        else:
            add_reader(fd, handle)

    own["add_reader"] = add
    try:
        yield
    finally:
        if before is None:
            del own["add_reader"]
        else:
            own["add_reader"] = before


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that runs in this thread; None if there is none."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _with_all_bytes(wakeups: socket.socket, handle: Callable[[], object]) -> None:
    """Calls gRPC's handler, which reads a byte and handles all events. Then reads their bytes.

    The handler raises at an event whose loop is closed. Then the bytes stay, and the loop calls
    this again for the events behind it.
    """
    if not _reading.acquire(blocking=False):
        return  # a loop of another thread handles all events; bytes that stay call this one again
    try:
        waiting = len(wakeups.recv(_BYTES, socket.MSG_PEEK))
        handle()
        if waiting > 1:
            with suppress(OSError):  # gRPC closes the socket with its last object
                wakeups.recv(waiting - 1)
    except BlockingIOError:
        return  # another thread read the last byte, and handled all events
    finally:
        _reading.release()
