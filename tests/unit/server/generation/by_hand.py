"""An engine that does what the test says, when it says so."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rheostat_engine import Installed, Released
from rheostat_server.engine.backend import Delta, Ending, Job

from ..fakes import ScriptedBackend


@dataclass
class ByHand(ScriptedBackend):
    """An engine whose tokens the test makes."""

    receive: Callable[[Delta], None] = print
    job: Job | None = None

    async def add_request(self, job, receive, fail) -> None:
        self.job, self.receive = job, receive


class InOneStep(ScriptedBackend):
    """Delivers the rows and the only token of all requests at once, when `step` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.added: list[tuple[Job, Callable[[Delta], None]]] = []

    async def add_request(self, job, receive, fail) -> None:
        self.added.append((job, receive))

    def step(self) -> None:
        for job, receive in self.added:
            plan_id, length = job.plan.request_id, len(job.prompt)
            self.deliver(Installed(plan_id, ""))
            self._capture(job, 0, length)
            receive(Delta(token_ids=(1,), text="x", ending=Ending.LENGTH))
            self.deliver(Released(plan_id, (), True, {}, 0, 0, (0, length)))


async def turns(count: int = 20) -> None:
    """Lets the loop run."""
    for _ in range(count):
        await asyncio.sleep(0)
