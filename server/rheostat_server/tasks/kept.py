"""Tasks that are kept until they are done. The event loop alone keeps no reference to a task."""

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


def keep(tasks: set[asyncio.Task[T]], work: Coroutine[None, None, T]) -> asyncio.Task[T]:
    """Runs work in a task, which is in the set until it is done."""
    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
