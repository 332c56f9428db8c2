"""Thousands of hostile and ordinary calls at random, beside two clients that check their answers.

The soak starts a real server, `rheostat serve`, with a model of 36 layers that computes next to
nothing. The model is compiled, as by default: uncompiled, Python would take most of a step. One
client streams greedy generations and times each token. Another client captures rows. A soak passes
if the server ends as it began:

* No row, buffer, descriptor or thread is held for a request that has ended.
* The engine lost no row: the rows that it is asked for always find room.
* No log line reports a defect, and every call ended with a status of the contract.
* Both clients got the same tokens and rows as from an idle server.
* Memory stayed within the server's flags.
* The timed client waited at most `BAR_MS` for each token after the first.

    rheostat bench soak --out results
    rheostat bench soak --out results --control
    rheostat bench soak --out results --seed 7 --first 4000 --calls 250

The control makes as many calls, with the same prompt lengths, samples and tokens, as many at a
time, but nothing in them is hostile. A wait that the control has too is the price of honest work.
If the host takes cores away, tokens come later; a wait counts if it would be above the bar even
without the time that the host took from all cores (`own_over_bar`).

A call depends on the seed and its number alone. The third line therefore replays a piece of a run
whose report names call 4100.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import grpc

import rheostat
from rheostat_bench.abuse import Target
from rheostat_bench.calls import Call, Caller, Outcome, calling, expected
from rheostat_bench.isolation import BAR_MS
from rheostat_bench.machine import Model, described
from rheostat_bench.neighbour import Heard, Job, Neighbour, neighbouring
from rheostat_bench.processes import Worker
from rheostat_bench.scenarios import SCENARIOS, honest
from rheostat_bench.served_process import (
    ALLOWED_GROWTH,
    MEMORY,
    MIB,
    Handles,
    Memory,
    cpu_elsewhere,
    cpu_stolen,
    faults,
    handles,
    memory_options,
    served_process,
    write_model,
)
from rheostat_bench.summaries import percentile
from rheostat_wire.v1 import engine_service_pb2, engine_service_pb2_grpc

AT_ONCE = 16
"""Calls that are open at a time."""
CHUNK = 250
"""Calls that are prepared at a time."""
_PROMPTS = (
    "The Eiffel Tower is in the city of",
    "My day was",
    "Once there was a small boat that",
)
STREAMING = Job(_PROMPTS, 64, None)
"""What the timed client asks for. It captures nothing, because a request that captures waits in
turn for the capture rows that others hold."""
CAPTURING = Job(_PROMPTS, 24, rheostat.Capture("resid_post", layers=[1, 4]))
"""What the client asks for that compares rows."""
HELD = (
    "running_request_count",
    "waiting_request_count",
    "used_bank_row_count",
    "subscription_count",
    "run_count",
    "run_bytes",
    "spooled_row_count",
    "request_buffer_bytes",
    "subscription_buffer_bytes",
    "leaked_count",
)
"""Gauges of GetStats that may not be more at the end than at the beginning. Runs may be less: their
leases end."""
MORE_HANDLES = Handles(descriptors=256, threads=64)
"""How many more a server may have at the end: files that sinks keep open, and threads of pools,
which start when they are first needed. A leak of one for every hundred calls exceeds them."""
SIZES = (0.001, 0.004, 0.02, 0.08)
"""Sizes of the hostile calls; 1 is as much as the contract ever allowed."""
_RELEASED = 60.0
"""Seconds that the server gets to release what the last calls held."""
_NAMES = "hostile/"


class Served(NamedTuple):
    """A server that only this benchmark uses."""

    target: str
    """Where it listens."""
    log: Path
    pid: int
    facts: Target
    """What calls must fit."""


class Chunk(NamedTuple):
    """Calls that were prepared together."""

    first: int
    """The first call's number."""
    heard: Heard
    """What the timed client measured meanwhile."""

    def figures(self) -> dict[str, float]:
        """The figures of the chunk. A slow ping means that the server's loop was slow too."""
        gaps, firsts, pings = (
            [1000 * wait for wait in waits]
            for waits in (self.heard.gaps, self.heard.firsts, self.heard.pings)
        )
        return {
            "first": self.first,
            "longest_ms": max(gaps, default=0.0),
            "p99_ms": percentile(gaps, 0.99),
            "first_token_longest_ms": max(firsts, default=0.0),
            "over_bar": sum(wait > BAR_MS for wait in gaps),
            "own_over_bar": sum(1000 * gap > BAR_MS for gap in self.heard.own_gaps),
            "ping_longest_ms": max(pings, default=0.0),
        }


