"""Preparations: the workers build the tables of large plans before their requests start.

Why before
    A worker builds a plan's tables in the step that first schedules a request with them, and every
    request of that step waits. So the server has the tables of a large plan built between earlier
    steps. Each call of the workers builds a bounded part.

Why an idle engine is called
    Workers release tables that no request uses in parts, one part in each step. An idle engine has
    no steps, so the server calls its workers until they have released all unused tables.

Invariants: there is one call at a time, so that no step waits for more than one part. A preparation
counts in the ledger until the workers have released it. Equal plans share a preparation.
"""

import asyncio
import itertools
import logging
from collections import deque
from dataclasses import dataclass, replace

from rheostat_engine import SMALL_PLAN_COST, STEP_COST, Plan
from rheostat_server.engine.admission_queue import AdmissionQueue
from rheostat_server.engine.backend import Backend
from rheostat_server.errors import Defect, EngineLost, RheostatError

_LOG = logging.getLogger(__name__)

_IDLE = 0.25
"""Seconds between two checks whether the engine is idle."""

_RELEASED = 8
"""The most preparations that one call of the workers releases."""

_Key = tuple[bytes, bytes]


@dataclass(eq=False)
class Preparation:
    """The tables of a plan in the workers."""

    key: _Key
    name: str
    """Its name in the workers and in the ledger."""
    plan: Plan | None
    """None once the workers have received it."""
    ready: asyncio.Future[None]
    """Done once the workers have built all of it."""
    users: int = 0


class Preparations:
    """The preparations of all requests. Used on the event loop alone."""

    def __init__(self, backend: Backend, queue: AdmissionQueue) -> None:
        """There are no preparations.

        Args:
            backend: its workers build the tables.
            queue: holds the ledger of the workers' resources.
        """
        self._backend = backend
        self._queue = queue
        self._numbers = itertools.count()
        self._preparations: dict[_Key, Preparation] = {}
        self._building: deque[Preparation] = deque()
        self._unused: list[str] = []
        self._sweeping = False
        """Whether the workers may hold tables that no request uses, while the engine is idle."""
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def close(self) -> None:
        """Calls the workers no more; to be called before the engine ends.

        An ending engine answers no calls. The server would take its silence for a lost engine.
        """
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def prepare(self, plan: Plan) -> Preparation | None:
        """Returns once the workers have a plan's tables; `release` ends their use.

        Args:
            plan: a packed plan that the ledger holds.

        Returns:
            The preparation; None if the plan is small, so that it needs none.

        Raises:
            EngineLost: the engine is gone.
            Defect: a worker cannot build the tables.
        """
        if plan.acts and self._timer is None:
            self._sweep_later()
        if plan.plan_cost <= SMALL_PLAN_COST:
            return None
        encoded = plan.packed_acts.encoded, plan.packed_captures.encoded
        acts, captures = (b"" if table is None else table.digest for table in encoded)
        key = acts, captures
        preparation = self._preparations.get(key)
        if preparation is None:
            preparation = self._begin(key, plan)
        preparation.users += 1
        try:
            await asyncio.shield(preparation.ready)
        except BaseException:
            self.release(preparation)
            raise
        return preparation

    def release(self, preparation: Preparation) -> None:
        """Ends one use. The workers release preparations without a use."""
        preparation.users -= 1
        if preparation.users:
            return
        if self._preparations.get(preparation.key) is preparation:
            del self._preparations[preparation.key]
        if preparation in self._building:
            self._building.remove(preparation)
        preparation.ready.cancel()
        self._unused.append(preparation.name)
        self._work_soon()

    def _begin(self, key: _Key, plan: Plan) -> Preparation:
        name = f"prepared {next(self._numbers)}"
        # The request's own entry holds all that this one needs, so that it always fits.
        entry = replace(plan, request_id=name)
        self._queue.ledger.admit(entry, prompt_len=1, max_step_tokens=1, samples=0)
        ready = asyncio.get_running_loop().create_future()
        preparation = self._preparations[key] = Preparation(key, name, entry, ready)
        self._building.append(preparation)
        self._work_soon()
        return preparation

    def _work_soon(self) -> None:
        if not self._closed and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        """Calls the workers until everything is built and released."""
        while self._building or self._unused or self._sweeping:
            try:
                await self._release_unused()
                await self._build_part()
            except Exception as error:  # the task goes on; requests that wait must get the error
                self._sweeping = False
                self._fail(error)

    def _sweep_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_IDLE, self._sweep_if_idle)

    def _sweep_if_idle(self) -> None:
        """If the engine is idle, has the workers release tables that no request uses."""
        if self._queue.ledger.requests:
            self._sweep_later()
            return
        self._timer = None
        self._sweeping = True
        self._work_soon()

    async def _release_unused(self) -> None:
        names, self._unused = self._unused[:_RELEASED], self._unused[_RELEASED:]
        if not names and not self._sweeping:
            return
        try:
            left = await self._backend.release_prepared(names)
        finally:
            self._queue.release(names)
        self._sweeping = self._sweeping and left
        if self._sweeping and self._queue.ledger.requests:
            # Their steps release parts. The rest is released when these requests have ended.
            self._sweeping = False
            if self._timer is None:
                self._sweep_later()

    async def _build_part(self) -> None:
        """Builds a part of one preparation. They take turns, so that a small one is ready soon."""
        if not self._building:
            return
        preparation = self._building.popleft()
        plan, preparation.plan = preparation.plan, None
        self._building.append(preparation)
        done, error = await self._backend.prepare(preparation.name, plan, STEP_COST)
        if not done and not error:
            return
        if preparation in self._building:  # otherwise all its requests have ended
            self._building.remove(preparation)
            self._end(
                preparation, Defect(f"a worker cannot build a plan: {error}") if error else None
            )

    def _fail(self, error: Exception) -> None:
        if not self._building:
            _LOG.info("the workers did not release what no request uses: %r", error)
        elif not isinstance(error, EngineLost):
            _LOG.error("the workers did not prepare plans", exc_info=error)
        known = error if isinstance(error, RheostatError) else Defect("a plan was not prepared")
        for preparation in self._building:
            self._end(preparation, known)
        self._building.clear()

    def _end(self, preparation: Preparation, error: RheostatError | None) -> None:
        if preparation.ready.done():
            return
        if error is None:
            preparation.ready.set_result(None)
            return
        del self._preparations[preparation.key]  # the next request with this plan tries again
        preparation.ready.set_exception(error)
