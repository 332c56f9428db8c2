"""Cancelled sweeps: how soon the server holds nothing any more.

A client cancels a sweep after a random number of its cells, at a random moment. The server's
process then looks every millisecond whether something is still held: first the server's requests
and runs, then the workers' bank rows and slots, last vLLM's blocks of the KV cache. A time reaches
from the client's cancellation to the first look that finds nothing, so it is an upper bound.

    rheostat bench cancel --out results
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import rheostat
from rheostat_bench.machine import add_model_arguments, chosen, described, server_config
from rheostat_bench.processes import Worker
from rheostat_bench.served import address, connected, serving
from rheostat_bench.sweep_clients import new_prompts, pair_of
from rheostat_server.engine.vllm_backend import VllmBackend
from rheostat_server.serve import RunningServer

BAR_MS = 200.0
"""Within which everything should be free."""
_LOOK = 0.001
"""Seconds between two looks."""
_PATIENCE = 30.0
"""Seconds after which a trial has failed."""
_TOKENS = 40
"""Of a prompt."""
_CELLS = 64
"""Cells after which a sweep is cancelled, at most."""
_SOON = 0.02
"""Seconds after the last of these cells, at most."""
_REQUESTS = 64
"""Requests that the server runs at the same time; more if `--concurrency` is larger."""


class Freed(NamedTuple):
    """When nothing was held any more, by the clock of all processes, in seconds."""

    requests: float
    """No request of the server, and no run."""
    rows: float
    """No bank row and no slot of a worker."""
    blocks: float
    """No block of the KV cache."""


class Trial(NamedTuple):
    """Times from a cancellation on, in milliseconds."""

    cells: int
    """Cells that the client had."""
    requests_ms: float
    rows_ms: float
    blocks_ms: float


async def until_free(server: RunningServer) -> Freed:
    """An order: waits until a server that runs a sweep holds nothing."""
    manager = server.readiness.manager()
    backend = cast("VllmBackend", manager.backend)
    async with asyncio.timeout(_PATIENCE):
        # A sweep that has a cell keeps its runs to its end.
        while manager.open_requests or manager.ledger.requests or len(manager.runs):
            await asyncio.sleep(_LOOK)
        requests = time.monotonic()
        while (stats := await backend.worker_stats()).bank_rows_used or stats.slots_used:
            await asyncio.sleep(_LOOK)
        rows = time.monotonic()
        # vLLM empties its prefix cache only if no request has a block.
        while not await backend._llm.reset_prefix_cache():
            await asyncio.sleep(_LOOK)
        return Freed(requests, rows, time.monotonic())


async def trial(
    engine: rheostat.aio.Engine, server: Worker[RunningServer], at_once: int, rng: random.Random
) -> Trial:
    """One sweep, which is cancelled."""
    wanted, came = rng.randint(1, _CELLS), 0
    enough = asyncio.Event()

    def count(done: int, total: int) -> None:
        nonlocal came
        came = done
        if done >= wanted:
            enough.set()

    sweep = engine.sweep(
        pair_of(new_prompts(_TOKENS)),
        points=["resid_post", "attn_out", "mlp_out"],
        concurrency=at_once,
        progress=count,
        watch=False,
    )
    running: asyncio.Task[object] = asyncio.create_task(sweep)
    # It may end early, such as with an error.
    running.add_done_callback(lambda _: enough.set())
    async with asyncio.timeout(_PATIENCE):
        await enough.wait()
    await _check_running(running)
    server.send(until_free)
    await asyncio.sleep(rng.random() * _SOON)
    await _check_running(running)
    cancelled = time.monotonic()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    freed: Freed = await asyncio.to_thread(server.result)
    return Trial(came, *(1e3 * (moment - cancelled) for moment in freed))


async def _check_running(sweep: asyncio.Task[object]) -> None:
    """Raises the error of a sweep, or RuntimeError if it is over."""
    if sweep.done():
        await sweep
        raise RuntimeError("a sweep was over before it was cancelled")


async def measure(
    target: str, server: Worker[RunningServer], at_once: int, trials: int
) -> list[Trial]:
    """Warms up with one trial, then measures all trials of a concurrency."""
    rng = random.Random(at_once)
    async with connected(target) as engine:
        return [await trial(engine, server, at_once, rng) for _ in range(1 + trials)][1:]


def summary(trials: Sequence[Trial]) -> dict[str, dict[str, float]]:
    """Median, ninth decile and largest of each time, and how many trials kept the bar."""
    table = {}
    for name in ("requests_ms", "rows_ms", "blocks_ms"):
        times = sorted(getattr(one, name) for one in trials)
        table[name] = {
            "median": statistics.median(times),
            "p90": times[int(0.9 * (len(times) - 1))],
            "max": times[-1],
            "within_bar": float(sum(one <= BAR_MS for one in times)),
        }
    return table


def main() -> None:
    """Measures, prints a table and writes `cancel.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser, default=None)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for cancel.json")
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--front-ends", type=int, help="of the server")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = chosen(arguments, Path(scratch))
        requests = max(_REQUESTS, *arguments.concurrency)
        config = server_config(model, engines=1, requests=requests, front_ends=arguments.front_ends)
        with Worker(partial(serving, config), parent=True) as server:
            target = server.do(address)
            with rheostat.connect(target) as client:
                served = client.model()
            measured = {
                str(at_once): asyncio.run(measure(target, server, at_once, arguments.trials))
                for at_once in arguments.concurrency
            }
    result = {
        "benchmark": "cancel",
        "measures": "milliseconds from the cancellation of a sweep until nothing is held",
        **described(model, served.engine.runner),
        "compiled": served.engine.compiled,
        "prompt_tokens": _TOKENS,
        "bar_ms": BAR_MS,
        "requests": requests,
        "trials": arguments.trials,
        "summary": {at_once: summary(trials) for at_once, trials in measured.items()},
        "turns": {
            at_once: [one._asdict() for one in trials] for at_once, trials in measured.items()
        },
    }
    (arguments.out / "cancel.json").write_text(json.dumps(result, indent=1))
    for at_once, table in result["summary"].items():
        for name, row in table.items():
            figures = ", ".join(f"{key} {value:.1f}" for key, value in row.items())
            print(f"{at_once:>4} at once  {name:12} {figures}")


if __name__ == "__main__":
    main()
