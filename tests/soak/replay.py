"""The stress run of `tests/integration/server/replaying.py`, with many seeds.

    python -m tests.soak.replay --seeds 12
    python -m tests.soak.replay --seeds 4 --compiled
    python -m tests.soak.replay --seeds 6 --out results

Each seed is a round of concurrent sessions whose rows are compared with those of the same tokens
alone. Prints a line per round; exits 1 if a row is wrong, missing or doubled, or if the server
holds something at the end. With a folder, writes `replay.json`, or `replay-compiled.json`.

A compiled round has no LoRA adapters: on a CPU, vLLM does not compile a model that has them.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import rheostat
from rheostat_bench.machine import Model, described
from rheostat_bench.served_process import faults, served_process
from rheostat_bench.soak import gauges, left_over
from rheostat_server.engine.vllm_engine import DEMO_MODEL
from tests.integration.server.adapters import write_adapter
from tests.integration.server.replaying import Verdict, play

ADAPTERS = ("ada", "bob")


def options(*, compiled: bool) -> list[str]:
    """A KV cache for four long samples at a time, and steps that cut prompts in pieces."""
    return [
        "--dtype=float32",
        "--max-model-len=512",
        "--max-num-seqs=32",
        "--max-num-batched-tokens=96",
        "--kv-cache-memory-mib=6",
        "--bank-mib=4",
        "--capture-mib=16",
        *([] if compiled else ["--enforce-eager"]),
    ]


def main() -> None:
    """Runs the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=12, help="how many rounds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--compiled", action="store_true", help="torch.compile instead of eager")
    parser.add_argument("--out", type=Path, help="a folder, for the result")
    arguments = parser.parse_args()
    problems: list[str] = []
    rounds: dict[int, Verdict] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        log = scratch / "log"
        names = () if arguments.compiled else ADAPTERS
        adapters = [
            f"--lora={name}={write_adapter(scratch / name, seed)}"
            for seed, name in enumerate(names)
        ]
        started = options(compiled=arguments.compiled)
        with served_process("demo", log, [*started, *adapters]) as server:
            with rheostat.connect(server.target) as engine:
                info = engine.model().engine
            if info.compiled != arguments.compiled:
                sys.exit(f"the engine's compiled is {info.compiled}: this would test another one")
            before = gauges(server.target)
            for seed in range(arguments.first, arguments.first + arguments.seeds):
                verdict = rounds[seed] = asyncio.run(play(server.target, seed, names))
                print(f"seed {seed}: {summary(verdict)}", flush=True)
                problems += [f"seed {seed}: {one}" for one in verdict.problems()]
            left = left_over(server.target, before)
            problems += [f"{name} is {more:+d} at the end" for name, more in left.items() if more]
            problems += [f"log: {line}" for line in faults(log)]
    for problem in problems:
        print(problem)
    if arguments.out is not None:
        result = {
            "benchmark": "replay",
            "measures": "rows of requests under stress beside those of the same tokens alone",
            **described(Model("demo", DEMO_MODEL, "float32", "auto"), info.runner),
            "compiled": info.compiled,
            "options": started,
            "seconds": time.monotonic() - began,
            "sums": sums(list(rounds.values())),
            "rounds": {seed: figures(verdict) for seed, verdict in rounds.items()},
            "problems": problems,
        }
        arguments.out.mkdir(parents=True, exist_ok=True)
        name = "replay-compiled" if arguments.compiled else "replay"
        (arguments.out / f"{name}.json").write_text(json.dumps(result, indent=1))
    sys.exit(bool(problems))


def figures(verdict: Verdict) -> dict[str, float]:
    """The numbers of a round."""
    return {name: value for name, value in verdict._asdict().items() if name != "examples"}


def sums(verdicts: Sequence[Verdict]) -> dict[str, float]:
    """The numbers of all rounds together; of `largest` the largest."""
    rounds = [figures(verdict) for verdict in verdicts]
    return {
        name: (max if name == "largest" else sum)(one[name] for one in rounds) for name in rounds[0]
    }


def summary(verdict: Verdict) -> str:
    """A line about a round."""
    return (
        f"{verdict.compared} rows, {verdict.wrong} wrong, {verdict.missing} missing, "
        f"{verdict.doubled} doubled; apart by {verdict.largest:.1e} of their norm at most; "
        f"{verdict.updates} updates, {verdict.preemptions} preemptions, "
        f"{verdict.attached} samples joined late, {verdict.replaced} replaced, "
        f"{verdict.gated} gated, {verdict.undecided} rows undecided"
    )


if __name__ == "__main__":
    main()
