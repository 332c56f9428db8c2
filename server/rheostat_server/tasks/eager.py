"""Begins a coroutine at once: it runs to its first wait before the call returns.

Why: a task begins in the next iteration of the event loop. In a busy server an iteration takes
milliseconds, and a chain of tasks takes one for each. From Python 3.12 on, tasks can do the same.
"""

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def begin_now(work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """Runs work to its first wait, and the rest in a task; returns its result.

    Until its first wait, the work is a part of the caller's task, if there is one. It must not use
    `asyncio.timeout` or `asyncio.current_task` there.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()
    try:
        waits_for = work.send(None)
    except StopIteration as end:
        result.set_result(end.value)
    except Exception as error:  # whoever awaits the result gets it
        result.set_exception(error)
    else:
        return loop.create_task(_rest(work, waits_for))
    return result


async def _rest(work: Coroutine[Any, Any, T], waits_for: object) -> T:
    return await _going_on(work, waits_for)


@types.coroutine
def _going_on(work: Coroutine[Any, Any, T], waits_for: object) -> Generator[object, Any, T]:
    """Goes on with work that waits for something."""
    try:
        while True:
            try:
                value = yield waits_for
            except BaseException as error:  # a cancellation, which the work must get
                waits_for = work.throw(error)
            else:
                waits_for = work.send(value)
    except StopIteration as end:
        result: T = end.value
        return result
