"""Ends a call whose client does not read, while a message to it cannot be written.

Why: the handler's generator is suspended at a `yield` while the write blocks. It can neither raise
an error nor release the resources of the call. The client gets the error once it has read the
earlier messages.

A call that waits for its reader holds what it uses: runs, memory, or one of few places. A client
that is gone is noticed by gRPC; one that stays and reads nothing is noticed by `while_read`.
"""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from typing import TypeVar

from rheostat_server.errors import ResponseOverflow, RheostatError

T = TypeVar("T")


class Interruption:
    """Interrupts one call while it writes. As a context it encloses writes, and waits for them."""

    def __init__(self) -> None:
        """Makes `interrupter` refer to this call in the current task."""
        self._error: RheostatError | None = None
        self._writing = False
        task = asyncio.current_task()
        assert task is not None, "calls are answered by tasks"
        self._task = weakref.ref(task)  # the task refers to its context, which refers to this
        _CURRENT.set(self)

    def __enter__(self) -> None:
        self._writing = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Raises the error of `interrupt` if the call was interrupted."""
        self._writing = False
        task = self._task()
        if self._error is not None and isinstance(error, asyncio.CancelledError) and task:
            task.uncancel()
            raise self._error from None

    def interrupt(self, error: RheostatError) -> None:
        """Ends the call with an error, if its generator is suspended for a write."""
        task = self._task()
        if self._writing and self._error is None and task is not None:
            self._error = error
            task.cancel()


_CURRENT: ContextVar[Interruption | None] = ContextVar("rheostat call", default=None)


def interrupter() -> Callable[[RheostatError], None]:
    """A function that interrupts the call of the current task; no-op outside of a call."""
    interruption = _CURRENT.get()
    return (lambda _: None) if interruption is None else interruption.interrupt


async def while_read(responses: AsyncGenerator[T, None], seconds: float) -> AsyncGenerator[T, None]:
    """Yields responses. Ends the call with ResponseOverflow if one is not read within `seconds`."""
    interrupt, loop = interrupter(), asyncio.get_running_loop()
    async with aclosing(responses):
        async for response in responses:
            timer = loop.call_later(
                seconds,
                interrupt,
                ResponseOverflow(f"the client left a message unread for {seconds:g} s"),
            )
            try:
                yield response
            finally:
                timer.cancel()
