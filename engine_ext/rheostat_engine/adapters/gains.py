"""Carries gains from the server to the workers within the message of a step.

Why within it
    `collective_rpc` waits for an answer of every worker, and no request advances meanwhile. A gain
    may change with every token of every session. So the engine's core only stores it. The message
    of the next step, which every worker gets anyway, carries it.
What the workers agree on
    All of them receive the same message before the same step, and have computed the same positions
    until then. So a gain acts from the same position on everywhere, also under async scheduling.

Invariants: of several gains of an intervention that arrive between two steps, the last acts. A step
carries about `_STEP_GAINS` numbers; the other samples wait for the next step, in order.
"""

from collections.abc import Iterable, Sequence
from typing import cast

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import AsyncMPClient

from rheostat_engine.plan.gains import GainsUpdate, merged_gains, updates_from, updates_to

_ATTRIBUTE = "rheostat_gains"
_METHOD = "rheostat_set_gains"

_STEP_GAINS = 4096
"""Numbers that a step carries: a worker handles them in about a millisecond."""


def carry_gains(scheduler: Scheduler) -> None:
    """Makes the outputs of this scheduler carry the gains that `send_gains` sends."""
    stock = scheduler.schedule
    waiting: dict[str, GainsUpdate] = {}

    def schedule(throttle_prefills: bool = False) -> SchedulerOutput:
        output = stock(throttle_prefills)
        if waiting:
            setattr(output, _ATTRIBUTE, _taken(waiting))
        return output

    scheduler.schedule = schedule
    setattr(scheduler, _ATTRIBUTE, waiting)
    setattr(EngineCore, _METHOD, _set_gains)


def gains_of(output: SchedulerOutput) -> Sequence[GainsUpdate]:
    """The gains that the output of a scheduler carries."""
    return cast(Sequence[GainsUpdate], getattr(output, _ATTRIBUTE, ()))


async def send_gains(llm: AsyncLLM, updates: Iterable[GainsUpdate]) -> None:
    """Sends gains to the engine's core. Returns once it has them, before the workers do."""
    client = cast(AsyncMPClient, llm.engine_core)
    await client.call_utility_async(_METHOD, updates_to(updates))


def _set_gains(core: EngineCore, wire: bytes) -> None:
    """Stores gains until the next step; a method of the engine's core.

    Raises:
        ValueError: the bytes are no gains.
    """
    waiting: dict[str, GainsUpdate] = getattr(core.scheduler, _ATTRIBUTE)
    for update in updates_from(wire):
        waiting[update.name] = merged_gains(waiting.get(update.name), update)


def _taken(waiting: dict[str, GainsUpdate]) -> list[GainsUpdate]:
    """Removes the gains of the next step."""
    taken: list[GainsUpdate] = []
    count = 0
    for update in waiting.values():
        if taken and count + len(update.gains) > _STEP_GAINS:
            break
        taken.append(update)
        count += len(update.gains)
    for update in taken:
        del waiting[update.name]
    return taken
