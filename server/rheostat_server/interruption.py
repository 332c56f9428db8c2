"""Ends a call whose client does not read, while a message to it cannot be written.

Why: the handler's generator is suspended at a `yield` for as long as the write takes. It can
neither raise an error nor release the resources of the call. The client gets the error once it has
read the messages before.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rheostat_server.errors import RheostatError


class Interruption:
    """Whether a call was ended while it wrote."""

    def __init__(self) -> None:
        """The call goes on. From now on `interrupter` refers to it in this task."""
        self._error: RheostatError | None = None
        self._writing: asyncio.Task[object] | None = None
        _CURRENT.set(self)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Makes the call interruptible while a message is written.

        Raises:
            RheostatError: the call was interrupted.
        """
        task = self._writing = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if self._error is None or task is None:
                raise
            task.uncancel()
            raise self._error from None
        finally:
            self._writing = None

    def interrupt(self, error: RheostatError) -> None:
        """Ends the call with an error, if it is writing a message."""
        if self._writing is not None and self._error is None:
            self._error = error
            self._writing.cancel()


_CURRENT: ContextVar[Interruption | None] = ContextVar("rheostat call", default=None)


def interrupter() -> Callable[[RheostatError], None]:
    """A function that interrupts the call of the current task; no-op outside of a call."""
    interruption = _CURRENT.get()
    return (lambda _: None) if interruption is None else interruption.interrupt