class Soaked(NamedTuple):
    """What came of a soak."""

    outcome: Outcome
    streaming: Heard
    """Of the timed client."""
    capturing: Heard
    """Of the client that compares rows."""
    left: Mapping[str, int]
    """By gauge: how much more the server holds than before."""
    more: Handles
    """How many more it has open than before."""
    faults: Sequence[str]
    """Lines of the log that a sound server does not write."""
    chunks: Sequence[Chunk] = ()

    def late(self) -> list[str]:
        """Tokens that came later than the bar allows, by the server's own fault.

        Of the timed client alone: the other client's requests wait in turn for capture rows.
        """
        over = [1000 * gap for gap in self.streaming.own_gaps if 1000 * gap > BAR_MS]
        if not over:
            return []
        return [
            f"the streaming client: {len(over)} waits between tokens above {BAR_MS:.0f} ms; "
            f"the longest took {max(over):.0f} ms"
        ]

    def problems(self) -> list[str]:
        """What a sound server would not have done, apart from `late`; empty: it passed."""
        found = [f"{name} is {more:+d} at the end" for name, more in self.left.items() if more > 0]
        found += [
            f"{more:+d} {name} at the end"
            for name, more in self.more._asdict().items()
            if more > getattr(MORE_HANDLES, name)
        ]
        found += [f"log: {line}" for line in self.faults]
        for label, number in self.outcome.endings.items():
            if not expected(label):
                sentence = self.outcome.sentences.get(label, "")
                found.append(f"{number} calls ended with {label}: {sentence}")
        for client, heard in (("streaming", self.streaming), ("capturing", self.capturing)):
            found += [f"the {client} client: {error}" for error in _wrong(heard)]
        return found


def _wrong(heard: Heard) -> Iterator[str]:
    if heard.different_texts:
        yield f"{heard.different_texts} other texts than on a quiet server"
    if heard.different_rows:
        yield f"{heard.different_rows} answers with other rows"
    for name, number in heard.failures.items():
        yield f"{number} times {name}"
    if not heard.generations:
        yield "no generation has ended"


def mixture(
    target: Target, seed: int, first: int, count: int, *, control: bool = False
) -> list[Call]:
    """Calls `first` to `first + count` of the mixture, each named after its number and scenario.

    Args:
        target: what the calls must fit.
        seed: of the mixture.
        first: the first call's number.
        count: how many calls.
        control: makes only the engine's work of each call.
    """
    calls = _mixture(target, seed, first, count)
    if not control:
        return list(calls)
    return [honest(call, target, random.Random(f"{seed} {call.name}")) for call in calls]


def _mixture(target: Target, seed: int, first: int, count: int) -> Iterator[Call]:
    for number in range(first, first + count):
        rng = random.Random(f"{seed} {number}")
        scenario = rng.choice(SCENARIOS)
        call = scenario.make(target, rng, rng.choice(SIZES))
        yield replace(call, name=f"call {number} ({scenario.name})")


