"""An engine that does what the test says, when it says so."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rheostat_server.engine.backend import Delta, Job

from ..fakes import ScriptedBackend


@dataclass
class ByHand(ScriptedBackend):
    """An engine whose tokens the test makes."""

    receive: Callable[[Delta], None] = print
    job: Job | None = None

    async def add_request(self, job, receive, fail) -> None:
        self.job, self.receive = job, receive


async def turns(count: int = 20) -> None:
    """Lets the loop run."""
    for _ in range(count):
        await asyncio.sleep(0)
