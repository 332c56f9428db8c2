"""Where the time to the first and to the last token goes when many streams begin together.

Runs bursts of requests on stock vLLM in process and on this server, in turns. For each arm it
reports medians: when the first, the middle and the last request reached the front end, the server,
vLLM's client and the engine's core; the prompts, tokens and launch time of each step; when the
server read first and last tokens; and when clients had them. Recording costs a little, so use
`sidebyside` to compare times to the first token. The records stay in a folder of OUT whose name
begins with `traces-`.

    rheostat bench first_tokens --shape qwen3-8b --streams 32 256 --out results
    rheostat bench first_tokens --shape qwen3-8b --streams 256 --tokens 128 --out results
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rheostat_bench.machine import add_model_arguments, chosen, described, server_config
from rheostat_bench.processes import Worker, together
from rheostat_bench.served import add_client_argument, prompts, stock
from rheostat_bench.served_process import copy_tokenizer, served_process
from rheostat_bench.sidebyside import (
    CAPTURED,
    IDLE,
    LAST_PROMPT,
    STEERED_ALL,
    STEERED_ONE,
    STOCK,
    Client,
    run_stock,
    server_flags,
    spread,
    store_vectors,
    streaming,
)
from rheostat_bench.traced import (
    ACCEPTED,
    ADDED,
    IN_CORE,
    LAUNCH,
    READ,
    RECEIVED,
    SAMPLE,
    SCHEDULE,
    UPDATE,
    Record,
    environment,
    records,
)
from rheostat_bench.turns import Streamed

_PROMPT = 32
_ARMS = (IDLE, STEERED_ONE, STEERED_ALL, CAPTURED, LAST_PROMPT)
_PLACES = (ACCEPTED, RECEIVED, ADDED, IN_CORE)
_PAUSE = 0.15
"""Seconds between bursts, so that work after the last token of one does not delay the next."""
_LAST_RECORDS = 1.5
"""Seconds to wait before records are read, so that every process has written its own."""


_Run = Callable[[list[list[int]], int], list[Streamed]]
"""Streams prompts with so many tokens each, at the same time."""


class Burst(NamedTuple):
    """Streams that began together."""

    arm: str
    streams: list[Streamed]


class Step(NamedTuple):
    """A step of the engine. Times in milliseconds."""

    prompts: float
    """Prompts that began in it."""
    tokens: float
    scheduled: float
    """When it was scheduled, after the first stream's call."""
    launch: float
    """Duration of `execute_model`: on a GPU the launches of kernels, on a CPU the computation."""
    launch_cpu: float
    """CPU time of the launching thread."""
    sampled: float
    """When `sample_tokens` returned, after the first stream's call."""
    processed: float
    """When the core processed its output, after the first stream's call."""


def run_of(workers: Sequence[Worker[Client]], arm: str) -> _Run:
    """A run of an arm, from all clients."""

    def run(wanted: list[list[int]], tokens: int) -> list[Streamed]:
        orders = [
            partial(Client.run, arm=arm, wanted=share, tokens=tokens)
            for share in spread(wanted, workers)
        ]
        return [stream for part in together(workers[: len(orders)], orders) for stream in part]

    return run


def figures(bursts: Sequence[Burst], found: Sequence[Record]) -> dict[str, object]:
    """The medians of bursts of one arm, in milliseconds after a burst's first call.

    Args:
        bursts: the bursts.
        found: the records of all processes, in order of time.

    Returns:
        `called`, the places, `read` and `last_read` (a sample's first and last read, of this
        server), `first_token` and `last_token`: each for the first, the middle and the last
        request. `steps`, in order, as many as the median burst has: the i-th is the median of the
        i-th steps of all bursts that have one. `unmatched`: bursts whose steps could not be told,
        because records of launches or outputs are missing.
    """
    times, steps = zip(*(_times_and_steps(burst, found) for burst in bursts), strict=True)
    matched = [some for some in steps if some is not None]
    names = dict.fromkeys(name for one in times for name in one)
    count = round(median(map(len, matched))) if matched else 0
    return {
        **{name: _medians([one[name] for one in times if name in one]) for name in names},
        "unmatched": len(steps) - len(matched),
        "steps": [
            dict(
                zip(
                    Step._fields,
                    _medians([some[number] for some in matched if number < len(some)]),
                    strict=True,
                )
            )
            for number in range(count)
        ],
    }


