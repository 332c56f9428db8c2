"""The task of an `AsyncLLM` that reads the engine's answers, and how it ends.

`AsyncLLM.shutdown` ends the engine's process before this task. The task then takes the end for a
crash and logs a traceback of `EngineDeadError`, although nothing has failed.
"""

import asyncio
import contextlib
from typing import Protocol


class OutputReader(Protocol):
    """The attribute of `AsyncLLM` that this module uses."""

    output_handler: asyncio.Task[None] | None
    """The task; None before the first request."""


async def stop_output_handler(llm: OutputReader) -> None:
    """Ends the task; to be called on its event loop, before `AsyncLLM.shutdown`.

    Requests get no answers any more.
    """
    handler = llm.output_handler
    if handler is None:
        return
    handler.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await handler
