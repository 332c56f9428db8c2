"""Collects garbage when no client waits for it.

A full collection visits all objects of the process and holds the GIL, so all calls wait until it
ends. The plans of a large sweep have hundreds of thousands of objects. By default, Python makes a
full collection whenever the number of objects has grown by a quarter.

Requests leave no reference cycles, so that their objects are freed without a collection; gRPC
leaves five objects for a call. So full collections can wait until no request runs.
"""

import asyncio
import gc
from collections.abc import Callable

_YOUNG = 10_000
"""New objects until the youngest generation is collected. By default, it is 700.

A collection visits all objects that survive it, and the objects of requests that arrive together
do."""

_MIDDLE = 10
"""Collections of the youngest generation until the middle one is collected, as by default."""

_FULL = 100
"""Collections of the middle generation until all objects are visited, even if requests run: about
ten million new objects. It bounds what the server keeps of the calls since it last was idle. By
default, it is 10."""

_INTERVAL = 1.0
"""Seconds after which `collect_when_idle` looks again."""


def collect_rarely() -> None:
    """Makes full collections rare, and excludes all objects that exist now from them."""
    gc.set_threshold(_YOUNG, _MIDDLE, _FULL)
    gc.collect()
    gc.freeze()
    # Python delays the next full collection in proportion to the objects that the last one left.
    # Without this call, that number would include the frozen objects.
    gc.collect()


async def collect_when_idle(idle: Callable[[], bool]) -> None:
    """Makes a full collection whenever nothing runs, if objects have aged since the last one.

    Args:
        idle: whether nothing runs that would wait.
    """
    while True:
        await asyncio.sleep(_INTERVAL)
        _, _, aged = gc.get_count()
        if aged and idle():
            gc.collect()
