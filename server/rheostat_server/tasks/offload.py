"""Keeps long work off the event loop."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from rheostat_server.limits import OFFLOAD_BYTES

_OLDEST_EVERY = 4
"""Once in this many plans, the planner takes the oldest plan, and otherwise the smallest. So the
smallest plan waits for at most two others: the plan in progress, and the oldest. A large plan waits
for at most three others for each older plan, and for three more."""

P = ParamSpec("P")
R = TypeVar("R")


class _Plan(NamedTuple, Generic[R]):
    """A plan that is not made yet."""

    size: int
    """Estimated bytes."""
    work: Callable[[], R]
    made: Future[R]
    """Gets the result of `work`."""


class Planner:
    """The thread that makes plans.

    There is only one, because making a plan holds the GIL: more threads would not make plans
    faster. They would slow the event loop, which releases the GIL at each socket call. If one other
    thread takes it, the loop gets it back within `serve.SWITCH_INTERVAL`. If six threads take
    turns, the loop waits for all of them.

    Small plans go first, so that a client with many large plans does not delay the small plans of
    others; see `_OLDEST_EVERY`.
    """

    def __init__(self) -> None:
        """No plan waits. The thread starts with the first plan."""
        self._thread = ThreadPoolExecutor(1, "planner")
        self._lock = threading.Lock()
        self._waiting: list[_Plan[Any]] = []  # Any: plans have different results
        """In order of arrival."""
        self._since_oldest = 0
        """Plans taken since the oldest was last taken because of its age."""

    def submit(
        self, size: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]:
        """Calls `work` on the thread, in an order that depends on `size` (estimated bytes)."""
        plan = _Plan(size, partial(work, *args, **kwargs), Future[R]())
        with self._lock:
            self._waiting.append(plan)
        # Each call makes a plan, so there are as many calls as plans.
        self._thread.submit(self._make)
        return plan.made

    def _make(self) -> None:
        """Makes the next plan."""
        plan = self._next()
        if not plan.made.set_running_or_notify_cancel():
            return
        try:
            made = plan.work()
        except BaseException as error:  # the caller gets any error
            plan.made.set_exception(error)
            del plan  # the error refers to this frame, so this would be a cycle
        else:
            plan.made.set_result(made)

    def _next(self) -> _Plan[Any]:  # as above
        """Takes the oldest or the smallest waiting plan; see `_OLDEST_EVERY`."""
        with self._lock:
            at = 0
            self._since_oldest = (self._since_oldest + 1) % _OLDEST_EVERY
            if self._since_oldest:
                at = min(range(len(self._waiting)), key=lambda index: self._waiting[index].size)
            return self._waiting.pop(at)


PLANNER = Planner()


async def offload(size: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls `work` directly if it processes few bytes (`size`), otherwise on a thread.

    `work` may use no state of the event loop.
    """
    if size <= OFFLOAD_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


async def offload_plan(size: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """As `offload`, for Python code that holds the GIL, such as making a plan.

    All such calls share the thread of `PLANNER`, so one runs after the other; see `Planner`.
    """
    if size <= OFFLOAD_BYTES:
        return work(*args, **kwargs)
    return await asyncio.wrap_future(PLANNER.submit(size, work, *args, **kwargs))


async def on_pool(pool: Executor, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Calls `work`, which may block, for example on a disk, on the threads of a pool."""
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(pool, partial(work, *args, **kwargs))
