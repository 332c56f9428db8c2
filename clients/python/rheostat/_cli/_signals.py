"""What the signals that end a program do to a command."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def exiting_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit on the main thread, which ends `with` blocks.

    So a command closes its streams, and the server learns at once that its client has gone.
    """

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # other threads cannot set handlers
        return
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
