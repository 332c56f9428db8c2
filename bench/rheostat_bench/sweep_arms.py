"""Ways to compute the cells of a sweep, and delays of streams beside a sweep: turns of each.

Every turn has new prompts, so that the prefix cache has none of them.
"""

import random
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rheostat_bench.costs import taken, thread_times
from rheostat_bench.limits import Limits
from rheostat_bench.machine import MAX_MODEL_LEN
from rheostat_bench.processes import Worker
from rheostat_bench.served import Stock
from rheostat_bench.served import prompts as fresh_prompts
from rheostat_bench.sidebyside import run_stock, spread
from rheostat_bench.summaries import percentile
from rheostat_bench.sweep_clients import (
    Client,
    Gaps,
    Load,
    Priority,
    new_prompts,
    singles_grid,
)
from rheostat_bench.sweep_references import (
    Cell,
    Graded,
    Grid,
    HuggingFace,
    Prompts,
    TransformerLens,
)
from rheostat_server.serve import RunningServer

PREFILL, PREFILL_LONG = "stock, whole prompts", "stock, prompts of {} tokens"
SWEEP = "sweep, {} cells at a time"
PAIRS = "sweep of {} pairs, 4 groups of positions, {} cells at a time"
SINGLES, SINGLES_64 = "single requests, one at a time", "single requests, 64 at a time"
HUGGING_FACE = "Hugging Face, a batch for each layer"
TRANSFORMER_LENS = "TransformerLens on the CPU, float32"

_MOST_PREFILL = 1024
"""Prompts that stock vLLM computes in a turn at most."""
_STREAM_PROMPT = 32
_RUN = "sweep-bench"
_PROFILE_SECONDS = 8
_PROFILE_RATE = 400
"""Samples in a second."""
_LIMIT = 60.0
"""Seconds that a call may take. A call that streams has `_TOKEN_LIMIT` more for each token."""
_TOKEN_LIMIT = 0.25
"""Seconds for each token of a stream. On a CPU, one beside a normal sweep takes up to 0.19 s."""
_PAIRS_LIMIT = 600.0
"""Seconds that a sweep of many pairs may take. It has thousands of cells."""
_GROUPS = 4
_CHECKED_PAIRS = 3
"""Pairs whose cells Hugging Face's model computes too."""
_REFERENCE_LIMIT = 300.0
"""Seconds that a call of a reference may take. The first call waits until the model is loaded."""


class Result(NamedTuple):
    """One turn of an arm."""

    seconds: float
    cells: int
    tokens: int
    """Of the cells' prompts."""
    computed_tokens: int | None
    """Those that the engine computed, if they are known."""
    answer_error: float | None
    """Largest difference of ln p(answer) to Hugging Face, in nats, if the weights are equal."""
    first_cell_s: float | None = None
    """Seconds from the call to the first cell, if they are known."""


class Neighbours(NamedTuple):
    """The token rates and delays of streams."""

    streams: int
    median_ms: float
    """Median of the times between two messages with tokens."""
    p99_ms: float
    per_token_ms: float
    """Median of the streams."""
    tokens_per_s: float
    cells_per_s: float
    """Cells of the sweep beside the streams, or prompts."""
    longer_share: float | None = None
    """Share of these times that are more than 1.25 times the 99th percentile of streams alone. At
    most 0.01 is the same as a 99th percentile of at most +25 %."""
    longer_ms: float | None = None
    """Median of these longer times."""
    longest_ms: float = 0.0


class Server(NamedTuple):
    """A server in a process of its own, and what benchmarks ask of it."""

    worker: Worker[RunningServer]
    target: str
    pid: int


