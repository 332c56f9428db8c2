"""Speed of captured rows to a subscriber on the same host, in two processes.

The engine is a stand-in that hands rows over as fast as they are taken, in the shape of Qwen3-8B:
what is timed is the server and the client, from the side channel's events on. A request's prompt
comes in one step, at so many sites; its generated tokens then come one position at a time. "prompt"
measures bytes, "decode" rows. Rows come over loopback, through shared memory as float32 arrays of
the reader's own, or through shared memory as views of the bfloat16 that the engine made.

    rheostat bench stream --out results
"""

import argparse
import asyncio
import json
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

import rheostat
from rheostat_bench.machine import circumstances
from rheostat_bench.summaries import Figures
from rheostat_engine import (
    Capacity,
    Event,
    GainsUpdate,
    Installed,
    ModelSites,
    Plan,
    Released,
    Rows,
)
from rheostat_server.config import ModelInfo, ServerConfig
from rheostat_server.engine.backend import (
    Backend,
    CapturesUpdate,
    Delta,
    Ending,
    Job,
    LensReading,
    QueueStats,
    Start,
    SteeringUpdate,
    TokenDirections,
    WorkerStats,
)
from rheostat_server.errors import Defect
from rheostat_server.prompts.tokenizer import Tokenizer
from rheostat_server.serve import start
from rheostat_server.vectors.store import Vector
from rheostat_wire.dtypes import FloatArray

_SPAWNED = multiprocessing.get_context("spawn")

_WIDTH = 4096
_LAYERS = 36
_PROMPT = 512
_GIB = 1 << 30
_BUFFER = 2 * _GIB
_CREDIT = 256 << 20
_BACKLOG = 64 << 20
"""Bytes that may wait before the stand-in pauses."""


class Load(NamedTuple):
    """What one arm does."""

    name: str
    sites: int
    tokens: int
    """Generated per request."""
    requests: int
    """One after the other."""


LOADS = (
    Load("prompt, 1 site", 1, 1, 64),
    Load("prompt, 9 sites", 9, 1, 16),
    Load("prompt, 36 sites", 36, 1, 4),
    Load("decode, 1 site", 1, 128, 16),
    Load("decode, 36 sites", 36, 128, 2),
)
"""What is asked for."""


class _Way(NamedTuple):
    """How rows come."""

    shared_memory: bool
    views: bool


WAYS = {
    "loopback": _Way(shared_memory=False, views=False),
    "shared memory": _Way(shared_memory=True, views=False),
    "shared memory, views": _Way(shared_memory=True, views=True),
}
"""Every arm is a load and a way."""

_LONGER = 4
"""Through shared memory prompts come so many times as often."""


