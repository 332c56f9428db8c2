"""Sets results of futures whose waiter may be gone."""

import asyncio
from typing import TypeVar

T = TypeVar("T")


def resolve(future: asyncio.Future[T] | None, result: T) -> None:
    """Sets the result of a future, if there is one and its waiter was not cancelled."""
    if future is not None and not future.done():
        future.set_result(result)
