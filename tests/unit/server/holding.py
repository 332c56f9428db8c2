"""A scripted engine that holds samples."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from rheostat_server.engine.backend import Delta, Job

from .fakes import ScriptedBackend


@dataclass
class HoldingBackend(ScriptedBackend):
    """Samples that are held stop after the step that runs."""

    hold_error: Exception | None = None
    hold_messages: list[tuple[bool, list[str]]] = field(default_factory=list)
    """Whether samples were held or released, and which."""
    held: dict[str, asyncio.Event] = field(default_factory=dict)
    """The samples that are held, by the ids of their plans."""

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        async with aclosing(super().generate(job)) as deltas:
            async for delta in deltas:
                yield delta
                if job.plan.request_id in self.held:
                    await self.held[job.plan.request_id].wait()

    async def hold_samples(self, plan_ids: Sequence[str], *, held: bool) -> None:
        self.hold_messages.append((held, list(plan_ids)))
        await asyncio.sleep(0)
        if self.hold_error is not None:
            raise self.hold_error
        for plan_id in plan_ids:
            if held and plan_id in self.tasks:
                self.held[plan_id] = asyncio.Event()
            elif plan_id in self.held:
                self.held.pop(plan_id).set()