class _StandIn:
    """An engine that has every row at hand."""

    def __init__(self) -> None:
        self.waiting: Callable[[], int] = lambda: 0
        self._deliver: Callable[[Event], None] = lambda event: None
        self._running: dict[str, asyncio.Task[None]] = {}
        self._rows = np.random.default_rng(0).integers(0, 1 << 16, (_PROMPT, _WIDTH), np.uint16)
        self.info = ModelInfo(
            name="stand-in",
            vocabulary=1000,
            model_tokens=4096,
            step_tokens=8192,
            running_samples=64,
            logprobs=5,
            device="cpu",
            compiled=False,
            prefix_caching=False,
            loras=(),
            tensor_parallel=1,
            pipeline_parallel=1,
            vllm_version="",
            torch_version="",
        )
        self.sites = ModelSites(
            architecture="StandIn",
            num_layers=_LAYERS,
            width=_WIDTH,
            dtype="bfloat16",
            runner="",
            refused={},
            capacity=Capacity(
                bank_rows=1, directions=1, steps=1, slots=1, token_rules=1, capture_rows=1 << 30
            ),
            world_size=1,
        )

    def tokenizer(self) -> Tokenizer | None:
        return None

    def start(self, deliver: Callable[[Event], None], lost: Callable[[str], None]) -> None:
        self._deliver = deliver

    async def add_request(
        self, job: Job, receive: Callable[[Delta], None], fail: Callable[[Exception], None]
    ) -> None:
        name = job.plan.request_id
        self._running[name] = task = asyncio.create_task(self._generate(job, receive))
        task.add_done_callback(lambda _: self._running.pop(name))

    async def add_requests(self, starts: Sequence[Start]) -> None:
        for one in starts:
            await self.add_request(*one)

    async def abort(self, plan_ids: Sequence[str]) -> None:
        for plan_id in plan_ids:
            if plan_id in self._running:
                self._running[plan_id].cancel()

    async def _generate(self, job: Job, receive: Callable[[Delta], None]) -> None:
        name, end = job.plan.request_id, len(job.prompt)
        self._deliver(Installed(name, ""))
        start = 0
        for step in range(job.sampling.max_tokens):
            for capture in job.plan.captures:
                positions = np.arange(start, end, dtype=np.int32)
                rows = self._rows[: end - start]
                together = (capture.sites,) if start else tuple((s,) for s in capture.sites)
                for sites in together:
                    data = np.broadcast_to(rows, (len(sites), *rows.shape))
                    self._deliver(Rows(name, sites, positions, data))
            start, end = end, end + 1
            last = step == job.sampling.max_tokens - 1
            receive(Delta(token_ids=(7,), ending=Ending.LENGTH if last else None))
            await asyncio.sleep(0)
            while self.waiting() > _BACKLOG:
                await asyncio.sleep(0.004)
        self._deliver(Released(name, (), True, {}, 0, 0, (0, start)))

    async def prepare(self, name: str, plan: Plan | None, plan_cost: int) -> tuple[bool, str]:
        return True, ""

    async def release_prepared(self, names: Sequence[str]) -> bool:
        return False

    async def update_steering(
        self, updates: Sequence[SteeringUpdate]
    ) -> list[list[int | None] | Defect]:
        return [[None] * len(update.plan_ids) for update in updates]

    async def set_gains(self, updates: Sequence[GainsUpdate]) -> None:
        pass

    async def hold_samples(self, plan_ids: Sequence[str], *, held: bool) -> None:
        pass

    async def update_captures(self, changes: Mapping[str, CapturesUpdate | None]) -> None:
        pass

    async def load_vectors(self, vectors: Sequence[Vector]) -> None:
        pass

    async def drop_vectors(self, digests: Sequence[bytes]) -> None:
        pass

    async def lens(
        self,
        rows: FloatArray,
        top_k: int,
        token_ids: Sequence[int],
        reference: FloatArray | None = None,
    ) -> LensReading:
        raise NotImplementedError

    def text_of(self, token_id: int) -> str:
        return ""

    async def directions(self, token_ids: Sequence[int]) -> TokenDirections:
        raise NotImplementedError

    async def worker_stats(self) -> WorkerStats:
        return WorkerStats()

    def queue_stats(self) -> QueueStats:
        return QueueStats()

    async def close(self) -> None:
        pass


def _serve(told: Connection) -> None:
    """The server's process: says its port, then its CPU time when asked, until it is told None."""

    async def main() -> None:
        backend = _StandIn()

        async def bring_up(config: ServerConfig) -> Backend:
            return backend

        config = ServerConfig(
            model="stand-in", port=0, subscriptions_bytes=_BUFFER, drain_grace=1.0
        )
        server = await start(config, bring_up)
        subscriptions = server.readiness.manager().subscriptions
        backend.waiting = lambda: subscriptions.waiting_bytes
        told.send(server.port)
        while await asyncio.to_thread(told.recv) is not None:
            told.send(time.process_time())
        await server.stop()

    asyncio.run(main())


class _Measured(NamedTuple):
    seconds: float
    rows: int
    nbytes: int
    """As bfloat16."""
    client: float
    """Seconds of CPU."""
    server: float
    """Seconds of CPU."""

    def figures(self) -> dict[str, float]:
        """What the table shows."""
        return {
            "gib_per_s": self.nbytes / self.seconds / _GIB,
            "rows_per_s": self.rows / self.seconds,
            "us_per_row": self.seconds / self.rows * 1e6,
            "client_cpu_us_per_row": self.client / self.rows * 1e6,
            "server_cpu_us_per_row": self.server / self.rows * 1e6,
        }


