"""The neighbour: a client that repeats short greedy generations, and times every token.

It stands for all clients that share a server with a hostile client. It also compares its answers:
each text and each row must equal those of an idle server.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple, TypeAlias

import grpc
import grpc.aio
import numpy as np
import numpy.typing as npt

import rheostat
from rheostat_bench.calls import connect
from rheostat_bench.served_process import cpu_stolen
from rheostat_engine.adapters.queue_record import RECORDED

_PING_EVERY = 0.1
"""Seconds between two health checks."""
_WARM_UPS = 3
"""Generations of each prompt before anything is timed: the first ones load and allocate."""
_ROWS_DIFFER = 1e-3
"""Largest difference of a row, over the row's norm, that the order of float32 sums explains."""


Ping: TypeAlias = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]


class Job(NamedTuple):
    """The neighbour's requests."""

    prompts: tuple[str, ...]
    tokens: int
    capture: rheostat.Capture | None
    """Rows that come with the answer."""


class Heard(NamedTuple):
    """The neighbour's measurements in a window of time; times are in seconds."""

    seconds: float
    gaps: tuple[float, ...]
    """Times between two messages with tokens of one generation. A wait that has not ended when the
    window ends is included."""
    firsts: tuple[float, ...]
    """Times from a call to its first token. A wait that has not ended is included too."""
    tokens: int
    generations: int
    """Generations that ended in the window."""
    different_texts: int
    """Generations whose text is not the undisturbed one."""
    different_rows: int
    """Generations of which a row is wrong, missing or doubled."""
    failures: dict[str, int]
    """Generations that failed, by the error."""
    pings: tuple[float, ...]
    """Durations of health checks. A check that has not ended is included too."""
    own_gaps: tuple[float, ...] = ()
    """The `gaps` that have ended, each without the time that the host took from all cores."""
    first_requests: tuple[str, ...] = ()
    """The ids of the requests that `firsts` belong to."""

    @property
    def longest(self) -> float:
        """The longest wait for a token, also for the first of a generation; 0: there was none."""
        return max((*self.gaps, *self.firsts), default=0.0)


class _Undisturbed(NamedTuple):
    token_ids: tuple[int, ...]
    rows: npt.NDArray[np.float32] | None


class _Log:
    """Events with their times, by `time.monotonic`, which all processes of a host share."""

    def __init__(self) -> None:
        self.gaps: list[tuple[float, float]] = []
        self.own_gaps: list[tuple[float, float]] = []
        self.firsts: list[tuple[float, float, str]] = []
        self.ends: list[tuple[float, bool, bool]] = []
        self.failures: list[tuple[float, str]] = []
        self.pings: list[tuple[float, float]] = []
        self.tokens: list[tuple[float, int]] = []


