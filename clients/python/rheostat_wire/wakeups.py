"""Lets gRPC's thread never wait for an asyncio event loop.

A thread of gRPC takes each event of all connections of a process, such as a message that was
received or sent, and writes one byte to a socket to wake the loop. The loop then handles all
events, but gRPC reads only one byte. So in a loop that has other work, the bytes pile up. When 278
are unread the thread waits in its write, and all connections get one event in each iteration of the
loop: tokens come seconds late. The same holds for uvloop.
"""

import asyncio
import functools
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVarTuple

Arguments = TypeVarTuple("Arguments")

_BYTES = 4096
"""More bytes than can wait in the socket."""

_reading = threading.Lock()
"""Loops of several threads read the same socket."""


@contextmanager
def all_wakeups_read() -> Iterator[None]:
    """Objects of `grpc.aio` that are created within let the running loop read all bytes at once.

    gRPC adds its socket to a loop when the first object is created there, and removes it with the
    last object of the process. Nothing changes if the loop has such objects already, if it does not
    run, or if its methods cannot be replaced.
    """
    loop = _running_loop()
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


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _with_all_bytes(wakeups: socket.socket, handle: Callable[[], object]) -> None:
    """Reads all bytes but the last, which gRPC reads, and lets it handle all events."""
    if _reading.acquire(blocking=False):  # otherwise a loop of another thread reads them
        try:
            waiting = len(wakeups.recv(_BYTES, socket.MSG_PEEK))
            if waiting > 1:
                wakeups.recv(waiting - 1)
        except BlockingIOError:
            return  # gRPC read the last byte in another thread, and handles all events there
        finally:
            _reading.release()
    handle()