def _run(
    engine: rheostat.Engine,
    target: str,
    load: Load,
    way: _Way,
    server_cpu: Callable[[], float],
) -> _Measured:
    """One turn of an arm: from the first row to the end of the last request."""
    capture = rheostat.Capture("resid_post", layers=range(load.sites))
    rows = 0
    with engine.subscribe(
        every=True,
        capture=capture,
        buffer_bytes=_BUFFER,
        credit=_CREDIT,
        shared_memory=way.shared_memory,
        views=way.views,
    ) as subscription:
        begun, used, served = time.perf_counter(), time.process_time(), server_cpu()
        sender = _SPAWNED.Process(target=_ask, args=(target, load), daemon=True)
        sender.start()
        ended = 0
        while ended < load.requests:
            event = next(subscription)
            if isinstance(event, rheostat.CapturedRows):
                if not rows:
                    begun = time.perf_counter()
                rows += event.shape[0] * event.shape[1]
            ended += isinstance(event, rheostat.EndOfRequest)
        seconds = time.perf_counter() - begun
        cpu = time.process_time() - used, server_cpu() - served
        sender.join()
    return _Measured(seconds, rows, rows * _WIDTH * 2, *cpu)


def _ask(target: str, load: Load) -> None:
    """The requests, from a process of their own."""
    with rheostat.connect(target) as engine:
        for _ in range(load.requests):
            engine.generate([5] * _PROMPT, max_tokens=load.tokens, ignore_eos=True)


def main() -> None:
    """Measures, prints a table and writes `stream.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for stream.json")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    ours, theirs = _SPAWNED.Pipe()
    server = _SPAWNED.Process(target=_serve, args=(theirs,))
    server.start()

    def server_cpu() -> float:
        ours.send("cpu")
        return float(ours.recv())

    arms = {f"{load.name}, {way}": (_sized(load, way), way) for load in LOADS for way in WAYS}
    found: dict[str, list[_Measured]] = {name: [] for name in arms}
    target = f"127.0.0.1:{ours.recv()}"
    with rheostat.connect(target) as engine:
        engine.wait_until_ready()
        for _ in range(arguments.repeats + 1):
            for name, (load, way) in arms.items():
                found[name].append(_run(engine, target, load, WAYS[way], server_cpu))
    ours.send(None)
    server.join()
    table: Figures = {}
    for name, measured in found.items():
        kept = [measurement.figures() for measurement in measured[1:]]
        table[name] = {
            key: statistics.median(measurement[key] for measurement in kept) for key in kept[0]
        }
    result = {
        "benchmark": "stream",
        "measures": "rows of a stand-in engine through server and client, each a process",
        "device": f"CPU, {platform.machine()}",
        **circumstances(),
        "width": _WIDTH,
        "dtype": "bfloat16",
        "prompt_tokens": _PROMPT,
        "repeats": arguments.repeats,
        "arms": {name: {**load._asdict(), "way": way} for name, (load, way) in arms.items()},
        "summary": table,
        "seconds": {name: [one.seconds for one in kept[1:]] for name, kept in found.items()},
    }
    (arguments.out / "stream.json").write_text(json.dumps(result, indent=1))
    print(f"{'':40}{'GiB/s':>9}{'rows/s':>11}{'us/row':>9}{'client':>9}{'server':>9}")
    for name, row in table.items():
        print(
            f"{name:40}{row['gib_per_s']:9.2f}{row['rows_per_s']:11.0f}{row['us_per_row']:9.1f}"
            f"{row['client_cpu_us_per_row']:9.1f}{row['server_cpu_us_per_row']:9.1f}"
        )


def _sized(load: Load, way: str) -> Load:
    longer = way != "loopback" and load.tokens == 1
    return load._replace(requests=load.requests * _LONGER) if longer else load


if __name__ == "__main__":
    main()
