"""Thousands of hostile and ordinary calls at random, beside a client that checks its answers.

A soak passes if the server ends as it began. Nothing is held for a request that is gone, no line of
the log is a defect, every call ended with a status of the contract, and the neighbour got its own
text and its own rows each time.

    python -m rheostat_server.bench.soak --out results
    python -m rheostat_server.bench.soak --out results --calls 2000 --seed 7
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import grpc

import rheostat
from rheostat._proto.v1 import engine_service_pb2, engine_service_pb2_grpc
from rheostat_server.bench.abuse import Target
from rheostat_server.bench.calls import Call, Caller, Outcome, calling, expected
from rheostat_server.bench.isolation import BAR_MS
from rheostat_server.bench.machine import Model, described
from rheostat_server.bench.neighbour import Heard, Job, Neighbour, neighbouring
from rheostat_server.bench.processes import Worker
from rheostat_server.bench.scenarios import SCENARIOS
from rheostat_server.bench.served_process import (
    ALLOWED_GROWTH,
    MEMORY,
    MIB,
    Memory,
    faults,
    memory_options,
    served_process,
)
from rheostat_server.bench.summaries import percentile

AT_ONCE = 16
"""Calls that are open at a time."""
CHUNK = 250
"""Calls that are prepared at a time."""
JOB = Job(
    (
        "The Eiffel Tower is in the city of",
        "My day was",
        "Once there was a small boat that",
    ),
    40,
    rheostat.Capture("resid_post", layers=[1, 4]),
)
"""What the neighbour does."""
HELD = (
    "running_request_count",
    "waiting_request_count",
    "used_bank_row_count",
    "subscription_count",
    "run_count",
    "run_bytes",
    "spooled_row_count",
    "leaked_count",
)
"""Gauges of GetStats that must be at the end what they were at the beginning."""
SIZES = (0.001, 0.004, 0.02, 0.08)
"""Sizes of the hostile calls; 1 is as much as the contract ever allowed."""
_RELEASED = 60.0
"""Seconds that the server gets to release what the last calls held."""
_NAMES = "hostile/"


class Soaked(NamedTuple):
    """What came of a soak."""

    outcome: Outcome
    heard: Heard
    left: Mapping[str, int]
    """By gauge: how much more the server holds than before."""
    faults: Sequence[str]
    """Lines of the log that a sound server does not write."""

    def problems(self) -> list[str]:
        """What a sound server would not have done; empty: it passed."""
        found = [f"{name} is {more:+d} at the end" for name, more in self.left.items() if more]
        found += [f"log: {line}" for line in self.faults]
        for label, number in self.outcome.endings.items():
            if not expected(label):
                sentence = self.outcome.sentences.get(label, "")
                found.append(f"{number} calls ended with {label}: {sentence}")
        if self.heard.different_texts:
            found.append(f"{self.heard.different_texts} texts of the neighbour's are others")
        if self.heard.different_rows:
            found.append(f"{self.heard.different_rows} answers of the neighbour's have other rows")
        found += [f"{n} times the neighbour got {name}" for name, n in self.heard.failures.items()]
        if not self.heard.generations:
            found.append("no generation of the neighbour's has ended")
        return found


def mixture(target: Target, seed: int, start: int, count: int) -> list[Call]:
    """Calls `start` to `start + count` of the mixture; equal seeds give equal ones."""
    return list(_mixture(target, seed, start, count))


def _mixture(target: Target, seed: int, start: int, count: int) -> Iterator[Call]:
    for number in range(start, start + count):
        rng = random.Random(f"{seed} {number}")
        yield rng.choice(SCENARIOS).make(target, rng, rng.choice(SIZES))


def soak(
    target: str, facts: Target, log: Path, calls: int, seed: int, *, verbose: bool = False
) -> Soaked:
    """Makes the calls on a server that nobody else uses.

    Args:
        target: where it listens.
        facts: what the calls must fit.
        log: the server's log.
        calls: how many.
        seed: of the mixture.
        verbose: whether to print how far it is.
    """
    before = gauges(target)
    logged = log.stat().st_size
    outcomes = []
    with (
        Worker(partial(neighbouring, target)) as neighbour,
        Worker(partial(calling, target)) as caller,
    ):
        neighbour.do(partial(Neighbour.start, job=JOB))
        since = neighbour.do(Neighbour.now)
        for start in range(0, calls, CHUNK):
            chunk = partial(mixture, facts, seed, start, min(CHUNK, calls - start))
            caller.do(partial(Caller.prepare, calls=chunk))
            outcomes.append(caller.do(partial(Caller.run, at_once=AT_ONCE, seconds=None)))
            if verbose:
                rate = outcomes[-1].calls / outcomes[-1].seconds
                print(f"{start + outcomes[-1].calls} calls, {rate:.0f} per second", flush=True)
        time.sleep(1.0)
        heard = neighbour.do(partial(Neighbour.heard, since=since))
        neighbour.do(Neighbour.close)
        _clean_up(target)
        left = left_over(target, before)
    return Soaked(_joined(outcomes), heard, left, faults(log, logged))


def _stats(target: str) -> engine_service_pb2.GetStatsResponse:
    with grpc.insecure_channel(target) as channel:
        stub = engine_service_pb2_grpc.EngineServiceStub(channel)
        return stub.GetStats(engine_service_pb2.GetStatsRequest(), timeout=120)


def gauges(target: str) -> dict[str, int]:
    """What a server holds now."""
    stats = _stats(target)
    return {name: int(getattr(stats, name)) for name in HELD}


def _clean_up(target: str) -> None:
    """Takes back what calls were allowed to leave behind: names, runs, server-wide steering."""
    with rheostat.connect(target, timeout=120) as engine:
        engine.steering.set_global(None)
        for run in engine.runs():
            engine.delete_run(run.id)
        for info in engine.vectors.list(_NAMES):
            engine.vectors.delete(info.vector.name or "")


def left_over(target: str, before: Mapping[str, int]) -> dict[str, int]:
    """How much more the server holds than before, once it has had time to release it."""
    deadline = time.monotonic() + _RELEASED
    while True:
        now = gauges(target)
        left = {name: now[name] - before[name] for name in HELD}
        if not any(left.values()) or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def _joined(outcomes: Sequence[Outcome]) -> Outcome:
    endings: Counter[str] = Counter()
    sentences: dict[str, str] = {}
    for one in outcomes:
        endings.update(one.endings)
        sentences = {**one.sentences, **sentences}
    return Outcome(
        sum(one.calls for one in outcomes),
        sum(one.nbytes for one in outcomes),
        dict(endings.most_common()),
        sentences,
        sum(one.seconds for one in outcomes),
        sum(one.cpu for one in outcomes),
    )


def options(scratch: Path) -> list[str]:
    """What the server is started with."""
    return [
        "--dtype=float32",
        "--enforce-eager",
        "--max-model-len=1024",
        "--max-num-seqs=64",
        "--max-num-batched-tokens=256",
        *memory_options(),
        f"--sink=disk=filesystem:root={scratch / 'sink'}",
        f"--spool={scratch / 'spool'}",
        "--resume-window=2",
    ]


def main() -> None:
    """Soaks a server of its own, prints what was wrong and writes `soak.json`.

    If the server's log has a fault, the log is kept as `soak.log`.

    Ends with status 1 if something was wrong. A token that came late is reported alone, because
    other work on the machine delays tokens too.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for soak.json")
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        log = scratch / "log"
        with served_process("demo", log, options(scratch)) as server:
            facts, info = _facts(server.target)
            idle = server.memory()
            server.take_peak()
            found = soak(server.target, facts, log, arguments.calls, arguments.seed, verbose=True)
            peak = server.take_peak()
        if found.faults:
            shutil.copy(log, arguments.out / "soak.log")
    problems = found.problems() + _too_much_memory(idle, peak)
    heard = found.heard
    result = {
        "benchmark": "soak",
        "measures": "a client that checks its answers beside thousands of hostile calls",
        **described(Model("demo", Path("demo"), "float32", "auto"), info.engine.runner),
        "cores": os.cpu_count(),
        "calls": found.outcome.calls,
        "seed": arguments.seed,
        "seconds": found.outcome.seconds,
        "bar_ms": BAR_MS,
        "options": options(Path("SCRATCH")),
        "memory_flags_mib": MEMORY,
        "neighbour": {
            "longest_ms": 1000 * heard.longest,
            "p99_ms": 1000 * percentile(heard.gaps, 0.99),
            "median_ms": 1000 * percentile(heard.gaps, 0.5),
            "over_bar": sum(1000 * gap > BAR_MS for gap in heard.gaps),
            "first_token_longest_ms": 1000 * max(heard.firsts, default=0.0),
            "tokens": heard.tokens,
            "generations": heard.generations,
            "different_texts": heard.different_texts,
            "different_rows": heard.different_rows,
        },
        "memory_mib": {"idle": idle.total / MIB, "peak": peak.total / MIB},
        "left": dict(found.left),
        "endings": found.outcome.endings,
        "sentences": {k: v[:300] for k, v in found.outcome.sentences.items() if v},
        "problems": problems,
    }
    (arguments.out / "soak.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result["neighbour"], indent=1))
    for line in problems:
        print(f"problem: {line}")
    sys.exit(bool(problems))


def _facts(target: str) -> tuple[Target, rheostat.ModelInfo]:
    with rheostat.connect(target) as engine:
        info = engine.model()
    limits = info.limits
    return Target(
        info.layer_count, info.width, info.vocabulary_size, limits.model_tokens, "disk"
    ), info


def _too_much_memory(idle: Memory, peak: Memory) -> list[str]:
    grown = peak.total - idle.total
    if grown <= ALLOWED_GROWTH:
        return []
    allowed = ALLOWED_GROWTH / MIB
    return [f"the server took {grown / MIB:.0f} MiB more; its flags allow {allowed:.0f}"]


if __name__ == "__main__":
    main()
