"""Clients of a server that sweep, make patched requests one by one, or stream tokens.

Each runs in a process of its own.
"""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

import rheostat
from rheostat_bench.served import prompts as fresh_prompts
from rheostat_bench.sweep_references import Cell, Graded, Grid, Prompts

POINT = "resid_post"
"""The point whose rows all cells replace."""

Priority = Literal["background", "normal"]


class LateError(Exception):
    """A call had not ended when its time was over. The message says how far it got."""


class Swept(NamedTuple):
    """A sweep."""

    seconds: float
    """From the call to its result."""
    answer: Grid
    """[layers, positions]: ln p(answer)."""
    computed_tokens: int
    noise: float
    """Largest deviation of the repeated corrupt prompt."""


class SweptPairs(NamedTuple):
    """A sweep of many pairs."""

    seconds: float
    """From the call to its result."""
    answer: Grid
    """[pairs, layers, groups]: ln p(answer)."""
    computed_tokens: int
    first_cell_s: float
    """From the call to the first cell. Before it, all clean prompts and most baselines run."""


class Single(NamedTuple):
    """A patched request."""

    cell: Cell
    logprob: float
    """Of its greedy token, which is the likeliest one."""


class Gaps(NamedTuple):
    """Tokens of streams."""

    seconds: float
    """From the first call to the last token."""
    tokens: int
    gaps_ms: list[float]
    """Times between two messages with tokens of one stream."""
    per_token_ms: list[float]
    """Of each stream, from its first token to its last."""
    from_s: float
    """When every stream had a token, by the clock of the machine."""
    to_s: float
    """When the first stream ended."""


class Load(NamedTuple):
    """Prompts beside streams, of one token each: not swept, not steered."""

    length: int
    """Tokens of a prompt."""
    rate: float
    """Prompts each second."""
    burst: int
    """Prompts that are sent together."""


