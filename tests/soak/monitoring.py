"""Random calls of gates, rules, gains and watches on a real server, beside a neighbour.

    python -m tests.soak.monitoring --calls 20000 --out monitoring-fuzz.json
    python -m tests.soak.monitoring --calls 500 --seed 0 --first 4000    # a piece of it

A call depends only on the seed and its number. Prints how the calls ended. Exits 1 if a call ended
otherwise than it should, if the server holds something at the end, if its log reports a defect, or
if the neighbour, who streams the same greedy generation over and over, got other tokens.
`tests/integration/server/test_fuzz_monitoring.py` makes the first of these calls. With a file that
holds the figures of other pieces, adds this piece to it.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rheostat_bench.machine import circumstances
from rheostat_bench.served_process import served_process
from tests.integration.server.hostile_monitoring import attempts
from tests.integration.server.monitoring_fuzz import Outcome, play

_OPTIONS = [
    "--dtype=float32",
    "--max-model-len=512",
    "--max-num-seqs=32",
    "--kv-cache-memory-mib=128",
    "--resume-window=3",
    "--enforce-eager",
]


def report(outcome: Outcome, seed: int, first: int, count: int, seconds: float) -> dict[str, Any]:
    """What came of a piece, for its JSON."""
    about = circumstances()
    commit = about.pop("commit")
    return {
        "benchmark": "random calls of gates, rules, gains and watches",
        **about,
        "options": _OPTIONS,
        "seed": seed,
        "calls_by_commit": {commit: count},
        "calls": count,
        "pieces": [[first, count]],
        "seconds": round(seconds, 1),
        "neighbour_streams": outcome.neighbour_streams,
        "ends": dict(sorted(outcome.ends.items())),
        "problems": outcome.problems,
    }


def added(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The figures of two pieces together."""
    counts = {
        key: {name: one[key].get(name, 0) + other[key].get(name, 0) for name in names}
        for key in ("ends", "calls_by_commit")
        for names in [sorted({*one[key], *other[key]})]
    }
    return {
        **other,
        **counts,
        **{key: one[key] + other[key] for key in ("calls", "pieces", "seconds", "problems")},
        "neighbour_streams": one["neighbour_streams"] + other["neighbour_streams"],
    }


def main() -> None:
    """Plays the calls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first call")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with served_process("demo", log, _OPTIONS) as server:
            drawn = attempts(arguments.seed, arguments.calls, arguments.first)
            outcome = play(server.target, log, drawn, arguments.first)
    seconds = time.monotonic() - began
    found = report(outcome, arguments.seed, arguments.first, arguments.calls, seconds)
    if arguments.out is not None:
        whole = found
        if arguments.out.exists():
            whole = added(json.loads(arguments.out.read_text(encoding="utf-8")), found)
        arguments.out.write_text(f"{json.dumps(whole, indent=1)}\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    sys.exit(bool(outcome.problems))


if __name__ == "__main__":
    main()
