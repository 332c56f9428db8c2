"""An engine whose tokens come later than what it has read at them."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from rheostat_server.engine.backend import Delta, Job

from ..fakes import ScriptedBackend


@dataclass
class Lagging(ScriptedBackend):
    """An engine whose tokens come some steps after the signals of their steps."""

    lag: int = 2
    """Number of steps."""

    async def generate(self, job: Job) -> AsyncGenerator[Delta, None]:
        waiting: list[Delta] = []
        async with aclosing(super().generate(job)) as deltas:
            async for delta in deltas:
                waiting.append(delta)
                if len(waiting) > self.lag:
                    yield waiting.pop(0)
        for delta in waiting:
            yield delta
