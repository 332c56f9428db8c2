"""Makes full garbage collections when no request runs, and short ones also beside requests.

A full collection visits all objects of the process and holds the GIL, so all calls wait until it
ends. The plans of a large sweep have hundreds of thousands of objects. By default, Python makes a
full collection whenever the number of objects has grown by a quarter.

Requests leave no reference cycles, so their objects are freed without a collection. gRPC leaves
five objects for each call. So full collections can wait until no request runs. A process with one
long stream is never idle, however many calls end beside the stream. So a full collection is also
made beside requests, as long as there are so few objects that it is short.
"""

import asyncio
import gc
import sys
from collections.abc import Callable

_YOUNG = 10_000
"""New objects until the youngest generation is collected. Python's default is 700.

A collection visits all objects that survive it. The objects of requests that arrive together
survive it."""

_MIDDLE = 10
"""Collections of the youngest generation until the middle one is collected: Python's default."""

_FULL = 100
"""Collections of the middle generation until a full collection, even if requests run. This is about
ten million new objects. It limits the garbage of a server that is never idle. Python's default is
10."""

_BUSY = 400_000
"""The most blocks of memory, beyond those of the start, with which a full collection is made while
requests run. A small object takes one or more of them, and only some objects are visited. On two
slow cores such a collection takes 14 ms if all these objects stay, and 28 ms if it frees them."""

_INTERVAL = 1.0
"""Seconds between two checks of `collect_in_time`."""


def collect_rarely() -> None:
    """Makes full collections rare, and excludes all current objects from collections."""
    gc.set_threshold(_YOUNG, _MIDDLE, _FULL)
    gc.collect()
    gc.freeze()
    # Python delays the next full collection in proportion to the objects that the last one left.
    # Without this call, that number would include the frozen objects.
    gc.collect()
    _Start.blocks = sys.getallocatedblocks()


class _Start:
    blocks: int | None = None
    """Blocks of memory after `collect_rarely`; None: it was not called."""


async def collect_in_time(idle: Callable[[], bool]) -> None:
    """Makes full collections while nothing runs, or while they are short. Never returns.

    Does nothing before `collect_rarely`.

    Args:
        idle: returns whether nothing runs that a collection would delay.
    """
    while True:
        await asyncio.sleep(_INTERVAL)
        if _Start.blocks is None:
            continue
        # Collections of the middle generation since the last full one. At 0 a full one is useless.
        _, _, middle = gc.get_count()
        # To count the objects themselves takes a fifth of a collection.
        if middle and (idle() or sys.getallocatedblocks() - _Start.blocks <= _BUSY):
            gc.collect()
