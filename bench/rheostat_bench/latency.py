"""Latency of dynamic steering, in positions: how many rows after a reading a change acts.

A probe reads row f of a sample, and something changes the steering. If the change acts from row a
on, its latency is a - f positions. A probe behind the steered site reads from which row on it acts.

    gate        in the forward pass: a gate opens where the probe reads more than a bound
    controller  a plugin of the server that sets a gain which each reading names
    session     a client that reads the signals of its session, and answers each with a gain
    watch       one watch of all streams, whose client answers each reading with a gain

Each reading gets a gain, which is more than a controller needs. A watch whose client is more than
4,096 answers behind sets none. All streams of an arm, and the watch, are in one Python process.

    rheostat bench latency --out results
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

import rheostat
from rheostat_bench import controllers
from rheostat_bench.machine import add_model_arguments, chosen, described, server_config
from rheostat_bench.processes import Worker
from rheostat_bench.served import address, connected, prompts, serving

_PROMPT = 16
"""Tokens of a prompt."""
_DOSE = 1000.0
"""Norm of what is added. It stands out from everything that a probe reads without it."""
_STEPS = 16
"""Different gains, which follow each other."""
_PATIENCE = 300.0
"""Seconds for all streams of a turn."""
_LABEL = "latency"
"""Label of the requests that a watch reads."""

_MOST_LAG = 8
"""Rows after which the gain of a controller is looked for."""

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float32]
Result = TypeVar("Result")


class Sites(NamedTuple):
    """The sites of the probes, and of the steering between them."""

    read: int
    """Layer of the probe by which a gate opens."""
    steered: int
    """Layer at which is steered, and behind which the second probe reads."""


class Parts(NamedTuple):
    """What requests of all arms are made of."""

    before: rheostat.Probe
    after: rheostat.Probe
    """Reads the steering, in units of its dose."""
    push: rheostat.Intervention


class Stream(NamedTuple):
    """What a stream found."""

    positions: list[int]
    """Latency of each change."""
    answer_ms: list[float]
    """From a reading's arrival at the client to that of the answer to its gain."""
    token_ms: float
    """Time per token."""
    refused: int = 0
    """Readings without a gain, because the answers to too many gains had not come."""


class Broken(Exception):
    """The server reported another first position than the probe behind the steered site shows."""


class Job(NamedTuple):
    """The streams of a turn."""

    target: str
    """Where the server listens."""
    parts: Parts
    prompts: list[list[int]]
    """One for each stream."""
    tokens: int
    """Of each stream."""


Arm = Callable[[rheostat.aio.Engine, Job], Awaitable[list[Stream]]]
"""Runs all streams of a job."""


def parts_of(width: int, sites: Sites) -> Parts:
    """Probes and steering of random, orthogonal directions."""
    drawn, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(width, 2)))
    directions = drawn.T.astype(np.float32)
    before, after = (rheostat.inline(direction[None]) for direction in directions)
    where = rheostat.generated()
    return Parts(
        rheostat.probe(before, points="resid_post", layers=sites.read, where=where, name="before"),
        rheostat.probe(after, points="resid_post", layers=sites.steered, where=where, name="after"),
        rheostat.inline(_DOSE * directions[1:]).at(
            points="resid_post", layers=sites.steered, where=where
        ),
    )


def onsets(fired: Bools) -> npt.NDArray[np.int64]:
    """The rows at which something begins to fire: [rows] of booleans, at consecutive positions."""
    return np.flatnonzero(fired & ~np.concatenate([[True], fired[:-1]]))


def gate_latencies(fired: Bools, acted: Bools) -> list[int]:
    """Rows from each onset of what fired to the first row at which it acted.

    Raises:
        Broken: it never acted.
    """
    found = []
    for onset in onsets(fired).tolist():
        later = np.flatnonzero(acted[onset:])
        if not len(later):
            raise Broken(f"a gate that opened at row {onset} never acted")
        found.append(int(later[0]))
    return found


