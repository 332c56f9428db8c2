"""The longest waits of a client for its tokens, beside a hostile client.

The benchmark starts a real server, `rheostat serve`, with a model of 36 layers that computes next
to nothing. One client, the neighbour, streams greedy generations without a pause and times each
token. A hostile client, with the lowest CPU priority, runs one scenario after the other.

Two turns are controls: there is no other client; or a process that never calls the server uses all
the CPU time that it can get.

A first token waits for prompts that came before. `queue_record` says how long, and the table has
the whole wait and the rest. `misses` lists the promises.

    rheostat bench isolation --out results
    rheostat bench isolation --out results --only "long stop texts" --seconds 5
"""

import argparse
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import rheostat
from rheostat_bench.abuse import Target
from rheostat_bench.calls import Caller, Outcome, calling, expected
from rheostat_bench.machine import Model, described
from rheostat_bench.neighbour import Heard, Job, Neighbour, neighbouring
from rheostat_bench.processes import Worker
from rheostat_bench.scenarios import SCENARIOS, Scenario, prepared
from rheostat_bench.served_process import (
    ALLOWED_GROWTH,
    MEMORY,
    MIB,
    Memory,
    ServedProcess,
    cpu_elsewhere,
    cpu_stolen,
    faults,
    memory_options,
    served_process,
    write_model,
)
from rheostat_bench.summaries import Figures, percentile
from rheostat_engine.adapters import queue_record

BAR_MS = 250.0
"""Milliseconds that the neighbour may wait for a token."""
NOBODY = "nobody else"
BUSY = "a busy process"
"""The names of the controls."""

_CONTEXT = 8192
"""Tokens. At the end of a context of 16,384, attention alone made steps of plain prompts as long as
`BAR_MS` on two cores."""
_STEP_TOKENS = 192
_SAMPLES = 160
_JOB = Job(("The Eiffel Tower is in the city of",), 16, None)
"""The neighbour's request, which it repeats. It has few tokens, so that a turn has several first
tokens.

It captures nothing, because a request that captures may have to wait for capture rows of earlier
requests, as the contract says.
"""
_SETTLED = 1.0
"""Seconds for which the neighbour is timed after the last hostile call has ended."""
_QUIET = 60.0
"""Seconds within which the server must be idle again before the next turn."""
_STOLEN = 0.02
"""Cores that the host may take back in a turn; above, the turn is repeated. In a turn of 12 s this
is a quarter of a second, as long as the longest wait that is allowed."""
_REPEATS = 5
"""How often a turn is repeated because the host took back CPU."""
_MOST_MEMORY = 12 << 30
"""Bytes of memory above which the server is stopped, to protect the machine."""


class Turn(NamedTuple):
    """The measurements of one scenario or control."""

    heard: Heard
    outcome: Outcome
    idle: Memory
    """The memory before the first call."""
    peak: Memory
    faults: int
    """Lines of the server's log that report a defect."""
    died: bool
    """Whether the server ended; the next turn has a new one."""
    elsewhere: float = 0.0
    """Cores that were used by processes outside of the benchmark."""
    stolen: float = 0.0
    """Cores that the host gave to other machines although this one wanted them."""
    behind: Mapping[str, float] = MappingProxyType({})
    """Seconds for which requests of the neighbour waited for earlier prompts, by request id."""

    def figures(self) -> dict[str, float]:
        """The figures for the table."""
        heard, outcome = self.heard, self.outcome
        rests = [
            wait - self.behind.get(request_id, 0.0)
            for wait, request_id in zip(heard.firsts, heard.first_requests, strict=True)
        ]
        return {
            "longest_ms": 1000 * heard.longest,
            "longest_gap_ms": 1000 * max(heard.gaps, default=0.0),
            "p99_ms": 1000 * percentile(heard.gaps, 0.99),
            "median_ms": 1000 * percentile(heard.gaps, 0.5),
            "first_token_longest_ms": 1000 * max(heard.firsts, default=0.0),
            "first_token_rest_longest_ms": 1000 * max(rests, default=0.0),
            "tokens_per_s": heard.tokens / heard.seconds,
            "ping_longest_ms": 1000 * max(heard.pings, default=0.0),
            "failed": sum(heard.failures.values()),
            "unexpected": sum(n for label, n in outcome.endings.items() if not expected(label)),
            "memory_mib": self.peak.total / MIB,
            "memory_growth_mib": max(0.0, (self.peak.total - self.idle.total) / MIB),
            "calls_per_s": outcome.calls / outcome.seconds,
            "sent_mib": outcome.nbytes / MIB,
            "caller_cpu": outcome.cpu / outcome.seconds,
            "cores_elsewhere": self.elsewhere,
            "cores_stolen": self.stolen,
            "faults": self.faults,
            "died": float(self.died),
        }