class Client:
    """A client. Its methods are calls."""

    def __init__(self, engine: rheostat.aio.Engine) -> None:
        """Uses one connection."""
        self._engine = engine
        self._load: asyncio.Task[None] | None = None
        self._arrivals: list[float] = []
        """When cells or prompts of the load came, by the clock of the machine."""

    async def sweep(
        self, prompts: Prompts, positions: Sequence[int], at_once: int, priority: Priority
    ) -> Swept:
        """Sweeps some positions of every layer."""
        began = time.monotonic()
        result = await self._engine.sweep(
            pair_of(prompts),
            points=POINT,
            grades="logprob",
            where=rheostat.positions(*positions),
            concurrency=at_once,
            priority=priority,
            progress=self._count,
            watch=False,
        )
        seconds = time.monotonic() - began
        answer = np.full((len(result.sites), len(prompts.corrupt)), np.nan)
        answer[:, list(positions)] = result.array()
        return Swept(
            seconds,
            answer,
            result.computed_token_count,
            result.noise[0].largest,
        )

    async def sweep_pairs(
        self, pairs: Sequence[Prompts], groups: Sequence[range], at_once: int
    ) -> SweptPairs:
        """Sweeps groups of positions of every layer for many pairs, in one call.

        Raises:
            LateError: the call was cancelled because it took too long.
        """
        named = {
            f"{group.start}-{group.stop - 1}": rheostat.window(group.start, group.stop)
            for group in groups
        }
        began = time.monotonic()
        arrivals: list[float] = []

        def arrived(done: int, count: int) -> None:
            if done:  # it is also called when the sweep has begun
                arrivals.append(time.monotonic() - began)

        try:
            result = await self._engine.sweep(
                [replace(pair_of(prompts), groups=named) for prompts in pairs],
                points=POINT,
                grades="logprob",
                concurrency=at_once,
                pair_values=True,
                progress=arrived,
                watch=False,
            )
        except asyncio.CancelledError:
            seconds = time.monotonic() - began
            raise LateError(
                f"after {seconds:.1f} s, {len(arrivals)} cells of {len(pairs)} pairs each had come,"
                f" the first after {arrivals[0] if arrivals else math.nan:.1f} s"
            ) from None
        seconds = time.monotonic() - began
        return SweptPairs(
            seconds, result.pair_values[:, 0], result.computed_token_count, arrivals[0]
        )

    def _count(self, done: int, count: int) -> None:
        if done:  # it is also called when the sweep has begun
            self._arrivals.append(time.monotonic())

    async def capture(self, prompts: Prompts, run_id: str) -> None:
        """Stores the rows of the clean prompt."""
        capture = rheostat.Capture(POINT, "all", where="prompt", to=rheostat.Run(run_id))
        await self._engine.generate(prompts.clean, capture=capture, max_tokens=1, temperature=0)

    async def delete(self, run_id: str) -> None:
        """Deletes them."""
        await self._engine.delete_run(run_id)

    async def requests(
        self, prompts: Prompts, cells: Sequence[Cell], at_once: int, run_id: str
    ) -> list[Single]:
        """Makes a request for each cell, so many at a time."""
        remaining = iter(cells)
        found: list[Single] = []

        async def loop() -> None:
            for cell in remaining:
                steering = rheostat.replace(rheostat.from_run(run_id)).at(
                    points=POINT, layers=cell.layer, where=rheostat.positions(cell.position)
                )
                out = await self._engine.generate(
                    prompts.corrupt, steering=steering, max_tokens=1, temperature=0, logprobs=1
                )
                found.append(Single(cell, out.logprobs[0].token.logprob))

        await asyncio.gather(*(loop() for _ in range(at_once)))
        return found

    async def stream(self, wanted: Sequence[list[int]], tokens: int) -> Gaps:
        """Streams all prompts at the same time."""
        gaps: list[float] = []
        per_token: list[float] = []
        firsts: list[float] = []
        lasts: list[float] = []
        began = time.monotonic()

        async def one(prompt: list[int]) -> int:
            first = last = 0.0
            count = 0
            stream = self._engine.stream(prompt, max_tokens=tokens, temperature=0, ignore_eos=True)
            async for event in stream:
                if isinstance(event, rheostat.Tokens):
                    now = time.monotonic()
                    if count:
                        gaps.append(1e3 * (now - last))
                    else:
                        first = now
                    count, last = count + len(event.token_ids), now
            per_token.append(1e3 * (last - first) / max(1, count - 1))
            firsts.append(first)
            lasts.append(last)
            return count

        counts = await asyncio.gather(*map(one, wanted))
        seconds = time.monotonic() - began
        return Gaps(seconds, sum(counts), gaps, per_token, max(firsts), min(lasts))

    async def begin_sweeps(self, length: int, at_once: int, priority: Priority) -> None:
        """Sweeps all positions of new prompts again and again, until `end_load`.

        Returns with the first cell, so that cells run beside the next streams from the beginning.

        Raises:
            RheostatError: the sweep has failed.
        """

        async def sweep() -> None:
            while True:
                await self.sweep(new_prompts(length), range(length), at_once, priority)

        await self._begin(sweep())
        while not self._arrivals:
            await asyncio.sleep(0.001)
            await self._raise_failure()

    async def begin_prompts(self, load: Load) -> None:
        """Sends prompts again and again, until `end_load`."""

        async def one(prompt: list[int]) -> None:
            await self._engine.generate(prompt, max_tokens=1, temperature=0)
            self._arrivals.append(time.monotonic())

        async def send() -> None:
            began = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for burst in itertools.count():
                    due = began + burst * load.burst / load.rate
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                    for prompt in fresh_prompts(load.burst, load.length):
                        group.create_task(one(prompt))

        await self._begin(send())

    async def _begin(self, load: Coroutine[None, None, None]) -> None:
        self._arrivals = []
        self._load = asyncio.create_task(load)

    async def _raise_failure(self) -> None:
        if self._load is not None and self._load.done():
            await self._load

    async def end_load(self) -> list[float]:
        """Ends what runs beside the streams; when cells or prompts came.

        Raises:
            RheostatError: a sweep or a prompt has failed.
        """
        assert self._load is not None, "it has begun"
        await self._raise_failure()
        self._load.cancel()
        with suppress(asyncio.CancelledError):
            await self._load
        self._load = None
        return self._arrivals


@asynccontextmanager
async def connected(target: str) -> AsyncIterator[Client]:
    """A client with a connection of its own."""
    async with rheostat.aio.connect(target) as engine:
        yield Client(engine)


def pair_of(prompts: Prompts) -> rheostat.Pair:
    """The pair of a sweep."""
    return rheostat.Pair(prompts.clean, corrupt=prompts.corrupt, answer=[prompts.answer])


def new_prompts(length: int) -> Prompts:
    """Prompts that differ at nearly every position, so that nearly every cell has an effect."""
    clean, corrupt, (answer, *_) = fresh_prompts(3, length)
    return Prompts(clean, corrupt, answer)


def singles_grid(seconds: float, shape: tuple[int, int], singles: Sequence[Single]) -> Graded:
    """Requests' values, where their cells are."""
    graded = Graded(seconds, np.full(shape, np.nan), np.full(shape, np.nan))
    for single in singles:
        graded.largest[single.cell] = single.logprob
    return graded