def positions_of(length: int, layers: int, cells: int) -> list[int]:
    """Evenly spaced positions, so many that a grid has about `cells` cells, or all of them."""
    count = min(length, max(2, cells // layers))
    return sorted({round(at) for at in np.linspace(0, length - 1, count)})


def cells_of(layers: int, positions: Sequence[int], most: int) -> list[Cell]:
    """The cells in random order, `most` at most."""
    every = [Cell(layer, position) for layer, position in product(range(layers), positions)]
    return random.Random(0).sample(every, min(most, len(every)))


def quarters(length: int) -> list[range]:
    """The four groups of positions of a prompt."""
    borders = [number * length // _GROUPS for number in range(_GROUPS + 1)]
    return [range(start, end) for start, end in pairwise(borders)]


def worst(found: Grid, wanted: Grid) -> float | None:
    """The largest difference where both have values; None: nowhere."""
    differences = np.abs(found - wanted)
    return None if np.isnan(differences).all() else float(np.nanmax(differences))


@dataclass
class Measured:
    """What a run has measured so far."""

    turns: dict[str, dict[str, list[Result]]] = field(default_factory=dict)
    """By arm, then prompt length."""
    neighbours: dict[str, list[Neighbours]] = field(default_factory=dict)
    cpu_us_per_cell: dict[str, dict[str, float]] = field(default_factory=dict)
    """Of the last turn, by arm and length, then kind of the server's threads."""
    failures: dict[str, str] = field(default_factory=dict)
    """What went wrong, by step."""


@dataclass
class Bench:
    """The processes of a run, and what they have measured."""

    layers: int
    server: Server
    clients: Sequence[Worker[Client]]
    sweeper: Worker[Client]
    stock: Worker[Stock] | None
    hugging_face: Worker[HuggingFace] | None
    transformer_lens: Worker[TransformerLens] | None
    same_weights: bool
    limits: Limits
    save: Callable[["Measured"], None]
    measured: Measured = field(default_factory=Measured)

    def attempt(self, step: str, run: Callable[[], object]) -> None:
        """Runs a step. If it fails, the error is noted, and the other steps run nevertheless."""
        try:
            run()
        except Exception as error:  # any error is written to the file
            self.measured.failures[step] = f"{type(error).__name__}: {error}"
            print(f"error: {step}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        self.save(self.measured)

    def add(self, arm: str, length: int, result: Result) -> None:
        """Keeps and prints a turn."""
        self.measured.turns.setdefault(arm, {}).setdefault(str(length), []).append(result)
        error = "" if result.answer_error is None else f" error {result.answer_error:.4f}"
        print(
            f"{arm:44}{length:5} tokens {result.cells:5} cells {result.seconds:7.2f} s"
            f"{result.cells / result.seconds:8.1f} cells/s{error}",
            flush=True,
        )
        self.save(self.measured)

    def prefill(self, length: int, count: int) -> Result:
        """Whole prompts on stock vLLM, all at once, with one token each."""
        assert self.stock is not None, "its arms were asked for"
        wanted = fresh_prompts(count, length)
        began = time.monotonic()
        self.limits.ask_one(self.stock, partial(run_stock, wanted=wanted, tokens=1), _LIMIT)
        seconds = time.monotonic() - began
        return Result(seconds, count, count * length, count * length, None)

    def sweep(
        self, prompts: Prompts, positions: Sequence[int], at_once: int, wanted: Graded | None
    ) -> Result:
        """A sweep in the background, which is the default."""
        call = partial(
            Client.sweep,
            prompts=prompts,
            positions=positions,
            at_once=at_once,
            priority="background",
        )
        swept = self.limits.ask_one(self.sweeper, call, _LIMIT)
        cells = int(np.isfinite(swept.answer).sum())
        return Result(
            swept.seconds,
            cells,
            cells * len(prompts.corrupt),
            swept.computed_tokens,
            None if wanted is None else worst(swept.answer, wanted.answer),
        )

    def pairs(self, length: int, count: int, at_once: int) -> Result:
        """A sweep of many pairs of prompts, whose four groups of positions are quarters of them."""
        pairs = [new_prompts(length) for _ in range(count)]
        groups = quarters(length)
        call = partial(Client.sweep_pairs, pairs=pairs, groups=groups, at_once=at_once)
        swept = self.limits.ask_one(self.sweeper, call, _PAIRS_LIMIT)
        cells = int(np.isfinite(swept.answer).sum())
        errors = []
        for number in sorted({*np.linspace(0, count - 1, _CHECKED_PAIRS).astype(int).tolist()}):
            if self.hugging_face is None or not self.same_weights:
                break
            check = partial(HuggingFace.run_groups, prompts=pairs[number], groups=groups)
            wanted = self.limits.ask_one(self.hugging_face, check, _REFERENCE_LIMIT)
            errors.append(float(np.abs(swept.answer[number] - wanted).max()))
        error = max(errors, default=None)
        first = swept.first_cell_s
        return Result(swept.seconds, cells, cells * length, swept.computed_tokens, error, first)

    def singles(
        self, prompts: Prompts, cells: Sequence[Cell], at_once: int, wanted: Graded | None
    ) -> Result:
        """Cells as requests, which the clients share."""
        clients = self.clients[:at_once]
        parts = [list(cells[number :: len(clients)]) for number in range(len(clients))]
        began = time.monotonic()
        capture = partial(Client.capture, prompts=prompts, run_id=_RUN)
        self.limits.ask_one(clients[0], capture, _LIMIT)
        calls = [
            partial(
                Client.requests,
                prompts=prompts,
                cells=part,
                at_once=at_once // len(clients),
                run_id=_RUN,
            )
            for part in parts
        ]
        answers = self.limits.ask(clients, calls, _LIMIT)
        found = [single for part in answers for single in part]
        seconds = time.monotonic() - began
        self.limits.ask_one(clients[0], partial(Client.delete, run_id=_RUN), _LIMIT)
        grid = singles_grid(seconds, (self.layers, len(prompts.corrupt)), found)
        return Result(
            seconds,
            len(cells),
            len(cells) * len(prompts.corrupt),
            None,
            None if wanted is None else worst(grid.largest, wanted.largest),
        )

    def reference(self, prompts: Prompts, positions: Sequence[int]) -> tuple[Result, Graded]:
        """Hugging Face's model."""
        assert self.hugging_face is not None, "its arms were asked for"
        call = partial(HuggingFace.run, prompts=prompts, positions=positions)
        graded = self.limits.ask_one(self.hugging_face, call, _REFERENCE_LIMIT)
        cells = self.layers * len(positions)
        return Result(graded.seconds, cells, cells * len(prompts.corrupt), None, None), graded

    def checked_prompts(
        self, length: int, positions: Sequence[int]
    ) -> tuple[Prompts, Graded | None]:
        """New prompts, and what their cells must be, if the weights are equal."""
        prompts = new_prompts(length)
        if not self.same_weights:
            return prompts, None
        _, graded = self.reference(prompts, positions)
        return prompts, graded

    def lens(self, prompts: Prompts, cells: Sequence[Cell], wanted: Graded | None) -> Result:
        """TransformerLens."""
        assert self.transformer_lens is not None, "it was asked for"
        call = partial(TransformerLens.run, prompts=prompts, cells=cells)
        graded = self.limits.ask_one(self.transformer_lens, call, _REFERENCE_LIMIT)
        error = None if wanted is None else worst(graded.answer, wanted.answer)
        return Result(graded.seconds, len(cells), len(cells) * len(prompts.corrupt), None, error)


class Amounts(NamedTuple):
    """How much is run."""

    cells: int
    """Most cells of a grid."""
    singles: int
    """Most cells that are requests one at a time; at 64 at a time four times as many."""
    lens_cells: int
    long_prompts: int
    concurrency: Sequence[int]
    repeats: int
    pairs: int = 64
    """Of the sweep of many pairs."""


@dataclass
class Cells:
    """The cells of prompts of a length."""

    bench: Bench
    length: int
    amounts: Amounts

    def __post_init__(self) -> None:
        """Chooses them."""
        self.positions = positions_of(self.length, self.bench.layers, self.amounts.cells)
        self.cells = cells_of(self.bench.layers, self.positions, self.amounts.cells)
        self._few = self.positions[:: max(1, len(self.positions) // 4)]

    def sweeps(self) -> None:
        """Sweeps beside whole prompts, by turns."""
        bench = self.bench
        largest, *_ = most_first = sorted(self.amounts.concurrency, reverse=True)
        # Warm-ups: shapes that are new, kernels that are compiled.
        self._attempt("warm-up, prefill", self._prefill)
        bench.sweep(new_prompts(self.length), self._few, largest, None)
        for _ in range(self.amounts.repeats):
            self._attempt(PREFILL, self._add_prefill)
            for at_once in most_first:
                self._attempt(SWEEP.format(at_once), partial(self._sweep, at_once=at_once))

    def singles(self) -> None:
        """The cells as requests."""
        bench, most = self.bench, self.amounts.singles
        bench.singles(new_prompts(self.length), self.cells[:64], 64, None)
        arms = {SINGLES_64: (64, 4 * most), SINGLES: (1, most)}
        for _ in range(self.amounts.repeats):
            for arm, (at_once, count) in arms.items():
                prompts, wanted = bench.checked_prompts(self.length, self.positions)
                result = bench.singles(prompts, self.cells[:count], at_once, wanted)
                bench.add(arm, self.length, result)

    def references(self) -> None:
        """Hugging Face, and TransformerLens if it was asked for, beside whole prompts."""
        bench = self.bench
        bench.reference(new_prompts(self.length), self._few)
        if bench.transformer_lens is not None:
            bench.lens(new_prompts(self.length), self.cells[:4], None)
        for _ in range(self.amounts.repeats):
            self._attempt(PREFILL, self._add_prefill)
            prompts = new_prompts(self.length)
            result, graded = bench.reference(prompts, self.positions)
            bench.add(HUGGING_FACE, self.length, result)
            if bench.transformer_lens is not None:
                wanted = graded if bench.same_weights else None
                found = bench.lens(prompts, self.cells[: self.amounts.lens_cells], wanted)
                bench.add(TRANSFORMER_LENS, self.length, found)

    def pairs(self) -> None:
        """One sweep of many pairs."""
        count, at_once = self.amounts.pairs, max(self.amounts.concurrency)
        result = self.bench.pairs(self.length, count, at_once)
        self.bench.add(PAIRS.format(count, at_once), self.length, result)

    def long_prompts(self) -> None:
        """What stock vLLM computes of prompts that are as long as they can be."""
        long = MAX_MODEL_LEN - 48
        for _ in range(self.amounts.repeats):
            result = self.bench.prefill(long, self.amounts.long_prompts)
            self.bench.add(PREFILL_LONG.format(long), self.length, result)

    def _attempt(self, arm: str, run: Callable[[], object]) -> None:
        self.bench.attempt(f"{arm}, {self.length} tokens", run)

    def _prefill(self) -> Result:
        return self.bench.prefill(self.length, min(len(self.cells), _MOST_PREFILL))

    def _add_prefill(self) -> None:
        self.bench.add(PREFILL, self.length, self._prefill())

    def _sweep(self, at_once: int) -> None:
        bench, arm = self.bench, SWEEP.format(at_once)
        prompts, wanted = bench.checked_prompts(self.length, self.positions)
        before = thread_times(bench.server.pid)
        swept = bench.sweep(prompts, self.positions, at_once, wanted)
        used = taken(before, thread_times(bench.server.pid))
        bench.measured.cpu_us_per_cell[f"{arm}, {self.length} tokens"] = {
            kind: 1e6 * seconds / swept.cells for kind, seconds in used.items()
        }
        bench.add(arm, self.length, swept)


ARMS = ("sweeps", "neighbours", "singles", "references", "pairs", "long-prompts")
"""Parts of a run, in this order."""


def measure(
    bench: Bench,
    lengths: Sequence[int],
    amounts: Amounts,
    neighbours: Callable[[], None],
    arms: Collection[str] = ARMS,
) -> None:
    """Runs all steps, the most informative first, because a run may be cut short.

    Every turn has new prompts.
    """
    every = [Cells(bench, length, amounts) for length in lengths]
    steps: dict[str, dict[str, Callable[[], None]]] = {
        "sweeps": {f"sweeps, {cells.length} tokens": cells.sweeps for cells in every},
        "neighbours": {"neighbours": neighbours},
        "singles": {f"single requests, {cells.length} tokens": cells.singles for cells in every},
        "references": {f"references, {cells.length} tokens": cells.references for cells in every},
        "pairs": {"many pairs": every[0].pairs},
        "long-prompts": {"long prompts": every[0].long_prompts},
    }
    for arm in ARMS:
        for step, run in steps[arm].items() if arm in arms else ():
            bench.attempt(step, run)


class StreamTimes(NamedTuple):
    """The times between the tokens of streams, and their summary."""

    summary: Neighbours
    gaps_ms: list[float]
    from_s: float
    to_s: float


def time_streams(bench: Bench, streams: int, tokens: int) -> StreamTimes:
    """Runs streams of so many tokens each, and times their tokens."""
    shares = spread(fresh_prompts(streams, _STREAM_PROMPT), bench.clients)
    calls = [partial(Client.stream, wanted=share, tokens=tokens) for share in shares]
    limit = _LIMIT + _TOKEN_LIMIT * tokens
    found: list[Gaps] = bench.limits.ask(bench.clients[: len(calls)], calls, limit)
    gaps = [gap for one in found for gap in one.gaps_ms]
    seconds = max(one.seconds for one in found)
    summary = Neighbours(
        streams,
        statistics.median(gaps),
        percentile(gaps, 0.99),
        statistics.median(time for one in found for time in one.per_token_ms),
        sum(one.tokens for one in found) / seconds,
        0.0,
        longest_ms=max(gaps),
    )
    return StreamTimes(
        summary, gaps, max(one.from_s for one in found), min(one.to_s for one in found)
    )


class Beside(NamedTuple):
    """How much runs beside the streams."""

    streams: int
    tokens: int
    turns: int
    length: int
    """Tokens of the prompt of a sweep."""
    at_once: int
    """Cells at a time."""


ALONE = "alone"
_WARM_UP_TOKENS = 64
_SHORT = 2
"""Tokens of a prompt whose computation takes no time, so that a longer step has other causes."""
_BAR = 1.25


def measure_neighbours(bench: Bench, beside: Beside, normal: bool = True) -> None:
    """Streams alone, beside sweeps, and beside prompts at the rate of the sweep in the background.

    Prompts of 2 tokens show what a step costs that computes any prompt. Prompts of the sweep's
    length show what their tokens add. Bursts show what a step with many prompts costs.
    """
    sweep = f"sweep, {beside.length} tokens, {beside.at_once} cells at a time"
    time_streams(bench, beside.streams, _WARM_UP_TOKENS)
    limits: list[float] = []
    for _ in range(beside.turns):
        alone = time_streams(bench, beside.streams, beside.tokens)
        limits.append(_BAR * alone.summary.p99_ms)
        add = partial(_add_times, bench, limit=statistics.median(limits))
        add(ALONE, alone)
        times = time_beside_sweep(bench, beside, "background")
        add(f"beside a background {sweep}", times)
        rate = max(1.0, times.summary.cells_per_s)
        for name, load in {
            f"prompts of {beside.length} tokens one by one": Load(beside.length, rate, 1),
            f"prompts of {_SHORT} tokens one by one": Load(_SHORT, rate, 1),
            f"bursts of {beside.at_once} prompts of {beside.length} tokens": Load(
                beside.length, rate, beside.at_once
            ),
        }.items():
            begin = partial(Client.begin_prompts, load=load)
            add(f"beside {name}, as many as cells", time_beside(bench, beside, begin))
        if normal:
            add(f"beside a normal {sweep}", time_beside_sweep(bench, beside, "normal"))
        bench.save(bench.measured)


def _add_times(bench: Bench, name: str, times: StreamTimes, limit: float) -> None:
    """Keeps and prints the times of streams."""
    longer = [gap for gap in times.gaps_ms if gap > limit]
    summary = times.summary._replace(
        longer_share=len(longer) / len(times.gaps_ms),
        longer_ms=statistics.median(longer) if longer else None,
    )
    bench.measured.neighbours.setdefault(name, []).append(summary)
    print(
        f"{name:70} median {summary.median_ms:6.2f} ms, p99 {summary.p99_ms:6.2f} ms,"
        f" {summary.longer_share:6.2%} above {limit:.2f} ms, longest {summary.longest_ms:6.1f} ms,"
        f" {summary.cells_per_s:6.1f} cells/s",
        flush=True,
    )


def time_beside_sweep(bench: Bench, beside: Beside, priority: Priority) -> StreamTimes:
    """Times streams while sweeps run."""
    begin = partial(
        Client.begin_sweeps, length=beside.length, at_once=beside.at_once, priority=priority
    )
    return time_beside(bench, beside, begin)


def time_beside(
    bench: Bench, beside: Beside, begin: Callable[[Client], Awaitable[None]]
) -> StreamTimes:
    """Times streams beside a load."""
    bench.limits.ask_one(bench.sweeper, begin, _LIMIT)
    try:
        times = time_streams(bench, beside.streams, beside.tokens)
    finally:
        arrivals = bench.limits.ask_one(bench.sweeper, Client.end_load, _LIMIT)
    came = sum(times.from_s <= at <= times.to_s for at in arrivals)
    rate = came / (times.to_s - times.from_s)
    return times._replace(summary=times.summary._replace(cells_per_s=rate))


def profile(bench: Bench, py_spy: Path, length: int, at_once: int, out: Path) -> None:
    """Records the functions of all the server's processes while sweeps run."""
    begin = partial(Client.begin_sweeps, length=length, at_once=at_once, priority="normal")
    bench.limits.ask_one(bench.sweeper, begin, _LIMIT)
    options = ["--format=raw", "--threads", "--nonblocking", f"-r{_PROFILE_RATE}"]
    options += [f"-d{_PROFILE_SECONDS}", f"-o{out}", "--subprocesses"]
    command = [str(py_spy), "record", *options, "-p", str(bench.server.pid)]
    try:
        found = subprocess.run(command, capture_output=True, check=False, timeout=_LIMIT)
    finally:
        arrivals = bench.limits.ask_one(bench.sweeper, Client.end_load, _LIMIT)
    rate = len(arrivals) / (arrivals[-1] - arrivals[0]) if len(arrivals) > 1 else 0.0
    print(f"py-spy: {found.returncode}, {rate:.0f} cells/s while it recorded", flush=True)
