"""Tasks and futures: begins a coroutine at once, keeps a task, resolves a future.

Why at once: a task begins in the next iteration of the event loop. In a busy server an iteration
takes milliseconds, and in a chain of tasks each task adds one. Python 3.12 has eager tasks, but the
server also runs with 3.11.
"""

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def keep(tasks: set[asyncio.Task[T]], work: Coroutine[None, None, T]) -> asyncio.Task[T]:
    """Runs work in a task, which is in the set until it is done.

    The event loop alone keeps no reference to a task.
    """
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


def resolve(future: asyncio.Future[T] | None, result: T) -> None:
    """Sets the result of a future, if there is one and its waiter was not cancelled."""
    if future is not None and not future.done():
        future.set_result(result)


def begin_now(work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """Runs work to its first wait, and the rest in a task; returns the future of its result.

    Up to its first wait, the work runs in the caller's task, so it must not use `asyncio.timeout`
    or `asyncio.current_task` there.
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
    return await _resume(work, waits_for)


@types.coroutine
def _resume(work: Coroutine[Any, Any, T], waits_for: object) -> Generator[object, Any, T]:
    """Runs the rest of work, which waits for `waits_for`."""
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
