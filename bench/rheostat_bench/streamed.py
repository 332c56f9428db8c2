"""Cost of streaming the rows of one layer to a Python client while the request runs.

The arms take turns on one device: stock vLLM's `AsyncLLM` in a process of its own; the same
requests over gRPC; with the rows of the middle layer, every token's, in the answer; and with a
subscriber in another process that gets those of every request. Workloads are batches of short
prompts that generate, and one long prompt for one token, alone.

Two clocks. In the process that holds the `AsyncLLM`, stock's or the server's: time per token, from
a request's first token to its last; and time to the first token, from the request's admission. At
whoever asks: time to the first token from the call on, and the whole of a batch, until the last
answer, and the last row at a subscriber, are there. A turn's figure is the median of its requests.

    rheostat bench streamed --shape qwen3-8b --out results
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import rheostat
from rheostat_bench.machine import add_model_arguments, chosen, described, server_config
from rheostat_bench.processes import Worker, together
from rheostat_bench.served import (
    Stock,
    add_client_argument,
    address,
    connected,
    prompts,
    serving,
    stock,
)
from rheostat_bench.summaries import Table, Times, empty, pooled, spread
from rheostat_bench.watching import Watcher, watching

_PROMPT = 32
_LONG = 512
_WARM_UP = 150
"""Tokens of the first batch of each arm, enough for a set of sites to get a graph of its own."""

STOCK, PLAIN = "stock, in process", "over gRPC"
INLINE, SUBSCRIBED = "rows in the answer", "rows to a subscriber"
ARMS = (STOCK, PLAIN, INLINE, SUBSCRIBED)
"""The measured arms; the first is the reference."""

PER_TOKEN, FIRST, FIRST_AT_CLIENT, WHOLE = (
    "per_token",
    "first_token",
    "first_token_at_client",
    "whole",
)
"""The times of a turn; the first two are those of the process that holds the `AsyncLLM`."""


class Workload(NamedTuple):
    """Requests that arrive together."""

    name: str
    requests: int
    prompt: int
    tokens: int
    repeats: int

    @property
    def rows(self) -> int:
        """Rows of a layer: each token has one but the last, which the model never reads."""
        return self.requests * (self.prompt + self.tokens - 1)

    @property
    def measures(self) -> tuple[str, ...]:
        """The times that there are."""
        return (*((PER_TOKEN,) if self.tokens > 1 else ()), FIRST, FIRST_AT_CLIENT, WHOLE)


class Asked(NamedTuple):
    """One request. Moments by `time.monotonic`, which all processes share."""

    began: float
    first_at_client: float
    """When its first token was there."""
    ended: float
    """When its answer had ended."""
    first: float
    """Seconds from admission to the first token."""
    last: float
    """Seconds from admission to the last token."""
    rows: int
    """Rows in the answer."""


async def ask_stock(engine: Stock, wanted: Sequence[list[int]], tokens: int) -> list[Asked]:
    """An order: requests at the same time, in process."""

    async def one(prompt: list[int]) -> Asked:
        began = time.monotonic()
        first = last = 0.0
        async for output in engine.stream(prompt, tokens):
            last = time.monotonic()
            if not first and output.outputs[0].token_ids:
                first = last
        return Asked(began, first, last, first - began, last - began, 0)

    return list(await asyncio.gather(*map(one, wanted)))


async def ask(
    engine: rheostat.aio.Engine,
    wanted: Sequence[list[int]],
    tokens: int,
    capture: rheostat.Capture | None,
) -> list[Asked]:
    """An order: requests at the same time, over gRPC."""

    async def one(prompt: list[int]) -> Asked:
        began = time.monotonic()
        first = 0.0
        stream = engine.stream(
            prompt, max_tokens=tokens, temperature=0, ignore_eos=True, capture=capture
        )
        async for event in stream:
            if not first and isinstance(event, rheostat.Tokens):
                first = time.monotonic()
        ended = time.monotonic()
        (sample,) = (await stream.result()).samples
        return Asked(
            began,
            first,
            ended,
            sample.first_token_after,
            sample.finished_after,
            sum(len(rows) for rows in sample.activations.values()),
        )

    return list(await asyncio.gather(*map(one, wanted)))


def milliseconds(workload: Workload, asked: Sequence[Asked], last_row: float) -> dict[str, float]:
    """The times of a turn.

    Args:
        workload: what was asked for.
        asked: its requests.
        last_row: when a subscriber had everything; 0: there was none.
    """
    whole = max(last_row, *(result.ended for result in asked)) - min(
        result.began for result in asked
    )
    seconds = {
        FIRST: statistics.median(result.first for result in asked),
        FIRST_AT_CLIENT: statistics.median(
            result.first_at_client - result.began for result in asked
        ),
        WHOLE: whole,
    }
    if workload.tokens > 1:
        steps = workload.tokens - 1
        seconds[PER_TOKEN] = statistics.median(
            (result.last - result.first) / steps for result in asked
        )
    return {measure: 1e3 * seconds[measure] for measure in workload.measures}


class _Stage:
    """Stock vLLM, the server, and the processes of its clients and its subscriber."""

    def __init__(
        self,
        reference: Worker[Stock],
        askers: Sequence[Worker[rheostat.aio.Engine]],
        watcher: Worker[Watcher],
        layer: int,
    ) -> None:
        self._reference = reference
        self._askers = askers
        self._watcher = watcher
        self._capture = rheostat.Capture("resid_post", layers=layer)
        self.lost = dict.fromkeys(ARMS, 0)
        """Rows that did not come."""
        self.way = ""
        """How rows came to the subscriber."""

    def turn(self, arm: str, workload: Workload) -> dict[str, float]:
        """The times of one turn of an arm."""
        wanted = prompts(workload.requests, workload.prompt)
        if arm == STOCK:
            order = partial(ask_stock, wanted=wanted, tokens=workload.tokens)
            return milliseconds(workload, self._reference.do(order), 0.0)
        if arm == SUBSCRIBED:
            options = rheostat.SubscribeOptions(every=True, capture=self._capture)
            self.way = self._watcher.do(
                partial(Watcher.open, options=options, requests=workload.requests)
            )
        asked = self._ask(wanted, workload.tokens, self._capture if arm == INLINE else None)
        rows, last_row = sum(result.rows for result in asked), 0.0
        if arm == SUBSCRIBED:
            rows, last_row = self._watcher.do(Watcher.finish)
        if arm != PLAIN:
            self.lost[arm] += workload.rows - rows
        return milliseconds(workload, asked, last_row)

    def _ask(
        self, wanted: list[list[int]], tokens: int, capture: rheostat.Capture | None
    ) -> list[Asked]:
        """Spreads requests over the clients' processes."""
        shares = [wanted[number :: len(self._askers)] for number in range(len(self._askers))]
        orders = [
            partial(ask, wanted=share, tokens=tokens, capture=capture) for share in shares if share
        ]
        return [
            result for asked in together(self._askers[: len(orders)], orders) for result in asked
        ]


