"""CPU time that a server takes for a token and for a request, by thread and by function.

The arms are those of `sidebyside`. A server's throughput has an end where one of its threads is
busy all the time. Two workloads: streams of `--tokens` tokens, and requests of one token that begin
together. Functions are those of the main thread, which runs the event loop; see `sampled_server`.

    rheostat bench costs --shape qwen3-8b --front-ends 1 --out results
"""

import argparse
import json
import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rheostat_bench.machine import add_model_arguments, chosen, described, server_config
from rheostat_bench.processes import Worker
from rheostat_bench.served import add_client_argument, prompts
from rheostat_bench.served_process import copy_tokenizer, process_tree, served_process
from rheostat_bench.sidebyside import (
    ARMS,
    Run,
    runs_of_server,
    server_flags,
    store_vectors,
    streaming,
)
from rheostat_bench.watching import watching

_PROMPT = 32
_LEAST_SHARE = 0.005
"""Share of the main thread's time from which on a function is listed."""
_WRITTEN = 30.0
"""Seconds that a server has to write its samples."""
MAIN = "server, main thread"
"""The thread whose functions are sampled."""


class ThreadTime(NamedTuple):
    """A thread and the CPU time that it has taken."""

    process: str
    """What the process is: the server, a front end, or the name that vLLM gives it."""
    main: bool
    """Whether it is the main thread of its process."""
    seconds: float


class Costs(NamedTuple):
    """The figures of one arm and workload."""

    per_s: list[float]
    """Tokens, or requests, in a second, of each turn."""
    cores: dict[str, float]
    """Cores that each kind of thread is busy on."""
    us: dict[str, float]
    """The same time, in microseconds for each token, or request."""
    functions_us: dict[str, float]
    """Microseconds of the server's main thread in a function and in functions that it calls."""
    functions_alone_us: dict[str, float]
    """The same without functions that are listed themselves."""


class Samples:
    """What a server samples of its functions."""

    def __init__(self, pid: int, folder: Path) -> None:
        """Reads what the process writes into the folder."""
        self._pid = pid
        self._folder = folder
        self._read = 0

    def take(self) -> Mapping[str, Any]:
        """The samples since the last call; see `sampled_server.shares`.

        Raises:
            TimeoutError: the server has not written them.
        """
        os.kill(self._pid, signal.SIGUSR1)
        path = self._folder / f"samples-{self._read}.json"
        deadline = time.monotonic() + _WRITTEN
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the server has not written its samples")
            time.sleep(0.01)
        self._read += 1
        found: Mapping[str, Any] = json.loads(path.read_text())
        return found


def thread_times(root: int) -> dict[int, ThreadTime]:
    """The threads of a process and all its descendants, by id."""
    ticks = os.sysconf("SC_CLK_TCK")
    times = {}
    for pid in process_tree(root):
        with suppress(OSError):
            process = "server" if pid == root else _name(pid)
            for task in os.listdir(f"/proc/{pid}/task"):
                stat = Path(f"/proc/{pid}/task/{task}/stat").read_text().rpartition(")")[2].split()
                seconds = (int(stat[11]) + int(stat[12])) / ticks
                times[int(task)] = ThreadTime(process, int(task) == pid, seconds)
    return times


def _name(pid: int) -> str:
    """What a descendant of the server is."""
    if b"front_ends" in Path(f"/proc/{pid}/cmdline").read_bytes():
        return "front ends"
    return Path(f"/proc/{pid}/comm").read_text().strip()