async def gate_streams(engine: rheostat.aio.Engine, job: Job) -> list[Stream]:
    """Gates that open at about half of the tokens."""
    before, after, push = job.parts
    steering = push.when(rheostat.gate(before.above(0.0)))

    async def run(number: int, prompt: list[int]) -> Stream:
        begun = time.monotonic()
        own: rheostat.GenerateOptions = {"steering": steering, "probes": [before, after]}
        out = await engine.generate(prompt, **_options(job, number, own))
        took = 1e3 * (time.monotonic() - begun) / job.tokens
        fired = out.signals[before] > 0.0
        acted = out.signals[after] > _DOSE / 2
        if (acted & ~fired).any():
            raise Broken("a gate acted where it was shut")
        return Stream(gate_latencies(fired, acted), [], took)

    return await _all_of(run, job)


def lag(named: Floats, acted: Floats) -> int:
    """By how many rows later each of some gains acts.

    Args:
        named: [rows]: the gain that the reading of each row names.
        acted: [rows]: the gain that acts at each row.

    Raises:
        Broken: not each by the same number of rows, up to `_MOST_LAG`.
    """
    for rows in range(min(_MOST_LAG, len(named) - _STEPS) + 1):
        if np.allclose(named[: len(named) - rows], acted[rows:], rtol=0, atol=0.4 / _STEPS):
            return rows
    raise Broken("the gains of a controller do not act a fixed number of rows later")


async def controlled_streams(engine: rheostat.aio.Engine, job: Job) -> list[Stream]:
    """Requests whose gain a controller sets after each token."""
    before, after, push = job.parts

    async def run(number: int, prompt: list[int]) -> Stream:
        begun = time.monotonic()
        own: rheostat.GenerateOptions = {
            "steering": push,
            "probes": [before, after],
            "controller": "bench-stepped",
        }
        out = await engine.generate(prompt, **_options(job, number, own))
        took = 1e3 * (time.monotonic() - begun) / job.tokens
        named = controllers.stepped(_generated(out.signals[before]))
        rows = lag(named, _generated(out.signals[after]) / _DOSE)
        return Stream([rows] * (len(named) - rows), [], took)

    return await _all_of(run, job)


def _generated(readings: Floats) -> Floats:
    """The readings of generated tokens, which are those that are read."""
    generated: Floats = readings[~np.isnan(readings)].astype(np.float32)
    return generated


class Answers:
    """The gains that a client sent, and the server's answers."""

    def __init__(self) -> None:
        """None was sent."""
        self._sent: dict[int, tuple[int, float, float]] = {}
        """By update: the position of its reading, the factor, and when it was sent."""
        self.firsts: list[tuple[int, float]] = []
        """First position and factor of each gain, in order."""
        self.positions: list[int] = []
        self.answer_ms: list[float] = []
        self.refused = 0
        """See `Stream.refused`."""

    def sent(self, update: int, position: int, factor: float) -> None:
        """Notes a gain."""
        self._sent[update] = position, factor, time.monotonic()

    def answered(self, update: int, first: int | None) -> None:
        """Notes an answer: the first position, or None if the stream has ended."""
        if first is None:
            return
        position, factor, sent = self._sent[update]
        self.firsts.append((first, factor))
        if position >= 0:
            self.positions.append(first - position)
            self.answer_ms.append(1e3 * (time.monotonic() - sent))

    def check(self, signals: rheostat.Signals) -> None:
        """Compares the reported positions with what was read behind the steered site.

        Raises:
            Broken: they differ.
        """
        wanted = np.ones(len(signals))
        for first, factor in self.firsts:
            wanted[signals.positions >= first] = factor
        wrong = np.flatnonzero(np.abs(signals["after"] / _DOSE - wanted) > 0.4 / _STEPS)
        if len(wrong):
            position, factor = signals.positions[wrong[0]], wanted[wrong[0]]
            raise Broken(f"at {position} another gain acted than {factor:.3f}")