def _times_and_steps(
    burst: Burst, found: Sequence[Record]
) -> tuple[dict[str, list[float]], list[Step] | None]:
    """The requests' times at each place, and the engine's steps, if known."""
    began = min(stream.began for stream in burst.streams)
    end = max(stream.last for stream in burst.streams)
    inside = [record for record in found if began <= record.began <= end]

    def ms(moments: Sequence[float]) -> list[float]:
        ordered = sorted(moments)
        some = (ordered[0], ordered[(len(ordered) - 1) // 2], ordered[-1])
        return [1e3 * (moment - began) for moment in some]

    by_name = {
        name: [one for one in inside if one.name == name]
        for name in (*_PLACES, SCHEDULE, LAUNCH, SAMPLE, UPDATE)
    }
    times = {"called": ms([stream.began for stream in burst.streams])}
    times |= {name: ms([one.began for one in by_name[name]]) for name in _PLACES if by_name[name]}
    reads: dict[int, list[float]] = {}
    for one in inside:
        if one.name == READ:
            reads.setdefault(one.owner, []).append(one.began)
    if reads:
        times["read"] = ms([moments[0] for moments in reads.values()])
        times["last_read"] = ms([moments[-1] for moments in reads.values()])
    times["first_token"] = ms([stream.first for stream in burst.streams])
    times["last_token"] = ms([stream.last for stream in burst.streams])
    schedules, launches, updates = (by_name[name] for name in (SCHEDULE, LAUNCH, UPDATE))
    if not 0 <= len(schedules) - len(launches) <= 1 or not 0 <= len(launches) - len(updates) <= 2:
        return times, None  # more are missing than those of the steps that run at the end
    samples = iter(by_name[SAMPLE])
    steps = []
    for scheduled, launch, update in zip(schedules, launches, updates, strict=False):
        last = next(samples, None) if scheduled.tokens else launch  # empty steps sample nothing
        if last is None:
            return times, None
        at, sampled, processed = (
            1e3 * (moment - began)
            for moment in (scheduled.began, last.began + last.seconds, update.began)
        )
        launched = (1e3 * launch.seconds, 1e3 * launch.cpu)
        steps.append(Step(scheduled.prompts, scheduled.tokens, at, *launched, sampled, processed))
    return times, steps


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [round(median(column), 2) for column in zip(*rows, strict=True)]


def main() -> None:
    """Measures, prints the figures and writes `first-tokens-SHAPE.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser, default="qwen3-8b")
    add_client_argument(parser)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for the JSON")
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--front-ends", type=int, default=1)
    parser.add_argument("--arms", nargs="+", choices=_ARMS, default=_ARMS)
    parser.add_argument("--options", nargs="*", default=[], help="of `rheostat serve`, without --")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        scratch = Path(folder)
        traces = Path(tempfile.mkdtemp(prefix="traces-", dir=arguments.out.resolve()))
        os.environ.update(environment(traces))  # for all processes that start from now on
        model = chosen(arguments, scratch)
        if model.load_format == "dummy":
            copy_tokenizer(model.path)
        most = max(arguments.streams)
        held = most * (_PROMPT + arguments.tokens)
        config = server_config(model, engines=2, requests=most, tokens=held)
        config = replace(config, skip_tokenizer_init=False, spool=str(scratch / "spool"))
        engine = stack.enter_context(Worker(partial(stock, config), parent=True))
        flags = server_flags(config, arguments.front_ends)
        flags += [f"--{option}" for option in arguments.options]
        log = arguments.out / "first-tokens.log"
        target = stack.enter_context(served_process(str(config.model), log, flags)).target
        served = store_vectors(target)
        client = partial(streaming, target, served.layer_count // 2)
        clients = [stack.enter_context(Worker(client)) for _ in range(arguments.client_processes)]
        runs: dict[str, _Run] = {
            STOCK: lambda wanted, tokens: engine.do(
                partial(run_stock, wanted=wanted, tokens=tokens)
            ),
            **{arm: run_of(clients, arm) for arm in arguments.arms},
        }
        bursts: dict[str, list[Burst]] = {}
        for count in arguments.streams:
            for repeat in range(arguments.repeats + 1):
                for arm in list(runs)[:: 1 if repeat % 2 == 0 else -1]:
                    streams = runs[arm](prompts(count, _PROMPT), arguments.tokens)
                    time.sleep(_PAUSE)
                    if repeat:  # the first burst is not counted
                        bursts.setdefault(str(count), []).append(Burst(arm, streams))
        time.sleep(_LAST_RECORDS)
        found = records(traces)
    table = {
        count: {arm: figures([one for one in some if one.arm == arm], found) for arm in runs}
        for count, some in bursts.items()
    }
    show(table)
    about = {
        "benchmark": "first_tokens",
        "measures": "where the time to first and last tokens goes when streams begin together",
        **described(model, served.engine.runner),
        "front_ends": arguments.front_ends,
        "options": arguments.options,
        "client_processes": arguments.client_processes,
        "tokens": arguments.tokens,
        "repeats": arguments.repeats,
    }
    path = arguments.out / f"first-tokens-{model.name}.json"
    path.write_text(json.dumps({**about, "streams": table}, indent=1))


def show(table: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Prints the figures."""
    for count, arms in table.items():
        print(f"\n{count} streams; ms after the first call, of the first, middle and last request")
        for arm, row in arms.items():
            print(arm)
            for name, values in row.items():
                if isinstance(values, list) and name != "steps":
                    print(f"  {name:12}" + "".join(f"{value:9.1f}" for value in values))
            for number, step in enumerate(row["steps"], 1):
                if step["prompts"] or number == len(row["steps"]):
                    print(
                        f"  step {number}: {step['prompts']:.0f} prompts, "
                        f"{step['tokens']:.0f} tokens, scheduled {step['scheduled']:.1f}, launched "
                        f"in {step['launch']:.1f} ({step['launch_cpu']:.1f} CPU), sampled "
                        f"{step['sampled']:.1f}, processed {step['processed']:.1f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
