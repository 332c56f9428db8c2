"""Measures the cost of watching every token of every request, and of steering by the readings.

All calls go to one server over gRPC. In each turn of an arm, a number of streams begin together.
The reader is one Python process, whose watch reads 64 numbers of every token, prompts included: 16
linear probes at four layers each. The arms:

    unwatched   there is no watch
    summaries   the watch sends the reader a summary of the 64 numbers at each request's end
    every token the watch sends the reader all numbers, and the reader counts missing ones
    steered     there is no watch, and one layer is steered
    gains       as steered, with the watch of every token; the reader sets gains of the steering,
                a new one for each stream as soon as the stream's last gain was answered
    controller  as steered; a controller plugin of the server sets the gain after each token, from
                what one probe reads

CPU time is given in cores: seconds of all threads of a process in a second of wall time.

    rheostat bench watched --shape qwen3-8b --out results
"""

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

import rheostat
from rheostat_bench import controllers
from rheostat_bench.costs import taken, thread_times
from rheostat_bench.machine import add_model_arguments, chosen, described, device, server_config
from rheostat_bench.processes import Worker, together
from rheostat_bench.served import add_client_argument, connected, prompts
from rheostat_bench.served_process import copy_tokenizer, served_process
from rheostat_bench.sidebyside import server_flags, spread
from rheostat_bench.summaries import Table, percentile

_KV_BYTES = 24 << 30
"""Room for 174,000 tokens of the shape qwen3-8b, enough for 256 streams of 512 tokens."""

_PROMPT = 32
_PROBES = 16
_LAYERS = 4
_WARM_UP = 150
"""The least tokens of a stream in an arm's warm-up, enough for the engine to make a CUDA graph for
the arm's active sites."""
_PATIENCE = 60.0
"""Seconds in which the reader must finish after the streams have ended."""

UNWATCHED, SUMMARIES, EVERY = "unwatched", "64 readings, summaries", "64 readings of every token"
STEERED = "one layer steered"
GAINS, CONTROLLER = "the same, and gains of a watch", "the same, and gains of a controller"
REFERENCES = {
    UNWATCHED: UNWATCHED,
    SUMMARIES: UNWATCHED,
    EVERY: UNWATCHED,
    STEERED: STEERED,
    GAINS: STEERED,
    CONTROLLER: STEERED,
}
"""The arms, each with the arm that it is compared with."""
WATCHED = (SUMMARIES, EVERY, GAINS)
"""Arms with a watch."""


class Stream(NamedTuple):
    """One request, as its client sees it. Times are of `time.monotonic`."""

    began: float
    first: float
    """When its first token arrived."""
    last: float
    """When its last token arrived."""
    tokens: int
    waits: list[float]
    """Seconds between consecutive arrivals of tokens."""


class Read(NamedTuple):
    """What a reader received in a turn."""

    positions: int = 0
    """Positions whose readings arrived."""
    lost: int = 0
    """Positions whose readings did not arrive, as the server or the reader counts (the larger)."""
    gains: int = 0
    """Gains that were applied."""
    cpu_s: float = 0.0
    """CPU time of the reader's process."""


class Turn(NamedTuple):
    """The figures of one turn."""

    tokens_per_s: float
    per_token_ms: float
    """Median of the streams."""
    p99_ms: float
    """99th percentile of the times between arrivals of tokens, over all streams."""
    server_cores: float
    """CPU time of the server and its front ends, without the engine; in cores."""
    engine_cores: float
    """CPU time of the engine's processes, in cores."""
    reader_cores: float
    """CPU time of the reader, in cores."""
    readings_per_s: float
    """Numbers that the reader received."""
    lost: int
    """Positions whose readings did not arrive."""
    gains_per_s: float
    """Gains that were applied."""


