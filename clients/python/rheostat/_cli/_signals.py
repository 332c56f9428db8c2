"""Handlers of SIGTERM and SIGHUP for commands."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def exiting_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit on the main thread, so that `finally` blocks run.

    The command then closes its streams, and the server ends them at once. A signal that is ignored
    stays so, as under nohup.
    """

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # other threads cannot set handlers
        return
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    ]
    before = {number: signal.signal(number, leave) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
