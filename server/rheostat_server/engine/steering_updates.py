"""Sends updates of the steering of running samples to the workers.

Why one call at a time
    vLLM carries out all calls that wait before it runs its next step. If every sample of every
    session had a call of its own, all requests would wait for hundreds of calls.

Why a call is bounded
    Each request of the engine waits for the call. A call updates many samples, of several sessions,
    but costs a worker at most `STEP_COST`, as every other work between two steps.

Invariants: there is one call at a time. Updates are sent in the order in which they came. If an
update fails, no other update fails with it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

from rheostat_engine import REQUEST_COST, SMALL_PLAN_COST, STEP_COST, Plan
from rheostat_server.engine.backend import Backend, SteeringUpdate
from rheostat_server.errors import Defect, RheostatError

_LOG = logging.getLogger(__name__)

_SAMPLES = (STEP_COST - SMALL_PLAN_COST) // REQUEST_COST
"""The most samples of an update that one call updates."""


class _Part:
    """A part of an update: samples that one call updates."""

    def __init__(self, update: SteeringUpdate) -> None:
        self.update = update
        self.cost = REQUEST_COST * len(update.plan_ids) + min(
            SMALL_PLAN_COST, update.plan.plan_cost
        )
        self.positions: asyncio.Future[Sequence[int | None]] = (
            asyncio.get_running_loop().create_future()
        )

    def finish(self, result: Sequence[int | None] | RheostatError) -> None:
        """Returns the positions, or the error, to the session unless it has ended."""
        if self.positions.done():
            return
        if isinstance(result, RheostatError):
            self.positions.set_exception(result)
        else:
            self.positions.set_result(result)


class SteeringUpdates:
    """Updates of all sessions. Used on the event loop alone."""

    def __init__(self, backend: Backend) -> None:
        """No update waits.

        Args:
            backend: its workers carry the updates out.
        """
        self._backend = backend
        self._waiting: deque[_Part] = deque()
        self._task: asyncio.Task[None] | None = None

    async def apply(self, plan: Plan, plan_ids: Sequence[str], not_before: int) -> list[int | None]:
        """Replaces the acts of running samples, each from its next step on.

        Args:
            plan: a packed plan with the new acts. Their vectors are loaded. If the plan is large,
                its tables are prepared.
            plan_ids: the ids of the samples' plans.
            not_before: the position before which nothing changes.

        Returns:
            For each sample, the first position on which the acts apply; None if it has ended.

        Raises:
            EngineLost: the engine is gone.
            Defect: a worker could not install the acts.
        """
        parts = [
            _Part(SteeringUpdate(plan, plan_ids[start : start + _SAMPLES], not_before))
            for start in range(0, len(plan_ids), _SAMPLES)
        ]
        self._waiting += parts
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send_all())
        positions = await asyncio.gather(*(part.positions for part in parts))
        return [position for some in positions for position in some]

    async def _send_all(self) -> None:
        while parts := self._next():
            try:
                answers = await self._backend.update_steering([part.update for part in parts])
                for part, answer in zip(parts, answers, strict=True):
                    part.finish(answer)
            except Exception as error:  # the task goes on; updates that wait must get the error
                if not isinstance(error, RheostatError):
                    _LOG.error("updates of the steering were not sent", exc_info=error)
                    error = Defect("an update did not reach the engine")
                for part in parts:
                    part.finish(error)

    def _next(self) -> list[_Part]:
        """Takes the parts of the next call: at least one, if one waits."""
        parts: list[_Part] = []
        cost = 0
        while self._waiting:
            part = self._waiting[0]
            if parts and cost + part.cost > STEP_COST:
                break
            self._waiting.popleft()
            if not part.positions.cancelled():
                parts.append(part)
                cost += part.cost
        return parts