def soak(
    server: Served,
    calls: int,
    seed: int,
    *,
    first: int = 0,
    control: bool = False,
    verbose: bool = False,
) -> Soaked:
    """Makes calls `first` to `first + calls` of the mixture.

    Args:
        server: gets them.
        calls: how many.
        seed: of the mixture.
        first: the first call's number.
        control: makes only the engine's work of each call.
        verbose: whether to print how far it is.
    """
    before = gauges(server.target)
    logged = server.log.stat().st_size
    outcomes, chunks = [], []
    with (
        Worker(partial(neighbouring, server.target)) as streaming,
        Worker(partial(neighbouring, server.target)) as capturing,
        Worker(partial(calling, server.target)) as caller,
    ):
        for client, job in ((streaming, STREAMING), (capturing, CAPTURING)):
            client.do(partial(Neighbour.learn, job=job))
        opened = handles(server.pid)
        for client in (streaming, capturing):
            client.do(Neighbour.stream)
        since = streaming.do(Neighbour.now)
        for start in range(first, first + calls, CHUNK):
            count = min(CHUNK, first + calls - start)
            made = partial(mixture, server.facts, seed, start, count, control=control)
            caller.do(partial(Caller.prepare, calls=made))
            began = streaming.do(Neighbour.now)
            outcomes.append(caller.do(partial(Caller.run, at_once=AT_ONCE, seconds=None)))
            heard = streaming.do(partial(Neighbour.heard, since=began))
            chunks.append(Chunk(start, heard))
            if verbose:
                _show(start + count, outcomes[-1], chunks[-1])
        time.sleep(1.0)
        heard, others = (
            client.do(partial(Neighbour.heard, since=since)) for client in (streaming, capturing)
        )
        for client in (streaming, capturing):
            client.do(Neighbour.close)
        _clean_up(server.target)
        left = left_over(server.target, before)
        now = handles(server.pid)
    more = Handles(now.descriptors - opened.descriptors, now.threads - opened.threads)
    return Soaked(_joined(outcomes), heard, others, left, more, faults(server.log, logged), chunks)


def _show(done: int, outcome: Outcome, chunk: Chunk) -> None:
    odd = {label: n for label, n in outcome.endings.items() if not expected(label)}
    figures = chunk.figures()
    print(
        f"until call {done}: {outcome.calls / outcome.seconds:.0f} calls per second, "
        f"at most {figures['longest_ms']:.0f} ms between tokens, "
        f"{figures['first_token_longest_ms']:.0f} ms for a first token and "
        f"{figures['ping_longest_ms']:.0f} ms for a ping {odd or ''}",
        flush=True,
    )


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
    for outcome in outcomes:
        endings.update(outcome.endings)
        sentences = {**outcome.sentences, **sentences}
    return Outcome(
        sum(outcome.calls for outcome in outcomes),
        sum(outcome.nbytes for outcome in outcomes),
        dict(endings.most_common()),
        sentences,
        sum(outcome.seconds for outcome in outcomes),
        sum(outcome.cpu for outcome in outcomes),
    )


def options(scratch: Path, front_ends: int = 0) -> list[str]:
    """What the server is started with."""
    return [
        "--load-format=dummy",
        "--dtype=float32",
        "--max-model-len=1024",
        "--max-num-seqs=64",
        "--max-num-batched-tokens=192",
        *memory_options(),
        f"--sink=disk=filesystem:root={scratch / 'sink'}",
        f"--spool={scratch / 'spool'}",
        "--resume-window=2",
        f"--front-ends={front_ends}",
        # As vLLM runs a worker on one GPU. Its default on a CPU keeps a second core spinning.
        "--distributed-executor-backend=vllm.v1.executor.uniproc_executor.UniProcExecutor",
    ]


