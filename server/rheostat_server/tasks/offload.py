"""Keeps long work off the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from rheostat_server.limits import OFFLOAD_BYTES

PLANNER = ThreadPoolExecutor(1, "planner")
"""The thread that makes plans.

There is only one, because making a plan holds the GIL: more threads would not make plans faster.
They would slow the event loop, which releases the GIL at each socket call. If one other thread
takes it, the loop gets it back within `serve.SWITCH_INTERVAL`. If six threads take turns, the loop
waits for all of them.
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
    """As `offload`, for Python code that holds the GIL, such as making a plan.

    All such calls share the thread `PLANNER`, so one runs after the other.
    """
    if size <= OFFLOAD_BYTES:
        return work(*args, **kwargs)
    return await on_pool(PLANNER, work, *args, **kwargs)


async def on_pool(pool: Executor, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls `work`, which may block, for example on a disk, on the threads of a pool."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(pool, partial(work, *args, **kwargs))
