"""Keeps long work off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from rheostat_server.limits import OFFLOAD_BYTES

PLANNER = ThreadPoolExecutor(1, "planner")
"""The thread that makes plans.

One, because making a plan is Python that holds the GIL, so that more threads would not make more.
And whenever the event loop has released the GIL, only one other thread may take it, and gives it
back soon; see `serve.SWITCH_INTERVAL`. With six, the loop waited for all their turns.
"""

P = ParamSpec("P")
R = TypeVar("R")


async def offload(size: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls `work` directly if it processes few bytes (`size`), otherwise on a thread.

    `work` may use no state of the event loop.
    """
    if size <= OFFLOAD_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


async def offload_plan(size: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """As `offload`, for work that makes a plan: one such call after the other."""
    if size <= OFFLOAD_BYTES:
        return work(*args, **kwargs)
    return await on_pool(PLANNER, work, *args, **kwargs)


async def on_pool(pool: Executor, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls `work`, which may block, for example on a disk, on the threads of a pool."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(pool, partial(work, *args, **kwargs))
