"""What a subscriber costs the requests that it watches, when it reads and when it stands still.

64 clients generate without a pause, on the demo model in a server of its own. The arms take turns:
nobody watches; a subscriber reads every row of a layer; one reads nothing for the whole turn, and
rows that find no room are lost, or wait on disk. Server, clients and subscriber are a process each.

    python -m rheostat_server.bench.stalled --out results
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal, NamedTuple

import rheostat
from rheostat_server.bench.summaries import Figures
from rheostat_server.config import ServerConfig
from rheostat_server.serve import start

_SPAWNED = multiprocessing.get_context("spawn")

_CLIENTS = 64
_PROMPT = 32
_TOKENS = 32
_BUFFER = 64 << 20
_CREDIT = 1 << 20
"""Bytes that a subscriber that reads nothing lets come."""


class Arm(NamedTuple):
    """Who watches."""

    name: str
    reads: bool | None
    """Whether the subscriber reads; None: there is none."""
    overload: Literal["drop_newest", "spill"] = "drop_newest"


ARMS = (
    Arm("nobody watches", None),
    Arm("reads", True),
    Arm("stands still, rows are lost", False),
    Arm("stands still, rows wait on disk", False, "spill"),
)
"""What is measured."""


class Turn(NamedTuple):
    """What came of an arm's turn."""

    seconds: float
    tokens: int
    """Of requests that ended in it."""
    longest: float
    """Seconds that the longest of them took."""
    lost_rows: int
    """Rows of which a reader was told that they are lost."""
    waiting_rows: int
    """Rows that waited on disk at the end."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def _serve(told: Connection, spool: str) -> None:
    """The server's process: says its port, ends when it is told anything."""

    async def main() -> None:
        config = ServerConfig(
            model="demo",
            port=0,
            max_num_seqs=_CLIENTS,
            max_model_len=256,
            enforce_eager=True,
            kv_cache_memory_bytes=128 << 20,
            spool=spool,
            drain_grace=1.0,
        )
        server = await start(config)
        told.send(server.port)
        with suppress(EOFError):
            await asyncio.to_thread(told.recv)
        await server.stop()

    asyncio.run(main())


def _watch(told: Connection, target: str, arm: Arm) -> None:
    """The subscriber's process: says that it stands, ends when it is told anything."""
    with (
        rheostat.connect(target) as engine,
        engine.subscribe(
            every=True,
            capture=rheostat.Capture("resid_post", layers=3),
            overload=arm.overload,
            buffer_bytes=_BUFFER,
            credit=64 << 20 if arm.reads else _CREDIT,
        ) as subscription,
    ):
        told.send(True)
        while arm.reads and not told.poll():
            next(subscription)
        with suppress(EOFError):
            told.recv()


@contextmanager
def _watched(target: str, arm: Arm) -> Iterator[None]:
    if arm.reads is None:
        yield
        return
    ours, theirs = _SPAWNED.Pipe()
    watcher = _SPAWNED.Process(target=_watch, args=(theirs, target, arm), daemon=True)
    watcher.start()
    ours.recv()
    yield
    ours.send(None)
    watcher.join(5)
    watcher.kill()
    watcher.join()


async def _ask(target: str, seconds: float) -> Turn:
    """Requests of all clients for so long; those that are under way at the end do not count."""
    tokens, longest = 0, 0.0
    over = False

    async def client(number: int) -> None:
        nonlocal tokens, longest
        while not over:
            began = time.perf_counter()
            await engine.generate(
                [5 + number] * _PROMPT, max_tokens=_TOKENS, temperature=0, ignore_eos=True
            )
            if not over:
                tokens += _TOKENS
                longest = max(longest, time.perf_counter() - began)

    async with rheostat.aio.connect(target) as engine:
        before = await engine.stats()
        began = time.perf_counter()
        clients = [asyncio.create_task(client(number)) for number in range(_CLIENTS)]
        await asyncio.sleep(seconds)
        over, took = True, time.perf_counter() - began
        await asyncio.gather(*clients)
        after = await engine.stats()
    lost = after.dropped_rows - before.dropped_rows
    return Turn(took, tokens, longest, lost, after.spooled_rows)


def summary(turns: Sequence[Sequence[Turn]]) -> Figures:
    """Of each arm, in the order of `ARMS`: medians, the spread, and beside nobody's."""
    idle = statistics.median(turn.rate for turn in turns[0])
    table: Figures = {}
    for arm, mine in zip(ARMS, turns, strict=True):
        rates = [turn.rate for turn in mine]
        table[arm.name] = {
            "tokens_per_s": statistics.median(rates),
            "lowest": min(rates),
            "highest": max(rates),
            "percent": 100 * statistics.median(rates) / idle,
            "longest_request_s": max(turn.longest for turn in mine),
        }
    return table


def main() -> None:
    """Measures, prints a table and writes `stalled.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for stalled.json")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each turn")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    turns: list[list[Turn]] = [[] for _ in ARMS]
    with tempfile.TemporaryDirectory() as spool:
        ours, theirs = _SPAWNED.Pipe()
        server = _SPAWNED.Process(target=_serve, args=(theirs, spool))
        server.start()
        target = f"127.0.0.1:{ours.recv()}"
        asyncio.run(_ask(target, min(10.0, arguments.seconds)))
        for _ in range(arguments.repeats):
            for arm, mine in zip(ARMS, turns, strict=True):
                with _watched(target, arm):
                    mine.append(asyncio.run(_ask(target, arguments.seconds)))
                print(f"{arm.name:32}{mine[-1].rate:9.0f} tokens/s", flush=True)
        ours.send(None)
        server.join()
    result = {
        "benchmark": "stalled",
        "measures": "64 clients beside a subscriber that reads or stands still, each a process",
        "device": f"CPU, {platform.machine()}, {os.cpu_count()} cores",
        "model": "demo",
        "clients": _CLIENTS,
        "prompt_tokens": _PROMPT,
        "tokens": _TOKENS,
        "seconds": arguments.seconds,
        "repeats": arguments.repeats,
        "buffer_bytes": _BUFFER,
        "arms": {arm.name: arm._asdict() for arm in ARMS},
        "summary": summary(turns),
        "turns": {
            arm.name: [turn._asdict() for turn in mine]
            for arm, mine in zip(ARMS, turns, strict=True)
        },
    }
    (arguments.out / "stalled.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