def options(scratch: Path, front_ends: int = 0) -> list[str]:
    """The arguments of the server."""
    return [
        "--load-format=dummy",
        "--dtype=float32",
        "--enforce-eager",
        f"--max-model-len={_CONTEXT}",
        f"--max-num-seqs={_SAMPLES}",
        f"--max-num-batched-tokens={_STEP_TOKENS}",
        *memory_options(),
        f"--sink=disk=filesystem:root={scratch / 'sink'}",
        f"--spool={scratch / 'spool'}",
        "--resume-window=2",
        f"--front-ends={front_ends}",
    ]


class _Stage:
    """A server, the neighbour and the hostile client. A server that dies is replaced."""

    def __init__(self, model: Path, scratch: Path, front_ends: int) -> None:
        self._model = model
        self._scratch = scratch
        self._front_ends = front_ends
        self._starts = 0
        self._stack = ExitStack()
        self._begin()

    def close(self) -> None:
        self._stack.close()

    def info(self) -> rheostat.ModelInfo:
        with rheostat.connect(self._server.target) as engine:
            return engine.model()

    def quiet_turn(self, scenario: Scenario | str, seconds: float) -> Turn:
        """Runs a scenario or a control, and again if the host took back CPU meanwhile.

        Returns the turn that lost the least. A turn in which the server died counts as it is.
        """
        turn = self.turn(scenario, seconds)
        for _ in range(_REPEATS):
            if turn.stolen <= _STOLEN or turn.died:
                break
            print(f"    again: the host took back {turn.stolen:.2f} cores", flush=True)
            turn = min(turn, self.turn(scenario, seconds), key=lambda one: one.stolen)
        return turn

    def turn(self, scenario: Scenario | str, seconds: float) -> Turn:
        """Runs a scenario or a control."""
        self._wait_until_quiet()
        if isinstance(scenario, Scenario):
            calls = partial(prepared, scenario.name, self._facts, seed=0)
            self._caller.do(partial(Caller.prepare, calls=calls))
            order = partial(
                Caller.run, at_once=scenario.at_once, seconds=seconds, pause=scenario.pause
            )
        else:
            order = partial(Caller.burn, seconds=seconds)
        logged = self._server.log.stat().st_size
        self._server.take_peak()
        idle = self._server.memory()
        since, others, stolen = self._neighbour.do(Neighbour.now), cpu_elsewhere(), cpu_stolen()
        if scenario == NOBODY:
            time.sleep(seconds)
            outcome = Outcome(0, 0, {}, {}, seconds, 0.0)
        else:
            outcome = self._watched(order)
            self._wait_until_quiet()
        time.sleep(_SETTLED)
        heard = self._neighbour.do(partial(Neighbour.heard, since=since))
        elsewhere = max(0.0, cpu_elsewhere() - others) / heard.seconds
        stolen = (cpu_stolen() - stolen) / heard.seconds
        lines = faults(self._server.log, logged)
        turn = Turn(
            heard,
            outcome,
            idle,
            self._server.take_peak(),
            len(lines),
            self._server.died,
            elsewhere,
            stolen,
            queue_record.read(self._queue),
        )
        for line in lines[:3]:
            print(f"    log: {line[:160]}", flush=True)
        if turn.died:
            self._stack.close()
            self._begin()
        return turn

    def _watched(self, order: Callable[[Caller], Awaitable[Outcome]]) -> Outcome:
        """Runs the hostile client; stops the server if it takes too much memory."""
        self._caller.send(order)
        while not self._caller.has_result(0.2):
            if self._server.memory().total > _MOST_MEMORY:
                self._server.stop()
        outcome: Outcome = self._caller.result()
        return outcome

    def _wait_until_quiet(self) -> None:
        """Waits until only the neighbour's request runs."""
        deadline = time.monotonic() + _QUIET
        while time.monotonic() < deadline:
            try:
                with rheostat.connect(self._server.target) as engine:
                    stats = engine.stats()
                if stats.running_request_count <= 1 and not stats.waiting_request_count:
                    return
            except rheostat.RheostatError:
                if self._server.died:
                    return
            time.sleep(0.2)

    def _begin(self) -> None:
        self._starts += 1
        scratch = self._scratch / str(self._starts)
        scratch.mkdir()
        self._queue = scratch / "queue"
        self._stack = stack = ExitStack()
        self._server: ServedProcess = stack.enter_context(
            served_process(
                str(self._model),
                scratch / "log",
                options(scratch, self._front_ends),
                queue=self._queue,
            )
        )
        target = self._server.target
        self._neighbour: Worker[Neighbour] = stack.enter_context(
            Worker(partial(neighbouring, target))
        )
        self._caller: Worker[Caller] = stack.enter_context(Worker(partial(calling, target)))
        with rheostat.connect(target) as engine:
            served = engine.model()
        vocabulary = served.vocabulary_size
        self._facts = Target(served.layer_count, served.width, vocabulary, _CONTEXT, "disk")
        self._neighbour.do(partial(Neighbour.start, job=_JOB, check=False))


