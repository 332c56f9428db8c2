"""Random calls of runs, sweeps, the lens and attribution, on a server with a scripted engine.

    python -m tests.soak.tracing --calls 20000
    python -m tests.soak.tracing --calls 20000 --front-ends 2
    python -m tests.soak.tracing --calls 1 --seed 3 --first 4711

A call depends only on the seed and its number, so the third line repeats call 4711. Prints how
the calls ended. Exits 1 if a call ended otherwise than it should, or if the server holds something
at the end. `tests/unit/server/test_tracing_fuzz.py` makes the first of these calls, with the same
checks.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path

from rheostat_bench.calls import connect
from rheostat_bench.machine import circumstances
from rheostat_server.config import ServerConfig
from rheostat_server.engine.backend import Backend
from rheostat_server.serve import start
from tests.unit.server.conftest import Client, Running
from tests.unit.server.tracing_calls import JitteryBackend, calls
from tests.unit.server.tracing_fuzz import Outcome, play


async def run(seed: int, first: int, count: int, front_ends: int) -> Outcome:
    """Plays calls of a seed on a server of their own."""
    backend = JitteryBackend()

    async def bring_up(_: ServerConfig) -> Backend:
        return backend

    config = ServerConfig(model="toy", port=0, drain_grace=5.0, front_ends=front_ends)
    server = await start(config, bring_up)
    try:
        async with connect(f"127.0.0.1:{server.port}") as channel:
            running = Running(server, backend, Client(channel))
            return await play(running, calls(seed, count, first))
    finally:
        await server.stop(0)


def report(outcome: Outcome, seed: int, count: int, seconds: float) -> dict[str, object]:
    """What came of a run, for its JSON."""
    kinds = Counter[str]()
    for name, number in outcome.ends.items():
        _, kind, end = name.split(" ", 2)
        kinds[f"{kind} {'OK' if end == 'OK' else 'cut' if kind == 'cut' else 'refused'}"] += number
    return {
        "benchmark": "random calls of causal tracing",
        **circumstances(),
        "seed": seed,
        "calls": count,
        "seconds": round(seconds, 1),
        "cells": outcome.cells,
        "ends": dict(sorted(kinds.items())),
        "ends_by_method": dict(sorted(outcome.ends.items())),
        "problems": outcome.problems,
    }


def main() -> None:
    """Plays the calls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first call")
    parser.add_argument("--front-ends", type=int, default=0, help="of the server")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    arguments = parser.parse_args()
    began = time.monotonic()
    outcome = asyncio.run(
        run(arguments.seed, arguments.first, arguments.calls, arguments.front_ends)
    )
    found = report(outcome, arguments.seed, arguments.calls, time.monotonic() - began)
    text = json.dumps(found, indent=1)
    if arguments.out is not None:
        arguments.out.write_text(f"{text}\n", encoding="utf-8")
    print(text)
    sys.exit(bool(outcome.problems))


if __name__ == "__main__":
    main()