def figures(
    streams: Sequence[Stream], read: Read, cpu: Mapping[str, float], seconds: float, columns: int
) -> Turn:
    """The figures of a turn.

    Args:
        streams: its streams, of more than one token each.
        read: what its reader received.
        cpu: CPU seconds of the server by kind of thread; see `costs.taken`.
        seconds: wall time over which the CPU time was measured.
        columns: numbers of each position that was read.
    """
    whole = max(stream.last for stream in streams) - min(stream.began for stream in streams)
    own = sum(value for kind, value in cpu.items() if kind.startswith(("server, ", "front ends, ")))
    steps = [(stream.last - stream.first) / (stream.tokens - 1) for stream in streams]
    return Turn(
        sum(stream.tokens for stream in streams) / whole,
        1e3 * statistics.median(steps),
        1e3 * percentile([wait for stream in streams for wait in stream.waits], 0.99),
        own / seconds,
        (sum(cpu.values()) - own) / seconds,
        read.cpu_s / seconds,
        read.positions * columns / seconds,
        read.lost,
        read.gains / seconds,
    )


def probes(width: int, layers: int) -> list[rheostat.Probe]:
    """Sixteen random directions, each read at four layers (all, if there are fewer)."""
    drawn = np.random.default_rng(0).standard_normal((_PROBES, 1, width), dtype="f")
    at = sorted(set(np.linspace(0, layers - 1, _LAYERS).astype(int).tolist()))
    return [
        rheostat.probe(rheostat.inline(row), points="resid_post", layers=at, name=f"p{number}")
        for number, row in enumerate(drawn)
    ]


class Reader:
    """A client that has one watch at a time, and reads it in a thread. Its methods are orders."""

    def __init__(self, engine: rheostat.Engine) -> None:
        """No watch is open yet."""
        self._engine = engine
        self._reading: asyncio.Task[Read] | None = None

    async def open(self, arm: str, requests: int) -> int:
        """Opens a watch, and starts to read it until so many requests have ended.

        Returns:
            The number of the watch's columns.
        """
        model = self._engine.model()
        watch = self._engine.watch(
            probes=probes(model.width, model.layer_count),
            every=True,
            report="summary" if arm == SUMMARIES else "every",
            steers=arm == GAINS,
        )
        order = asyncio.to_thread(_read, watch, requests, arm == GAINS)
        self._reading = asyncio.create_task(order)
        return len(watch.columns)

    async def finish(self) -> Read:
        """Waits until the watch has been read and closed; returns what was received.

        Raises:
            TimeoutError: this took more than a minute.
        """
        assert self._reading is not None, "`open` comes first"
        async with asyncio.timeout(_PATIENCE):
            return await self._reading


def _read(watch: rheostat.Watch, requests: int, answers: bool) -> Read:
    began = time.process_time()
    with watch:
        read = read_events(watch, requests, watch.gain if answers else None)
    return read._replace(cpu_s=time.process_time() - began)


def read_events(
    events: Iterable[rheostat.WatchEvent],
    requests: int,
    gain: Callable[[str, float], int] | None,
) -> Read:
    """Reads the events of a watch until so many requests have ended.

    Args:
        events: the events.
        requests: how many requests must end.
        gain: sets a gain of a request, and returns the update's id; None: no gains are set.

    Raises:
        RuntimeError: a request was not read.
    """
    positions = lost = sent = gains = ended = 0
    waiting: dict[int, str] = {}  # the request of each unanswered gain, by the update's id
    busy: set[str] = set()  # requests with an unanswered gain
    for event in events:
        match event:
            case rheostat.WatchedSignals():
                positions += len(event.values)
                if gain is None:
                    continue
                for request in set(event.request_ids) - busy:
                    sent += 1
                    waiting[gain(request, sent % 16 / 16)] = request
                    busy.add(request)
            case rheostat.UpdateApplied() | rheostat.UpdateRefused():
                gains += isinstance(event, rheostat.UpdateApplied)
                busy.discard(waiting.pop(event.update_id))
            case rheostat.WatchedRequestEnded():
                if event.missed_reason:
                    raise RuntimeError(f"a request was not read: {event.missed_reason}")
                lost += event.dropped_position_count
                ended += 1
        if ended == requests and not waiting:
            break
    return Read(positions, lost, gains)


