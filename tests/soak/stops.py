"""Rules that stop, at random bounds on a real server: nothing withheld reaches a client.

    python -m tests.soak.stops --trials 10000 --out stops.json
    python -m tests.soak.stops --trials 5000 --async-scheduling --out stops-async.json
    python -m tests.soak.stops --trials 500 --seed 0 --first 4000    # a piece of it

A trial is drawn from the seed and its number; see `tests/integration/server/stop_trials.py`. With
`--async-scheduling`, the engine runs ahead as on a GPU; see `async_server.py`. Prints how the
trials ended. Exits 1 if a client got something that a stop withholds, or did not get all else, if
the server holds something at the end, or if its log reports a defect.
`tests/integration/server/test_stop_trials.py` makes the first 100 of these trials, without async
scheduling. With a file that holds the figures of other pieces, adds this piece to it.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc

import rheostat
from rheostat_bench.machine import circumstances
from rheostat_bench.served_process import faults, served_process
from tests.integration.server.monitoring_fuzz import held
from tests.integration.server.stop_trials import Found, play
from tests.soak.async_server import PROGRAM

_OPTIONS = [
    "--dtype=float32",
    "--max-model-len=512",
    "--max-num-seqs=32",
    "--kv-cache-memory-mib=128",
    "--resume-window=3",
    "--enforce-eager",
]


def report(
    found: Found, arguments: argparse.Namespace, seconds: float, steps: dict[str, int] | None
) -> dict[str, Any]:
    """What came of a piece, for its JSON.

    Args:
        found: what came.
        arguments: of the command line.
        seconds: how long it took.
        steps: of an engine with async scheduling.
    """
    about = circumstances()
    commit = about.pop("commit")
    return {
        "benchmark": "rules that stop, on a real engine",
        **about,
        "options": _OPTIONS,
        "async_scheduling": arguments.async_scheduling,
        "seed": arguments.seed,
        "trials_by_commit": {commit: arguments.trials},
        "trials": arguments.trials,
        "pieces": [[arguments.first, arguments.trials]],
        "seconds": round(seconds, 1),
        **({"engine": steps} if steps else {}),
        "counts": dict(sorted(found.counts.items())),
        "withheld_tokens": found.withheld,
        "problems": found.problems,
    }


def added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The figures of two pieces together."""
    sums = ("trials", "pieces", "withheld_tokens", "problems")
    counts = {
        key: {name: one[key].get(name, 0) + other[key].get(name, 0) for name in names}
        for key in ("counts", "trials_by_commit", "engine")
        if key in other
        for names in [sorted({*one[key], *other[key]})]
    }
    seconds = round(one["seconds"] + other["seconds"], 1)
    return {**other, **counts, **{key: one[key] + other[key] for key in sums}, "seconds": seconds}


def main() -> None:
    """Makes the trials."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first trial")
    parser.add_argument("--async-scheduling", action="store_true", help="as on a GPU")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    arguments = parser.parse_args()
    began = time.monotonic()
    numbers = range(arguments.first, arguments.first + arguments.trials)
    with tempfile.TemporaryDirectory() as folder:
        log, steps = Path(folder) / "log", Path(folder) / "steps.json"
        program = ["-c", PROGRAM, str(steps)] if arguments.async_scheduling else ["-m", "rheostat"]
        with served_process("demo", log, _OPTIONS, program=program) as server:
            with rheostat.connect(server.target) as engine:
                found = play(engine, arguments.seed, numbers)
            with grpc.insecure_channel(server.target) as channel:
                found.problems.extend(held(channel))
            found.problems.extend(f"log: {line}" for line in faults(log))
        counted = json.loads(steps.read_text(encoding="utf-8")) if steps.exists() else None
    if arguments.async_scheduling and not (counted and counted["ahead"]):
        found.problems.append("no step was scheduled ahead")
    piece = report(found, arguments, time.monotonic() - began, counted)
    if arguments.out is not None:
        whole = piece
        if arguments.out.exists():
            whole = added(json.loads(arguments.out.read_text(encoding="utf-8")), piece)
        arguments.out.write_text(f"{json.dumps(whole, indent=1)}\n", encoding="utf-8")
    print(json.dumps(piece, indent=1))
    sys.exit(bool(found.problems))


if __name__ == "__main__":
    main()
