"""Keeps long work off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import ParamSpec, TypeVar

from rheostat_server.limits import OFFLOAD_BYTES

P = ParamSpec("P")
R = TypeVar("R")


async def offload(size: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls `work` directly if it processes few bytes (`size`), otherwise on a thread.

    `work` may use no state of the event loop.
    """
    if size <= OFFLOAD_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


async def on_pool(pool: Executor, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls `work`, which may block, for example on a disk, on the threads of a pool."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(pool, partial(work, *args, **kwargs))
