"""Runs the prompts of calls that contrast two sets.

Invariants: a call that ends early leaves no running requests. The rows of all calls together take
at most `DERIVED_BYTES`, and few of their prompts run at the same time.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar

from rheostat_server import validation
from rheostat_server.errors import InvalidValue, MissingField, QueueFull
from rheostat_server.limits import DERIVED_BYTES, DERIVED_PROMPTS, RETRY_SECONDS
from rheostat_wire.v1 import types_pb2

CONCURRENCY = 8
"""Prompts of all calls that run at the same time. Prompts of one engine step end in the same
iteration of the event loop, and each occupies it for about 10 ms at 72 sites."""

Job = Callable[[], Awaitable[None]]
"""Runs a prompt."""

Rows = TypeVar("Rows")

ReadPrompt = Callable[[types_pb2.Prompt, str, Rows, int], Awaitable[None]]
"""Runs a prompt with a path for its errors, and puts its rows into those of its set, by its
index."""


class TwoSets(Protocol):
    """A request that contrasts two sets of prompts."""

    @property
    def positive(self) -> Sequence[types_pb2.Prompt]:
        """The prompts of one set."""

    @property
    def negative(self) -> Sequence[types_pb2.Prompt]:
        """The prompts of the other set."""


def jobs_of(request: TwoSets, positive: Rows, negative: Rows, read: ReadPrompt[Rows]) -> list[Job]:
    """The jobs that read all prompts of a request into the rows of its two sets."""
    sets = ("positive", request.positive, positive), ("negative", request.negative, negative)
    return [
        partial(read, prompt, f"{name}[{index}]", rows, index)
        for name, prompts, rows in sets
        for index, prompt in enumerate(prompts)
    ]


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

    async def run(self, jobs: Sequence[Job]) -> AsyncGenerator[int, None]:
        """Runs prompts. Yields the number of prompts that have run, beginning with 0.

        A slow reader misses numbers, but never the last.
        """
        waiting, done, changed = iter(jobs), 0, asyncio.Event()

        async def work() -> None:
            nonlocal done
            for job in waiting:
                async with self._slots:
                    await job()
                done += 1
                changed.set()

        async def run_workers() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(CONCURRENCY, len(jobs))):
                        group.create_task(work())
            except ExceptionGroup as failed:
                raise failed.exceptions[0] from None
            finally:
                changed.set()

        working = asyncio.create_task(run_workers())
        try:
            yield (reported := 0)
            while not working.done():
                await changed.wait()
                changed.clear()
                if done > reported:
                    yield (reported := done)
            await working
            if done > reported:  # the last prompts ended while the reader was busy
                yield done
        finally:
            working.cancel()
            # It may fail although it was cancelled. asyncio would log an error that nothing awaits.
            await asyncio.gather(working, return_exceptions=True)


def check_prompts(prompts: Sequence[types_pb2.Prompt], path: str) -> None:
    """Checks a set of prompts, but not the prompts.

    Raises:
        InvalidArgument: there are none or too many, or one of them is empty.
    """
    if not prompts:
        raise MissingField("at least one prompt is required", field=path)
    validation.check_count(len(prompts), DERIVED_PROMPTS, path, "prompts")
    for index, prompt in enumerate(prompts):
        kind = prompt.WhichOneof("prompt")
        validation.required(kind, f"{path}[{index}]", "text, token_ids and chat")


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