def measure(stage: _Stage, workloads: Sequence[Workload]) -> dict[str, Times]:
    """Times every arm at every workload; arms take turns. By measure."""
    found = {measure: empty(ARMS, [], 1) for measure in (PER_TOKEN, FIRST, FIRST_AT_CLIENT, WHOLE)}
    for workload in workloads:
        for arm in ARMS:
            stage.turn(arm, workload._replace(tokens=_WARM_UP if workload.tokens > 1 else 1))
    for repeat in range(max(workload.repeats for workload in workloads)):
        first = repeat % len(ARMS)
        for workload in workloads:
            if repeat >= workload.repeats:
                continue
            for arm in (*ARMS[first:], *ARMS[:first]):
                for kind, value in stage.turn(arm, workload).items():
                    found[kind][arm].setdefault(workload.name, [[]])[0].append(value)
    return found


def summary(times: Mapping[str, Times]) -> dict[str, Table]:
    """By measure: medians, quartiles, and beside stock's and those without capture."""
    tables: dict[str, Table] = {}
    for kind, by_arm in times.items():
        medians = {
            arm: {name: statistics.median(pooled(starts)) for name, starts in by_workload.items()}
            for arm, by_workload in by_arm.items()
        }
        for arm, by_workload in by_arm.items():
            for name, starts in by_workload.items():
                median = medians[arm][name]
                low, high = spread(pooled(starts))
                tables.setdefault(kind, {}).setdefault(arm, {})[name] = {
                    "median_ms": median,
                    "low_ms": low,
                    "high_ms": high,
                    "to_stock": median / medians[STOCK][name],
                    "to_plain": median / medians[PLAIN][name],
                    "over_plain_ms": median - medians[PLAIN][name],
                }
    return tables


def show(tables: Mapping[str, Table]) -> None:
    """Prints the figures."""
    for kind, table in tables.items():
        print(f"\n{kind}, ms: median (quartiles), to stock, to plain")
        for arm, by_workload in table.items():
            for name, row in by_workload.items():
                print(
                    f"{arm:24}{name:14}{row['median_ms']:9.3f} "
                    f"({row['low_ms']:9.3f} to {row['high_ms']:9.3f}) "
                    f"{row['to_stock'] * 100 - 100:+7.2f}% {row['to_plain'] * 100 - 100:+7.2f}% "
                    f"({row['over_plain_ms']:+8.3f} ms)"
                )


def main() -> None:
    """Measures, prints the figures and writes `streamed.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser, default="qwen3-8b")
    add_client_argument(parser)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for streamed.json")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--long-repeats", type=int, default=40, help="of the long prompt")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    workloads = [
        Workload(f"batch of {batch}", batch, _PROMPT, arguments.tokens, arguments.repeats)
        for batch in arguments.batches
    ]
    workloads.append(Workload(f"{_LONG} tokens", 1, _LONG, 1, arguments.long_repeats))
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        model = chosen(arguments, Path(scratch))
        config = server_config(model, engines=2, requests=max(arguments.batches))
        server = stack.enter_context(Worker(partial(serving, config), parent=True))
        reference = stack.enter_context(Worker(partial(stock, config), parent=True))
        target = server.do(address)
        with rheostat.connect(target) as engine:
            served = engine.model()
        askers = [
            stack.enter_context(Worker(partial(connected, target)))
            for _ in range(arguments.client_processes)
        ]
        watcher = stack.enter_context(Worker(partial(watching, target)))
        stage = _Stage(reference, askers, watcher, served.layer_count // 2)
        times = measure(stage, workloads)
    tables = summary(times)
    result = {
        "benchmark": "streamed",
        "measures": "requests whose rows of one layer go to a client, beside the same without",
        **described(model, served.engine.runner),
        "compiled": served.engine.compiled,
        "client_processes": arguments.client_processes,
        "layer": served.layer_count // 2,
        "workloads": {workload.name: workload._asdict() for workload in workloads},
        "subscriber_through": stage.way,
        "lost_rows": stage.lost,
        "summary": tables,
        "times_ms": times,
    }
    (arguments.out / "streamed.json").write_text(json.dumps(result, indent=1))
    show(tables)


if __name__ == "__main__":
    main()
