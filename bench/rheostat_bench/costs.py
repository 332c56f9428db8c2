"""CPU time that each process and thread of a server takes for a token, while clients stream.

The arms are those of `sidebyside`. A server's throughput has an end where one of its threads is
busy all the time. With `--py-spy`, py-spy also records the functions of each busy process, in
further turns: a file of stacks for each arm and process, beside the JSON.

    rheostat bench costs --shape qwen3-8b --front-ends 1 --out results
    rheostat bench costs --shape qwen3-8b --front-ends 1 --out results --py-spy $(which py-spy)
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

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
_BUSY = 0.1
"""Share of a core from which on a process is profiled."""
_SECONDS = 8
"""Seconds of a profile."""
_RATE = 400
"""Samples of a profile in a second."""


class ThreadTime(NamedTuple):
    """A thread and the CPU time that it has taken."""

    process: str
    """What the process is: the server, a front end, or the name that vLLM gives it."""
    main: bool
    """Whether it is the main thread of its process."""
    seconds: float


class Costs(NamedTuple):
    """The figures of one arm."""

    tokens_per_s: list[float]
    """Of each turn."""
    cores: dict[str, float]
    """Cores that each kind of thread is busy on."""
    us_per_token: dict[str, float]
    """The same time, in microseconds for each token."""


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


def measure(run: Run, pid: int, streams: int, tokens: int, turns: int) -> Costs:
    """Times some turns of an arm.

    Args:
        run: the arm.
        pid: the server's process.
        streams: streams of a turn.
        tokens: tokens of a stream.
        turns: turns.
    """
    run(prompts(streams, _PROMPT), tokens)
    before, began = thread_times(pid), time.monotonic()
    speeds = [run(prompts(streams, _PROMPT), tokens).tokens_per_s for _ in range(turns)]
    seconds, used = time.monotonic() - began, taken(before, thread_times(pid))
    count = turns * streams * tokens
    return Costs(
        tokens_per_s=speeds,
        cores={kind: value / seconds for kind, value in used.items()},
        us_per_token={kind: value / count * 1e6 for kind, value in used.items()},
    )


def profile(run: Run, pid: int, streams: int, tokens: int, py_spy: Path, out: Path) -> None:
    """Records the functions of the server's busy processes during further turns.

    Args:
        run: the arm.
        pid: the server's process.
        streams: streams of a turn.
        tokens: tokens of a stream.
        py_spy: the program.
        out: the beginning of the files' names.
    """
    before, began = _main_threads(pid), time.monotonic()
    run(prompts(streams, _PROMPT), tokens)
    least = _BUSY * (time.monotonic() - began)
    after = _main_threads(pid)
    options = ["--format=raw", "--threads", "--nonblocking", f"-r{_RATE}", f"-d{_SECONDS}"]
    recording = [
        subprocess.Popen(
            [py_spy, "record", *options, f"-o{out}-{process}.txt", "-p", str(process)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for process, seconds in after.items()
        if seconds - before.get(process, 0.0) > least
    ]
    while any(recorder.poll() is None for recorder in recording):
        run(prompts(streams, _PROMPT), tokens)


def _main_threads(root: int) -> dict[int, float]:
    """Seconds of CPU of the main threads of a process and all its descendants, by process."""
    return {pid: thread.seconds for pid, thread in thread_times(root).items() if thread.main}


def main() -> None:
    """Measures, prints the figures and writes `costs-SHAPE-N.json` for N front ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser, default="qwen3-8b")
    add_client_argument(parser)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for the JSON")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--front-ends", type=int, default=1)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--py-spy", type=Path, help="records profiles with this program")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = chosen(arguments, Path(folder))
        if model.load_format == "dummy":
            copy_tokenizer(model.path)
        config = server_config(model, engines=1, requests=arguments.streams)
        config = replace(config, skip_tokenizer_init=False)
        flags = server_flags(config, arguments.front_ends)
        name = f"costs-{model.name}-{arguments.front_ends}"
        server = stack.enter_context(
            served_process(str(config.model), arguments.out / f"{name}.log", flags)
        )
        served = store_vectors(server.target)
        watcher = stack.enter_context(Worker(partial(watching, server.target)))
        client = partial(streaming, server.target, served.layer_count // 2)
        clients = [stack.enter_context(Worker(client)) for _ in range(arguments.client_processes)]
        runs = runs_of_server("", clients, watcher, served, arguments.arms)
        costs = {}
        load = (server.pid, arguments.streams, arguments.tokens)
        for arm, run in zip(arguments.arms, runs.values(), strict=True):
            costs[arm] = measure(run, *load, arguments.turns)
            show(arm, costs[arm])
            if arguments.py_spy is not None:
                files = arguments.out / f"{name}-{arm.replace(',', '').replace(' ', '-')}"
                profile(run, *load, arguments.py_spy, files)
        about = {
            "benchmark": "costs",
            "measures": "CPU time of the server's processes and threads for each token",
            **described(model, served.engine.runner),
            "cores": os.cpu_count(),
            "streams": arguments.streams,
            "tokens": arguments.tokens,
            "front_ends": arguments.front_ends,
        }
        by_arm = {arm: figures._asdict() for arm, figures in costs.items()}
        text = json.dumps({**about, "arms": by_arm}, indent=1)
        (arguments.out / f"{name}.json").write_text(text)


def show(arm: str, costs: Costs) -> None:
    """Prints the figures of an arm."""
    speeds = ", ".join(f"{speed:.0f}" for speed in costs.tokens_per_s)
    print(f"\n{arm}: {speeds} tokens/s")
    for kind, value in costs.us_per_token.items():
        print(f"  {value:7.1f} us per token {costs.cores[kind]:6.2f} cores  {kind}")


if __name__ == "__main__":
    main()
