"""Runs the prompts of calls that contrast two sets.

Invariants: a call that ends early leaves no running requests. The rows of all calls together take
at most `DERIVED_BYTES`, and few of their prompts run at the same time.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from rheostat_server import validation
from rheostat_server.derivation.prompt_rows import check_prompt
from rheostat_server.errors import InvalidValue, MissingField, QueueFull
from rheostat_server.limits import DERIVED_BYTES, DERIVED_PROMPTS, RETRY_SECONDS
from rheostat_wire.v1 import steering_service_pb2, types_pb2

CONCURRENCY = 8
"""Prompts of all calls that run at the same time. Prompts of one engine step end in the same
iteration of the event loop, and each occupies it for about 10 ms at 72 sites."""

TwoSets: TypeAlias = (
    steering_service_pb2.DeriveVectorsRequest | steering_service_pb2.FitConditionsRequest
)
"""A request that contrasts two sets of prompts, `positive` and `negative`."""

ReadPrompt: TypeAlias = Callable[[types_pb2.Prompt, str, int], Awaitable[None]]
"""Runs a prompt. Gets it with its path, for errors, and its index among the positive prompts,
followed by the negative ones."""


class PromptRunner:
    """Runs the prompts of all calls of a server."""

    def __init__(self) -> None:
        """No call runs."""
        self._reserved = 0
        self._slots = asyncio.Semaphore(CONCURRENCY)

    @contextmanager
    def reserve(self, size: int) -> Iterator[None]:
        """Reserves bytes for the rows of a call.

        Raises:
            QueueFull: other calls leave too few.
        """
        if self._reserved + size > DERIVED_BYTES:
            raise QueueFull(
                f"the rows to contrast take {size} bytes; other calls leave "
                f"{DERIVED_BYTES - self._reserved}. Try again later",
                field="sites",
                retry_after=RETRY_SECONDS,
            )
        self._reserved += size
        try:
            yield
        finally:
            self._reserved -= size

    async def run(
        self, request: TwoSets, read: ReadPrompt
    ) -> AsyncGenerator[steering_service_pb2.DeriveProgress, None]:
        """Runs the prompts of a request. Yields the progress, beginning with 0 prompts.

        A slow reader misses numbers, but never the last.
        """
        prompts = [(prompt, f"positive[{i}]") for i, prompt in enumerate(request.positive)]
        prompts += [(prompt, f"negative[{i}]") for i, prompt in enumerate(request.negative)]
        waiting, done, changed = iter(enumerate(prompts)), 0, asyncio.Event()

        async def work() -> None:
            nonlocal done
            for index, (prompt, path) in waiting:
                async with self._slots:
                    await read(prompt, path, index)
                done += 1
                changed.set()

        def progress() -> steering_service_pb2.DeriveProgress:
            return steering_service_pb2.DeriveProgress(
                done_prompt_count=done, total_prompt_count=len(prompts)
            )

        async def run_workers() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(CONCURRENCY, len(prompts))):
                        group.create_task(work())
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
            finally:
                changed.set()

        working = asyncio.create_task(run_workers())
        try:
            reported = 0
            yield progress()
            while not working.done():
                await changed.wait()
                changed.clear()
                if done > reported:
                    reported = done
                    yield progress()
            await working
            if done > reported:  # the last prompts ended while the reader was busy
                yield progress()
        finally:
            working.cancel()
            # It may fail although it was cancelled. asyncio would log an error that nothing awaits.
            await asyncio.gather(working, return_exceptions=True)


def check_prompts(request: TwoSets) -> None:
    """Checks the sets of prompts, but not the prompts.

    Raises:
        InvalidArgument: a set has none or too many, or one of them is empty.
    """
    for path, prompts in (("positive", request.positive), ("negative", request.negative)):
        if not prompts:
            raise MissingField("at least one prompt is required", field=path)
        validation.check_count(len(prompts), DERIVED_PROMPTS, path, "prompts")
        for index, prompt in enumerate(prompts):
            check_prompt(prompt, f"{path}[{index}]")


def check_size(size: int) -> None:
    """Checks the bytes of the rows of a call.

    Raises:
        InvalidValue: they are more than all calls together may hold.
    """
    if size > DERIVED_BYTES:
        raise InvalidValue(
            f"the rows to contrast take {size} bytes; at most {DERIVED_BYTES} are allowed. "
            "Name fewer layers, points or prompts",
            field="sites",
        )