async def session_streams(engine: rheostat.aio.Engine, job: Job) -> list[Stream]:
    """Sessions, whose client answers each reading with another gain."""
    before, after, push = job.parts

    async def run(number: int, prompt: list[int]) -> Stream:
        answers = Answers()
        count = 0
        begun = time.monotonic()
        own: rheostat.GenerateOptions = {"steering": push, "probes": [before, after]}
        async with engine.session(prompt, **_options(job, number, own)) as session:
            answers.sent(session.gain(0.0), -1, 0.0)  # the first gain builds a table
            async for event in session:
                if isinstance(event, rheostat.UpdateApplied):
                    answers.answered(event.update_id, event.first_positions.get(0))
                elif isinstance(event, rheostat.Signals) and len(event) and answers.firsts:
                    count += 1
                    factor = count % _STEPS / _STEPS
                    with suppress(rheostat.Refused):  # the request has ended
                        answers.sent(session.gain(factor), int(event.positions[-1]), factor)
            out = await session.result()
        took = 1e3 * (time.monotonic() - begun) / job.tokens
        answers.check(out.signals)
        return Stream(answers.positions, answers.answer_ms, took)

    return await _all_of(run, job)


class Watcher:
    """A watch that answers each reading of its requests with another gain."""

    def __init__(self, label: str) -> None:
        """Watches the requests with this label."""
        self.answers: dict[str, Answers] = {}
        """By request."""
        self.label = label
        self._updates: dict[int, str] = {}
        """The request of each update that was not answered."""
        self._gains = 0
        self._ended = 0

    def take(self, event: rheostat.WatchEvent, gain: Callable[[str, float], int]) -> None:
        """Answers an event.

        Args:
            event: the event.
            gain: sets the gain of a request, and returns the update's id.

        Raises:
            Broken: a request was not read.
        """
        match event:
            case rheostat.WatchedRequestBegun():
                self.answers[event.request_id] = Answers()
                self._set(gain, event.request_id, -1)
            case rheostat.WatchedSignals():
                runs = zip(event.request_ids, event.first_positions, event.row_counts, strict=True)
                end = 0
                for request, first, count in runs:
                    end += count
                    if not np.isnan(event.values[end - 1, 0]) and self.answers[request].firsts:
                        self._set(gain, request, int(first + count) - 1)
            case rheostat.WatchedRequestEnded():
                if event.missed_reason:
                    raise Broken(f"a watch missed a request: {event.missed_reason}")
                self._ended += 1
            case rheostat.UpdateRefused():
                del self._updates[event.update_id]  # the request has ended
            case rheostat.UpdateApplied():
                answers = self.answers[self._updates.pop(event.update_id)]
                answers.answered(event.update_id, event.first_positions.get(0))

    def has_all(self, requests: int) -> bool:
        """Whether so many requests have ended, and every gain was answered."""
        return self._ended == requests and not self._updates

    def _set(self, gain: Callable[[str, float], int], request: str, position: int) -> None:
        factor = (self._gains + 1) * 5 % _STEPS / _STEPS
        try:
            update = gain(request, factor)
        except rheostat.ResourceExhausted:
            self.answers[request].refused += 1
            return
        self._gains += 1
        self._updates[update] = request
        self.answers[request].sent(update, position, factor)


async def watch_streams(engine: rheostat.aio.Engine, job: Job) -> list[Stream]:
    """Requests without a session, which a watch steers."""
    before, after, push = job.parts
    watcher = Watcher(uuid.uuid4().hex)
    times: dict[str, float] = {}

    async def run(number: int, prompt: list[int]) -> rheostat.Generation:
        begun = time.monotonic()
        own: rheostat.GenerateOptions = {
            "steering": push,
            "probes": after,
            "labels": {_LABEL: watcher.label},
        }
        out = await engine.generate(prompt, **_options(job, number, own))
        times[out.request_id] = 1e3 * (time.monotonic() - begun) / job.tokens
        return out

    labels = {_LABEL: watcher.label}
    async with engine.watch(probes=before, labels=labels, steers=True) as watch:

        async def steer() -> None:
            async for event in watch:
                watcher.take(event, watch.gain)
                if watcher.has_all(len(job.prompts)):
                    return
            raise Broken("the watch has ended before its requests")

        outs, _ = await asyncio.gather(_all_of(run, job), steer())
    streams = []
    for out in outs:
        answers = watcher.answers[out.request_id]
        answers.check(out.signals)
        took = times[out.request_id]
        streams.append(Stream(answers.positions, answers.answer_ms, took, answers.refused))
    return streams