@asynccontextmanager
async def reading(target: str) -> AsyncIterator[Reader]:
    """A reader with a connection of its own."""
    with rheostat.connect(target) as engine:
        yield Reader(engine)


def options_of(arm: str, model: rheostat.ModelInfo, tokens: int) -> rheostat.GenerateOptions:
    """The options of an arm's requests."""
    options: rheostat.GenerateOptions = {
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    if REFERENCES[arm] == UNWATCHED:
        return options
    layer = model.layer_count // 2
    row = np.random.default_rng(1).standard_normal((1, model.width), dtype="f")
    direction = rheostat.inline(0.05 * row).at(points="resid_post", layers=layer)
    options["steering"] = direction
    if arm != CONTROLLER:
        return options
    probe = rheostat.probe(rheostat.inline(row), points="resid_post", layers=layer, name="own")
    return {**options, "probes": probe, "controller": "bench-stepped"}


async def stream_all(
    engine: rheostat.aio.Engine, wanted: Sequence[list[int]], tokens: int, arm: str
) -> list[Stream]:
    """An order: streams all prompts at the same time."""

    async def one(prompt: list[int]) -> Stream:
        began, times, count = time.monotonic(), [], 0
        async for event in engine.stream(prompt, **options):
            if isinstance(event, rheostat.Tokens):
                times.append(time.monotonic())
                count += len(event.token_ids)
        waits = [after - before for before, after in itertools.pairwise(times)]
        return Stream(began, times[0], times[-1], count, waits)

    options = options_of(arm, await engine.model(), tokens)
    return list(await asyncio.gather(*map(one, wanted)))


class _Stage:
    """A server, and the processes of its clients and its reader."""

    def __init__(
        self,
        pid: int,
        clients: Sequence[Worker[rheostat.aio.Engine]],
        reader: Worker[Reader],
    ) -> None:
        self._pid = pid
        self._clients = clients
        self._reader = reader

    def turn(self, arm: str, streams: int, tokens: int) -> Turn:
        """One turn of an arm."""
        wanted = prompts(streams, _PROMPT)
        columns = 0
        if arm in WATCHED:
            columns = self._reader.do(partial(Reader.open, arm=arm, requests=streams))
        orders = [
            partial(stream_all, wanted=share, tokens=tokens, arm=arm)
            for share in spread(wanted, self._clients)
        ]
        before, began = thread_times(self._pid), time.monotonic()
        parts = together(self._clients[: len(orders)], orders)
        read = self._reader.do(Reader.finish) if arm in WATCHED else Read()
        seconds, cpu = time.monotonic() - began, taken(before, thread_times(self._pid))
        if arm in (EVERY, GAINS):
            missing = streams * (_PROMPT + tokens - 1) - read.positions
            read = read._replace(lost=max(read.lost, missing))
        return figures([one for part in parts for one in part], read, cpu, seconds, columns)


def measure(
    turn: Callable[[str, int, int], Turn],
    streams: Sequence[int],
    tokens: int,
    repeats: int,
    save: Callable[[Mapping[str, Mapping[str, Sequence[Turn]]]], None],
) -> None:
    """Measures every arm at every number of streams, in alternating turns.

    Args:
        turn: runs a turn, given its arm, its number of streams, and the tokens of each stream.
        streams: the numbers of streams.
        tokens: tokens of each stream.
        repeats: turns of each arm and number of streams.
        save: is called with all turns so far, after each number of streams.
    """
    turns: dict[str, dict[str, list[Turn]]] = {arm: {} for arm in REFERENCES}
    for count in streams:
        for arm in REFERENCES:
            turn(arm, count, max(tokens, _WARM_UP))
        for repeat in range(repeats):
            for arm in list(REFERENCES)[:: 1 if repeat % 2 == 0 else -1]:
                turns[arm].setdefault(str(count), []).append(turn(arm, count, tokens))
        show(summary(turns), str(count))
        save(turns)


def summary(turns: Mapping[str, Mapping[str, Sequence[Turn]]]) -> Table:
    """Medians by arm and number of streams, compared with those of the arm's reference."""
    table: Table = {}
    for arm, by_count in turns.items():
        for count, some in by_count.items():
            row = {
                name: float(statistics.median(getattr(one, name) for one in some))
                for name in Turn._fields
            }
            row["lost"] = float(sum(one.lost for one in some))
            beside = table[REFERENCES[arm]][count] if arm != REFERENCES[arm] else row
            row["per_token_to_reference"] = row["per_token_ms"] / beside["per_token_ms"]
            row["server_cores_more"] = row["server_cores"] - beside["server_cores"]
            table.setdefault(arm, {})[count] = row
    return table


def show(table: Table, count: str) -> None:
    """Prints the medians of a number of streams."""
    print(f"\n{count} streams")
    for arm, by_count in table.items():
        row = by_count[count]
        print(
            f"{arm:36}{row['tokens_per_s']:8.0f} tokens/s{row['per_token_ms']:8.3f} ms "
            f"{row['per_token_to_reference'] - 1:+7.2%}, p99{row['p99_ms']:8.3f} ms, cores: "
            f"server{row['server_cores']:6.3f} ({row['server_cores_more']:+.3f}), "
            f"engine{row['engine_cores']:6.3f}, reader{row['reader_cores']:6.3f}; "
            f"{row['readings_per_s']:.0f} readings/s, {row['lost']:.0f} lost, "
            f"{row['gains_per_s']:.0f} gains/s",
            flush=True,
        )


def main() -> None:
    """Measures, prints the figures and writes `watched-SHAPE.json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser, default="qwen3-8b")
    add_client_argument(parser)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for the JSON")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--front-ends", type=int, default=1)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        scratch = Path(folder)
        model = chosen(arguments, scratch)
        if model.load_format == "dummy":
            copy_tokenizer(model.path)
        controllers.install(scratch / "plugins")
        config = server_config(model, engines=1, requests=max(arguments.streams))
        config = replace(config, skip_tokenizer_init=False)
        if device() == "cuda":
            config = replace(config, kv_cache_memory_bytes=_KV_BYTES)
        flags = [
            *server_flags(config, arguments.front_ends),
            "--controller=bench-stepped",
            "--controller-budget-ms=1000",
        ]
        log = arguments.out / f"watched-{model.name}.log"
        server = stack.enter_context(served_process(str(config.model), log, flags))
        with rheostat.connect(server.target) as engine:
            served = engine.model()
        clients = [
            stack.enter_context(Worker(partial(connected, server.target)))
            for _ in range(arguments.client_processes)
        ]
        reader = stack.enter_context(Worker(partial(reading, server.target)))
        about = {
            "benchmark": "watched",
            "measures": "streams whose every token is read by a watch, and steered by readings",
            **described(model, served.engine.runner),
            "compiled": served.engine.compiled,
            "client_processes": arguments.client_processes,
            "step_tokens": served.limits.step_tokens,
            "kv_cache_bytes": config.kv_cache_memory_bytes,
            "front_ends": arguments.front_ends,
            "prompt": _PROMPT,
            "tokens": arguments.tokens,
        }
        save = partial(_save, arguments.out / f"watched-{model.name}.json", about)
        stage = _Stage(server.pid, clients, reader)
        measure(stage.turn, arguments.streams, arguments.tokens, arguments.repeats, save)


def _save(
    path: Path, about: Mapping[str, object], turns: Mapping[str, Mapping[str, Sequence[Turn]]]
) -> None:
    """Writes the turns so far, so that an interrupted run keeps its measurements."""
    by_arm = {
        arm: {count: [one._asdict() for one in some] for count, some in by_count.items()}
        for arm, by_count in turns.items()
    }
    path.write_text(json.dumps({**about, "summary": summary(turns), "turns": by_arm}, indent=1))


if __name__ == "__main__":
    main()
