"""The stress run of `tests/integration/server/replaying.py`, with many seeds.

    python -m tests.soak.replay --seeds 12
    python -m tests.soak.replay --seeds 4 --compiled

Each seed is a round of concurrent sessions whose rows are compared with those of the same tokens
alone. Prints a line per round; exits 1 if a row is wrong, missing or doubled, or if the server
holds something at the end.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

import rheostat
from rheostat_bench.served_process import faults, served_process
from rheostat_bench.soak import gauges, left_over
from tests.integration.server.adapters import write_adapter
from tests.integration.server.replaying import Verdict, play

ADAPTERS = ("ada", "bob")


def options(scratch: Path, *, compiled: bool) -> list[str]:
    """A KV cache for four long samples at a time, and steps that cut prompts in pieces."""
    folders = {name: write_adapter(scratch / name, seed) for seed, name in enumerate(ADAPTERS)}
    return [
        "--dtype=float32",
        "--max-model-len=512",
        "--max-num-seqs=32",
        "--max-num-batched-tokens=96",
        "--kv-cache-memory-mib=6",
        "--bank-mib=4",
        "--capture-mib=16",
        *([] if compiled else ["--enforce-eager"]),
        *(f"--lora={name}={folder}" for name, folder in folders.items()),
    ]


def main() -> None:
    """Runs the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=12, help="how many rounds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--compiled", action="store_true", help="torch.compile instead of eager")
    arguments = parser.parse_args()
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        log = scratch / "log"
        started = options(scratch, compiled=arguments.compiled)
        with served_process("demo", log, started) as server:
            with rheostat.connect(server.target) as engine:
                print(f"compiled: {engine.model().engine.compiled}", flush=True)
            before = gauges(server.target)
            for seed in range(arguments.first, arguments.first + arguments.seeds):
                verdict = asyncio.run(play(server.target, seed, ADAPTERS))
                print(f"seed {seed}: {summary(verdict)}", flush=True)
                problems += [f"seed {seed}: {one}" for one in verdict.problems()]
            left = left_over(server.target, before)
            problems += [f"{name} is {more:+d} at the end" for name, more in left.items() if more]
            problems += [f"log: {line}" for line in faults(log)]
    for problem in problems:
        print(problem)
    sys.exit(bool(problems))


def summary(verdict: Verdict) -> str:
    """A line about a round."""
    return (
        f"{verdict.compared} rows, {verdict.wrong} wrong, {verdict.missing} missing, "
        f"{verdict.doubled} doubled; apart by {verdict.largest:.1e} of their norm at most; "
        f"{verdict.updates} updates, {verdict.preemptions} preemptions, "
        f"{verdict.attached} samples joined late"
    )


if __name__ == "__main__":
    main()
