"""Makes full garbage collections when no request runs, or if they are short.

A full collection visits all objects of the process and holds the GIL, so all calls wait until it
ends. The plans of a large sweep have hundreds of thousands of objects. By default, Python makes a
full collection whenever the number of objects has grown by a quarter.

Requests leave no reference cycles, so their objects are freed without a collection. gRPC leaves
five objects for each call. So full collections can wait until no request runs. But a process with
one long stream is never idle, however many other calls end. So a full collection is also made while
requests run, if the process has so few objects that the collection is short.

Collections are postponed while calls wait to start (`front_ends/call_starts`), because each visits
the objects of all requests that have just arrived.

An object is old after two collections, that is 2,000 to 6,000 new objects later. Cycles that live
longer wait for a full collection. A server that is never idle makes one at the latest after about
ten million new objects. In two soaks of 20,000 calls, memory did not grow by that.
"""

import asyncio
import gc
import sys
import time
from collections.abc import Callable

_YOUNG = 2_000
"""New objects until the youngest generation is collected. Python's default is 700.

A collection visits all objects that survive it. The objects of requests that arrive together
survive it."""

_MIDDLE = 1
"""Collections of the youngest generation until the middle one is collected too: with 1, in every
third collection. Python's default is 10.

A surviving object is visited once in each of the two generations. So many short collections take no
more time in total than a few long ones. With Python's default and an `_YOUNG` of 10,000, a
collection of the middle generation took up to 83 ms of CPU time among hostile calls, and with these
values up to 18. That was before collections could be postponed, and was not measured again."""

_POSTPONED = 100_000
"""New objects after which the youngest generation is collected although that is postponed. About
500 requests make as many, and a collection of them takes 5 to 9 ms on a slow core."""

_AGED = 20
"""A full collection is made only after this many collections of the middle generation: about
120,000 new objects."""

_FULL = 1_700
"""Collections of the middle generation until a full collection, even if requests run. This is about
ten million new objects. It limits the garbage of a server that is never idle. Python's default is
10."""

_BUSY_BLOCKS = 400_000
"""While requests run, a full collection is made only if the process has at most this many blocks of
memory more than at its start. A small object takes one or more blocks, and a collection visits only
some objects. On two slow cores, a collection at this limit takes 14 ms if all these objects stay,
and 28 ms if it frees them."""

_BUSY_SECONDS = 0.025
"""If a collection takes longer, the limit is lowered in proportion. Each shorter one raises it by a
tenth. Among thousands of hostile calls, a collection below `_BUSY_BLOCKS` took at least 95 ms."""

_REST = 500
"""While requests run, the next full collection begins at the earliest after this many times the CPU
time of the last one. So these collections take at most 0.2 % of the time, even if one takes longer
than expected."""

_LEAST_BLOCKS = 10_000
"""The lowest limit after a short collection."""

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
    _Start.busy_blocks = _BUSY_BLOCKS
    _Start.rest_until = float("-inf")


class _Start:
    blocks: int | None = None
    """Blocks of memory after `collect_rarely`; None before it was called."""
    busy_blocks = _BUSY_BLOCKS
    """`_BUSY_BLOCKS`, or fewer if the last collection was slow."""
    rest_until = float("-inf")
    """Earliest time of the next full collection while requests run, by `time.perf_counter`."""


def postpone_collections() -> None:
    """Disables collections until `allow_collections`, unless there are `_POSTPONED` new objects.

    Must be called in each iteration of the event loop meanwhile, because it counts the new objects.
    Does nothing until `collect_rarely` has been called.
    """
    if _Start.blocks is not None:
        young, _, _ = gc.get_count()
        if young < _POSTPONED:
            gc.disable()
        else:
            gc.enable()


def allow_collections() -> None:
    """Ends the effect of `postpone_collections`."""
    if _Start.blocks is not None:
        gc.enable()


async def collect_in_time(idle: Callable[[], bool]) -> None:
    """Makes full collections while nothing runs, or while they are short. Never returns.

    Does nothing until `collect_rarely` has been called.

    Args:
        idle: returns whether nothing runs that a collection would delay.
    """
    while True:
        await asyncio.sleep(_INTERVAL)
        if _Start.blocks is None:
            continue
        # Collections of the middle generation since the last full one.
        _, _, middle = gc.get_count()
        # Counts blocks, because counting the objects takes a fifth of the time of a collection.
        blocks = sys.getallocatedblocks() - _Start.blocks
        short = blocks <= _Start.busy_blocks and time.perf_counter() >= _Start.rest_until
        if middle >= _AGED and (short or idle()):
            _collect(max(blocks, 0))


def _collect(blocks: int) -> None:
    """Makes a full collection, and adjusts the limit of the next one to its CPU time.

    `blocks` is the number of blocks more than at the start.
    """
    began = time.thread_time()
    gc.collect()
    seconds = time.thread_time() - began
    if seconds > _BUSY_SECONDS:
        limit = blocks * _BUSY_SECONDS / seconds
    else:
        limit = max(_LEAST_BLOCKS, 1.1 * _Start.busy_blocks)
    _Start.busy_blocks = min(_BUSY_BLOCKS, int(limit))
    _Start.rest_until = time.perf_counter() + _REST * seconds