def main() -> None:
    """Soaks a server of its own, prints what was wrong and writes `soak.json`.

    If something was wrong, the server's log is kept as `soak.log`.

    Ends with status 1 if something was wrong. A token that came late counts, except in the control,
    whose waits are the price of honest work. So run a soak on a machine that does nothing else.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for soak.json")
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first call's number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--front-ends", type=int, default=0, help="of the server")
    parser.add_argument("--control", action="store_true", help="nothing in the calls is hostile")
    parser.add_argument("--name", help="of the file, without .json; soak, or soak-control")
    arguments = parser.parse_args()
    name = arguments.name or ("soak-control" if arguments.control else "soak")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        log, model = scratch / "log", write_model(scratch)
        with served_process(str(model), log, options(scratch, arguments.front_ends)) as server:
            facts, info = _facts(server.target)
            served = Served(server.target, log, server.pid, facts)
            idle, began = server.memory(), time.monotonic()
            others, stolen = cpu_elsewhere(), cpu_stolen()
            server.take_peak()
            found = soak(
                served,
                arguments.calls,
                arguments.seed,
                first=arguments.first,
                control=arguments.control,
                verbose=True,
            )
            seconds = time.monotonic() - began
            elsewhere = (cpu_elsewhere() - others) / seconds
            stolen = (cpu_stolen() - stolen) / seconds
            peak = server.take_peak()
            stats = _stats(server.target)
        problems = found.problems() + _too_much_memory(idle, peak)
        if stats.overrun_row_count:
            problems.append(f"the engine lost {stats.overrun_row_count} rows")
        if not arguments.control:
            problems += found.late()
        if problems:
            shutil.copy(log, arguments.out / f"{name}.log")
    result = {
        "benchmark": "soak, control" if arguments.control else "soak",
        "measures": "clients that check their answers beside thousands of "
        + ("plain calls" if arguments.control else "hostile calls"),
        **described(Model("tiny-36", model, "float32", "dummy"), info.engine.runner),
        "cores_elsewhere": elsewhere,
        "cores_stolen": stolen,
        "calls": found.outcome.calls,
        "first": arguments.first,
        "seed": arguments.seed,
        "seconds": found.outcome.seconds,
        "bar_ms": BAR_MS,
        "options": options(Path("SCRATCH"), arguments.front_ends),
        "memory_flags_mib": MEMORY,
        "streaming": _figures(found.streaming),
        "capturing": _figures(found.capturing),
        "chunks": [chunk.figures() for chunk in found.chunks],
        "memory_mib": {
            "idle": idle.total / MIB,
            "peak": peak.total / MIB,
            "allowed": (idle.total + ALLOWED_GROWTH) / MIB,
        },
        "rows": {
            "captured": stats.captured_row_count,
            "lost_in_the_engine": stats.overrun_row_count,
            "dropped_for_readers": stats.dropped_row_count,
        },
        "left": dict(found.left),
        "more_open": found.more._asdict(),
        "endings": found.outcome.endings,
        "sentences": {k: v[:300] for k, v in found.outcome.sentences.items() if v},
        "problems": problems,
    }
    (arguments.out / f"{name}.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result["streaming"], indent=1))
    for line in problems:
        print(f"problem: {line}")
    sys.exit(bool(problems))


def _figures(heard: Heard) -> dict[str, float]:
    return {
        "longest_ms": 1000 * max(heard.gaps, default=0.0),
        "p99_9_ms": 1000 * percentile(heard.gaps, 0.999),
        "p99_ms": 1000 * percentile(heard.gaps, 0.99),
        "median_ms": 1000 * percentile(heard.gaps, 0.5),
        "over_bar": sum(1000 * gap > BAR_MS for gap in heard.gaps),
        "own_longest_ms": 1000 * max(heard.own_gaps, default=0.0),
        "own_over_bar": sum(1000 * gap > BAR_MS for gap in heard.own_gaps),
        "first_tokens_over_bar": sum(1000 * gap > BAR_MS for gap in heard.firsts),
        "first_token_p99_ms": 1000 * percentile(heard.firsts, 0.99),
        "first_token_longest_ms": 1000 * max(heard.firsts, default=0.0),
        "tokens": heard.tokens,
        "generations": heard.generations,
        "different_texts": heard.different_texts,
        "different_rows": heard.different_rows,
        "failed": sum(heard.failures.values()),
    }


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