class Neighbour:
    """One client. Its methods are orders of a `Worker`."""

    def __init__(self, target: str) -> None:
        """Does nothing yet."""
        self._target = target
        self._log = _Log()
        self._undisturbed: list[_Undisturbed] = []
        self._waits_since: float | None = None
        self._waits_for_first = True
        self._requests = 0
        self._request_id = ""
        self._ping_since: float | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, job: Job, *, check: bool = True) -> None:
        """Calls `learn`, then streams until the process ends.

        Args:
            job: what to ask for.
            check: whether answers are compared with the undisturbed ones.
        """
        await self.learn(job)
        await self.stream(check=check)

    async def learn(self, job: Job) -> None:
        """Connects, and records the answers of an idle server.

        Args:
            job: what to ask for.
        """
        self._client, self._job = await self._engine(), job
        for _ in range(_WARM_UPS):
            self._undisturbed = [
                await self._generation(self._client, job, prompt) for prompt in job.prompts
            ]

    async def stream(self, *, check: bool = True) -> None:
        """Repeats the requests until the process ends.

        Args:
            check: whether answers are compared with the undisturbed ones.
        """
        self._tasks = [
            asyncio.create_task(self._stream(self._client, self._job, check)),
            asyncio.create_task(self._ping()),
        ]

    async def now(self) -> float:
        """The time, on the clock that `heard` uses."""
        return time.monotonic()

    async def heard(self, since: float) -> Heard:
        """The measurements from `since` until now."""
        now, log = time.monotonic(), self._log
        gaps = [gap for at, gap in log.gaps if at >= since]
        firsts = [(gap, request_id) for at, gap, request_id in log.firsts if at >= since]
        if self._waits_since is not None:
            wait = now - self._waits_since
            if self._waits_for_first:
                firsts.append((wait, self._request_id))
            else:
                gaps.append(wait)
        pings = [took for at, took in log.pings if at >= since]
        if self._ping_since is not None:
            pings.append(now - self._ping_since)
        failures: dict[str, int] = {}
        for at, name in log.failures:
            if at >= since:
                failures[name] = failures.get(name, 0) + 1
        ends = [end for end in log.ends if end[0] >= since]
        return Heard(
            now - since,
            tuple(gaps),
            tuple(gap for gap, _ in firsts),
            sum(count for at, count in log.tokens if at >= since),
            len(ends),
            sum(not text for _, text, _ in ends),
            sum(not rows for _, _, rows in ends),
            failures,
            tuple(pings),
            tuple(gap for at, gap in log.own_gaps if at >= since),
            tuple(request_id for _, request_id in firsts),
        )

    async def close(self) -> None:
        """Stops streaming."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _engine(self) -> rheostat.aio.Engine:
        self._connection = rheostat.aio.connect(self._target)
        engine = await self._connection.__aenter__()
        await engine.wait_until_ready()
        return engine

    async def _stream(self, engine: rheostat.aio.Engine, job: Job, check: bool) -> None:
        number = 0
        while True:
            index = number % len(job.prompts)
            number += 1
            try:
                found = await self._generation(engine, job, job.prompts[index])
            except rheostat.RheostatError as error:
                label = f"{error.code.name} {error.reason}".rstrip()
                self._log.failures.append((time.monotonic(), label))
                await asyncio.sleep(0.02)
                continue
            finally:
                self._waits_since = None
            text = not check or found.token_ids == self._undisturbed[index].token_ids
            rows = not check or not text or _alike(found.rows, self._undisturbed[index].rows)
            self._log.ends.append((time.monotonic(), text, rows))

    async def _generation(self, engine: rheostat.aio.Engine, job: Job, prompt: str) -> _Undisturbed:
        self._waits_since = last = time.monotonic()
        self._waits_for_first = True
        self._requests += 1
        self._request_id = f"{RECORDED}{os.getpid()}-{id(self):x}-{self._requests}"
        taken = cpu_stolen()
        stream = engine.stream(
            prompt,
            max_tokens=job.tokens,
            temperature=0,
            ignore_eos=True,
            capture=job.capture,
            request_id=self._request_id,
        )
        async for event in stream:
            if not isinstance(event, rheostat.Tokens):
                continue
            now, before, taken = time.monotonic(), taken, cpu_stolen()
            if self._waits_for_first:
                self._log.firsts.append((now, now - last, self._request_id))
            else:
                self._log.gaps.append((now, now - last))
                own = now - last - (taken - before) / (os.cpu_count() or 1)
                self._log.own_gaps.append((now, own))
            self._log.tokens.append((now, len(event.token_ids)))
            self._waits_since = last = now
            self._waits_for_first = False
        out = await stream.result()
        return _Undisturbed(tuple(out.token_ids), _rows(out.activations, job.capture))

    async def _ping(self) -> None:
        async with connect(self._target) as channel:
            check: Ping = channel.unary_unary("/grpc.health.v1.Health/Check")
            while True:
                self._ping_since = began = time.monotonic()
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await check(b"")
                now = time.monotonic()
                self._ping_since = None
                self._log.pings.append((now, now - began))
                await asyncio.sleep(_PING_EVERY)


def _rows(
    activations: rheostat.Activations, capture: rheostat.Capture | None
) -> npt.NDArray[np.float32] | None:
    """All rows, [sites x positions, W], site by site."""
    if capture is None:
        return None
    return np.concatenate([np.asarray(rows, np.float32) for rows in activations.values()])


def _alike(found: npt.NDArray[np.float32] | None, wanted: npt.NDArray[np.float32] | None) -> bool:
    if found is None or wanted is None:
        return found is wanted
    if found.shape != wanted.shape:
        return False
    norms = np.linalg.norm(wanted, axis=1)
    return bool((np.linalg.norm(found - wanted, axis=1) <= _ROWS_DIFFER * norms).all())


@asynccontextmanager
async def neighbouring(target: str) -> AsyncIterator[Neighbour]:
    """A neighbour with connections of its own."""
    neighbour = Neighbour(target)
    try:
        yield neighbour
    finally:
        await neighbour.close()
