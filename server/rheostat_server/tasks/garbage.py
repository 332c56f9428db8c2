"""Makes full garbage collections when no request runs, and short ones also beside requests.

A full collection visits all objects of the process and holds the GIL, so all calls wait until it
ends. The plans of a large sweep have hundreds of thousands of objects. By default, Python makes a
full collection whenever the number of objects has grown by a quarter.

Requests leave no reference cycles, so their objects are freed without a collection. gRPC leaves
five objects for each call. So full collections can wait until no request runs. A process with one
long stream is never idle, however many calls end beside the stream. So a full collection is also
made once the objects have become about twice as many, if it is short.
"""

import asyncio
import gc
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

_BUSY = 300_000
"""The most objects that a full collection may visit while requests run. On two slow cores it takes
35 to 120 ns for each object that stays, and 270 ns for each that it frees. With `_YOUNG` and
`_MIDDLE` it begins at 110,000 new objects, so it takes about 10 to 40 ms."""

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


async def collect_in_time(idle: Callable[[], bool]) -> None:
    """Makes full collections while nothing runs, or while they are short. Never returns.

    Does nothing before `collect_rarely`.

    Args:
        idle: returns whether nothing runs that a collection would delay.
    """
    left = counted = 0
    while True:
        await asyncio.sleep(_INTERVAL)
        if gc.get_threshold() != (_YOUNG, _MIDDLE, _FULL):
            continue
        # Collections of the middle generation since the last full one. At 0 a full one is useless.
        _, _, middle = gc.get_count()
        counted = min(counted, middle)  # Python may have made a full one
        if not idle():
            new = middle * _YOUNG * (_MIDDLE + 1)  # objects at most
            if middle <= counted or new < min(left, _BUSY // 2):
                continue
            counted = middle
            if len(gc.get_objects(generation=2)) > _BUSY:  # takes a fifth of a collection
                continue
        if middle:
            gc.collect()
            left, counted = len(gc.get_objects(generation=2)), 0