ARMS: Mapping[str, Arm] = {
    "gate": gate_streams,
    "controller": controlled_streams,
    "session": session_streams,
    "watch": watch_streams,
}


def _options(job: Job, number: int, own: rheostat.GenerateOptions) -> rheostat.GenerateOptions:
    """The options of a request. Each request samples other tokens."""
    return {
        **own,
        "max_tokens": job.tokens,
        "temperature": 1,
        "seed": number,
        "ignore_eos": True,
    }


async def _all_of(run: Callable[[int, list[int]], Awaitable[Result]], job: Job) -> list[Result]:
    """Runs all streams, which begin within the time of a few tokens."""

    async def one(number: int, prompt: list[int]) -> Result:
        await asyncio.sleep(random.random() * 0.05)
        return await run(number, prompt)

    async with asyncio.timeout(_PATIENCE):
        runs = (one(number, prompt) for number, prompt in enumerate(job.prompts))
        return list(await asyncio.gather(*runs))


async def turn(
    arm: str, streams: int, tokens: int, sites: Sites, target: str, engine: rheostat.aio.Engine
) -> list[Stream]:
    """An order: all streams of an arm."""
    parts = parts_of((await engine.model()).width, sites)
    return await ARMS[arm](engine, Job(target, parts, prompts(streams, _PROMPT), tokens))


def percentile(counts: Mapping[int, int], share: float) -> int:
    """The smallest number that so many, as a fraction of all, are not above."""
    wanted = share * sum(counts.values())
    reached = 0
    for number, count in sorted(counts.items()):
        reached += count
        if reached >= wanted:
            return number
    raise ValueError("nothing was counted")


def summary(streams: Sequence[Stream]) -> dict[str, object]:
    """The histogram of an arm, its percentiles, and the times."""
    counts = Counter(number for stream in streams for number in stream.positions)
    answers = [number for stream in streams for number in stream.answer_ms]
    found: dict[str, object] = {
        "changes": sum(counts.values()),
        "positions": {str(number): counts[number] for number in sorted(counts)},
        "p50": percentile(counts, 0.5),
        "p99": percentile(counts, 0.99),
        "max": max(counts),
        "token_ms": statistics.median(stream.token_ms for stream in streams),
    }
    if answers:
        found["answer_ms"] = statistics.median(answers)
        found["refused"] = sum(stream.refused for stream in streams)
    return found


def main() -> None:
    """Measures, prints a table and writes `latency.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser, default=None)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for latency.json")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--front-ends", type=int, help="of the server")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    table: dict[str, dict[str, dict[str, object]]] = {arm: {} for arm in arguments.arms}
    with tempfile.TemporaryDirectory() as scratch:
        model = chosen(arguments, Path(scratch))
        controllers.install(Path(scratch) / "plugins")
        config = server_config(
            model,
            engines=1,
            requests=max(arguments.streams),
            front_ends=arguments.front_ends,
            controllers=tuple(controllers.PLUGINS),
            controller_budget_ms=1000.0,
        )
        with Worker(partial(serving, config), parent=True) as server:
            target = server.do(address)
            with rheostat.connect(target) as client:
                served = client.model()
            sites = Sites(0, served.layer_count // 2)
            with Worker(partial(connected, target)) as clients:
                for arm in arguments.arms:
                    clients.do(partial(turn, arm, 1, 32, sites, target))  # warms up
                    for streams in arguments.streams:
                        order = partial(turn, arm, streams, arguments.tokens, sites, target)
                        table[arm][str(streams)] = row = summary(clients.do(order))
                        figures = ", ".join(f"{name} {value}" for name, value in row.items())
                        print(f"{arm:11} {streams:3} streams: {figures}", flush=True)
    result = {
        "benchmark": "latency",
        "measures": "positions from a reading to the first row on which its change acts",
        **described(model, served.engine.runner),
        "compiled": served.engine.compiled,
        "tokens": arguments.tokens,
        "summary": table,
    }
    (arguments.out / "latency.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