def all_turns() -> list[Scenario | str]:
    """All turns: the controls, then the scenarios."""
    return [NOBODY, BUSY, *SCENARIOS]


def summary(turns: dict[str, Turn]) -> Figures:
    """The figures of each turn."""
    return {name: turn.figures() for name, turn in turns.items()}


def misses(table: Figures) -> list[str]:
    """The broken promises, each with its scenario.

    `BAR_MS` holds between two tokens. From a first token's wait, the steps that were full of
    earlier prompts are subtracted; `BAR_MS` holds for the rest. Controls are not checked, because
    their waits are those of the machine.
    """
    found = []
    for scenario in SCENARIOS:
        row = table.get(scenario.name)
        if row is None:
            continue
        if row["longest_gap_ms"] > BAR_MS:
            found.append(f"{scenario.name}: {row['longest_gap_ms']:.0f} ms between tokens")
        rest = row["first_token_rest_longest_ms"]
        if rest > BAR_MS:
            found.append(f"{scenario.name}: {rest:.0f} ms for a first token")
        if row["memory_growth_mib"] > ALLOWED_GROWTH / MIB:
            found.append(f"{scenario.name}: {row['memory_growth_mib']:.0f} MiB more")
        for broken in ("failed", "unexpected", "faults", "died"):
            if row[broken]:
                found.append(f"{scenario.name}: {broken} {row[broken]:.0f}")
    return found


def main() -> None:
    """Measures, prints a table and writes `isolation.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for isolation.json")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each turn")
    parser.add_argument("--only", action="append", help="a scenario; may be repeated")
    parser.add_argument("--front-ends", type=int, default=0, help="of the server")
    parser.add_argument("--name", default="isolation", help="of the file, without .json")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    chosen = [
        one
        for one in all_turns()
        if not arguments.only or (one if isinstance(one, str) else one.name) in arguments.only
    ]
    turns: dict[str, Turn] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = write_model(scratch)
        stage = _Stage(model, scratch, arguments.front_ends)
        try:
            info = stage.info()
            for scenario in chosen:
                name = scenario if isinstance(scenario, str) else scenario.name
                turns[name] = turn = stage.quiet_turn(scenario, arguments.seconds)
                _show(name, turn)
        finally:
            stage.close()
    table = summary(turns)
    about = Model("tiny-36", model, "float32", "dummy")
    result = {
        "benchmark": "isolation",
        "measures": "how long a client waits for a token beside a hostile one",
        **described(about, info.engine.runner),
        "bar_ms": BAR_MS,
        "seconds": arguments.seconds,
        "options": options(Path("SCRATCH"), arguments.front_ends),
        "memory_flags_mib": MEMORY,
        "summary": table,
        "misses": misses(table),
        "answers": {
            name: {
                "endings": turn.outcome.endings,
                "sentences": {k: v[:300] for k, v in turn.outcome.sentences.items() if v},
                "neighbour_failures": turn.heard.failures,
            }
            for name, turn in turns.items()
        },
        "gaps_ms": {
            name: [round(1000 * gap, 1) for gap in sorted(turn.heard.gaps)[-20:]]
            for name, turn in turns.items()
        },
    }
    (arguments.out / f"{arguments.name}.json").write_text(json.dumps(result, indent=1))
    for line in result["misses"]:
        print(f"missed: {line}")


def _show(name: str, turn: Turn) -> None:
    row = turn.figures()
    print(
        f"{name:34}{row['longest_gap_ms']:8.0f} ms longest{row['p99_ms']:7.0f} p99"
        f"{row['tokens_per_s']:6.0f} tokens/s{row['first_token_longest_ms']:8.0f} ms first"
        f" ({row['first_token_rest_longest_ms']:.0f})"
        f"{row['ping_longest_ms']:8.0f} ms ping{row['memory_growth_mib']:7.0f} MiB more"
        f"{row['calls_per_s']:8.1f} calls/s{row['caller_cpu']:5.0%} cpu"
        f"{row['cores_elsewhere']:5.1f} cores elsewhere{row['cores_stolen']:6.2f} stolen"
        f"  {turn.heard.failures or ''}{' DIED' * turn.died}",
        flush=True,
    )
    for ending, number in turn.outcome.endings.items():
        print(
            f"    {number:6} {ending}: {turn.outcome.sentences.get(ending, '')[:150]}", flush=True
        )


if __name__ == "__main__":
    main()