def taken(before: Mapping[int, ThreadTime], after: Mapping[int, ThreadTime]) -> dict[str, float]:
    """Seconds of CPU between two moments, by kind of thread, the largest first.

    Args:
        before: the threads at the first moment.
        after: the threads at the second one. Threads that are new took all their time between.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for thread, now in after.items():
        earlier = before[thread].seconds if thread in before else 0.0
        kind = f"{now.process}, {'main thread' if now.main else 'other threads'}"
        if now.seconds > earlier:
            seconds[kind] += now.seconds - earlier
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


class Workload(NamedTuple):
    """Requests that begin together."""

    requests: int
    tokens: int
    """Tokens of each."""


def measure(run: Run, server: Samples, pid: int, load: Workload, turns: int) -> Costs:
    """Times some turns of an arm, after a first turn that is not counted.

    Args:
        run: the arm.
        server: samples of the server's functions.
        pid: the server's process.
        load: a turn. If its requests have one token, the costs are those of a request.
        turns: turns.
    """
    run(prompts(load.requests, _PROMPT), load.tokens)
    server.take()
    before, began = thread_times(pid), time.monotonic()
    speeds = [run(prompts(load.requests, _PROMPT), load.tokens).tokens_per_s for _ in range(turns)]
    seconds, used = time.monotonic() - began, taken(before, thread_times(pid))
    shares, count = server.take(), turns * load.requests * load.tokens
    us = {kind: value / count * 1e6 for kind, value in used.items()}
    return Costs(
        per_s=speeds,
        cores={kind: value / seconds for kind, value in used.items()},
        us=us,
        functions_us=_listed(shares["with_callees"], us[MAIN]),
        functions_alone_us=_listed(shares["alone"], us[MAIN]),
    )


def _listed(shares: Mapping[str, float], us: float) -> dict[str, float]:
    return {name: share * us for name, share in shares.items() if share >= _LEAST_SHARE}


def main() -> None:
    """Measures, prints the figures and writes `costs-SHAPE-N.json` for N front ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser, default="qwen3-8b")
    add_client_argument(parser)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for the JSON")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--requests", type=int, default=1024, help="of one token, that begin together"
    )
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--front-ends", type=int, default=1)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    loads = {
        "token": Workload(arguments.streams, arguments.tokens),
        "request": Workload(arguments.requests, 1),
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        scratch = Path(folder)
        model = chosen(arguments, scratch)
        if model.load_format == "dummy":
            copy_tokenizer(model.path)
        config = server_config(model, engines=1, requests=arguments.streams)
        # Rows that a subscriber reads too slowly wait in the spool.
        config = replace(config, skip_tokenizer_init=False, spool=str(scratch / "spool"))
        flags = server_flags(config, arguments.front_ends)
        name = f"costs-{model.name}-{arguments.front_ends}"
        log = arguments.out / f"{name}.log"
        server = stack.enter_context(served_process(str(config.model), log, flags, samples=scratch))
        served = store_vectors(server.target)
        watcher = stack.enter_context(Worker(partial(watching, server.target)))
        client = partial(streaming, server.target, served.layer_count // 2)
        clients = [stack.enter_context(Worker(client)) for _ in range(arguments.client_processes)]
        runs = runs_of_server("", clients, watcher, served, arguments.arms)
        samples = Samples(server.pid, scratch)
        costs: dict[str, dict[str, Costs]] = {arm: {} for arm in arguments.arms}
        for arm, run in zip(arguments.arms, runs.values(), strict=True):
            for unit, load in loads.items():
                found = measure(run, samples, server.pid, load, arguments.turns)
                costs[arm][unit] = found
                show(arm, unit, found)
        about = {
            "benchmark": "costs",
            "measures": "CPU time of the server for each token, and for each request of one token",
            **described(model, served.engine.runner),
            "streams": arguments.streams,
            "tokens": arguments.tokens,
            "requests": arguments.requests,
            "front_ends": arguments.front_ends,
            "turns": arguments.turns,
        }
        by_arm = {
            arm: {unit: figures._asdict() for unit, figures in by_unit.items()}
            for arm, by_unit in costs.items()
        }
        text = json.dumps({**about, "arms": by_arm}, indent=1)
        (arguments.out / f"{name}.json").write_text(text)


_SHOWN = 40
"""Functions that are printed."""


def show(arm: str, unit: str, costs: Costs) -> None:
    """Prints the figures of an arm and workload."""
    speeds = ", ".join(f"{speed:.0f}" for speed in costs.per_s)
    print(f"\n{arm}: {speeds} {unit}s/s")
    for kind, value in costs.us.items():
        print(f"  {value:7.1f} us per {unit} {costs.cores[kind]:6.2f} cores  {kind}")
    functions: Sequence[tuple[str, float]] = [*costs.functions_us.items()][:_SHOWN]
    for name, value in functions:
        alone = costs.functions_alone_us.get(name, 0.0)
        print(f"  {value:7.1f} us, {alone:7.1f} alone  {name}")


if __name__ == "__main__":
    main()
