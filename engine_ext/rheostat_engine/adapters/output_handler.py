"""Cancels the output handler of an `AsyncLLM` before a shutdown.

`AsyncLLM.shutdown` ends the engine's process before this task. The task would then report a crash,
with a traceback of `EngineDeadError`, although nothing has failed.
"""

import asyncio
import contextlib
from typing import Protocol


class OutputReader(Protocol):
    """The part of `AsyncLLM` used here."""

    output_handler: asyncio.Task[None] | None
    """The task; None before the first request."""


async def stop_output_handler(llm: OutputReader) -> None:
    """Cancels the task. Call it on the task's event loop, before `AsyncLLM.shutdown`.

    Requests receive no further outputs.
    """
    handler = llm.output_handler
    if handler is None:
        return
    handler.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await handler
