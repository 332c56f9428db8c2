"""What a user gets: stock vLLM in process, vLLM's OpenAI server and this server, side by side.

All engines are on one device, with the same model, and take turns. They have the same arguments,
but each has its own defaults for the tokens of a step and its CUDA graphs; stock's are those of
`vllm serve`. Each turn is a number of streams that begin together. The figures are those of the
clients: tokens per second of all streams, time per token of a stream, and time to the first token.
Another workload of one token for each request gives requests per second.

vLLM's OpenAI server runs once for each number of `--api-servers`, and this server once for each
number of `--front-ends`. Clients share `--client-processes` processes.

Two starts of one engine can differ more than two engines. With `--starts` all engines are started
several times. `server-FRONT_ENDS.log` is the log of this server's last start. It has the time and
the memory that its CUDA graphs took.

    rheostat bench sidebyside --shape qwen3-8b --out results
    rheostat bench sidebyside --shape qwen3-8b --out results --starts 6 --streams 256 --arms idle
    rheostat bench sidebyside --out results --same-prompts \
        --arms "one layer steered" "one layer, one gate" "one layer, a gate per request"

What a step takes also depends on its texts: with 256 streams, turns of one arm differ by 4 %. An
open gate changes no text, so with `--same-prompts` a gate is compared on equal texts.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import numpy as np

import rheostat
from rheostat_bench.machine import Model, add_model_arguments, chosen, described, server_config
from rheostat_bench.processes import Worker, together
from rheostat_bench.served import Stock, add_client_argument, prompts, stock
from rheostat_bench.served_process import copy_tokenizer, served_process, unused_port
from rheostat_bench.turns import Streamed, Turn, streamed, turn
from rheostat_bench.watching import Watcher, watching
from rheostat_server.config import ServerConfig

_PROMPT = 32
_ONE_TOKEN = "requests of one token"
_ONE_TOKEN_TIMES = 4
"""These requests at a time, for each stream of the largest turn."""
_OWN_OPTIONS = frozenset({"front-ends", "spool", "port"})
"""Flags of `rheostat serve` that the benchmark chooses for each of its servers."""
_STARTUP = 300.0
"""Seconds that vLLM's OpenAI server has to start."""

STOCK = "AsyncLLM in process"
IDLE = "idle"
STEERED_ONE, STEERED_ALL = "one layer steered", "all layers steered"
CAPTURED, SUBSCRIBED = "one layer captured, in the answer", "one layer captured, to a subscriber"
LAST_PROMPT = "all layers captured, last prompt token"
ARMS = (IDLE, STEERED_ONE, STEERED_ALL, CAPTURED, SUBSCRIBED, LAST_PROMPT)
"""Kinds of requests that this server is measured with."""
ONE_GATE, OWN_GATES = "one layer, one gate", "one layer, a gate per request"
GATED_ARMS = (ONE_GATE, OWN_GATES)
"""Optional kinds: as `STEERED_ONE`, under an open gate that reads one number in the layer before.
All requests have the same gate, or each has its own."""
STEERED_ARMS = (STEERED_ONE, STEERED_ALL, *GATED_ARMS)
"""Kinds whose requests find no KV of the other kinds."""


class Options:
    """What the requests of each arm ask for. The vectors are those of `store_vectors`."""

    def __init__(self, layer: int) -> None:
        """Single layers are `layer`."""
        one = rheostat.named("one", points="resid_post", layers=layer)
        every = rheostat.named("all", points="resid_post", layers="all")
        last = rheostat.positions(-1)
        self._layer = layer
        self._alike: dict[str, dict[str, Any]] = {
            STEERED_ONE: {"steering": [one * 0.05]},
            STEERED_ALL: {"steering": [every * 0.05]},
            ONE_GATE: {"steering": [gated(layer, 0.0)]},
            CAPTURED: {"capture": rheostat.Capture("resid_post", layers=layer)},
            LAST_PROMPT: {"capture": rheostat.Capture("resid_post", layers="all", where=last)},
        }

    def of(self, arm: str) -> dict[str, Any]:
        """What an arm's next request asks for. With `OWN_GATES`, each call returns another gate."""
        if arm == OWN_GATES:
            return {"steering": [gated(self._layer, 1e9 * random.random())]}
        return self._alike.get(arm, {})


def gated(layer: int, lower: float) -> rheostat.Intervention:
    """The vector of `STEERED_ONE` under an open gate. `lower` makes gates that differ."""
    probe = rheostat.probe(rheostat.named("all", points="resid_post", layers=layer - 1))
    one = rheostat.named("one", points="resid_post", layers=layer)
    return (one * 0.05).when(probe.above(-1e9 - lower))


class Client:
    """A process's client of one server. Its methods are orders."""

    def __init__(self, engine: rheostat.aio.Engine, layer: int) -> None:
        """Streams from `engine`; single layers are `layer`."""
        self._engine = engine
        self._options = Options(layer)

    async def run(self, arm: str, wanted: Sequence[list[int]], tokens: int) -> list[Streamed]:
        """Streams all prompts at the same time."""

        async def one(prompt: list[int]) -> Streamed:
            options = self._options.of(arm)
            began, moments = time.monotonic(), list[float]()
            stream = self._engine.stream(
                prompt, max_tokens=tokens, temperature=0, ignore_eos=True, **options
            )
            async for event in stream:
                if isinstance(event, rheostat.Tokens):
                    moments += [time.monotonic()] * len(event.token_ids)
            (sample,) = (await stream.result()).samples
            rows = sum(len(site_rows) for site_rows in sample.activations.values())
            return streamed(began, moments, len(moments), rows)

        return list(await asyncio.gather(*map(one, wanted)))


@asynccontextmanager
async def streaming(target: str, layer: int) -> AsyncIterator[Client]:
    """A client with a connection of its own."""
    async with rheostat.aio.connect(target) as engine:
        yield Client(engine, layer)


class HttpClient:
    """A process's client of vLLM's OpenAI server. Its methods are orders."""

    def __init__(self, port: int) -> None:
        """Streams from a server on this machine."""
        self._port = port

    async def run(self, wanted: Sequence[list[int]], tokens: int) -> list[Streamed]:
        """Streams all prompts at the same time."""

        async def one(prompt: list[int]) -> Streamed:
            request = {"model": "m", "prompt": prompt, "stream": True, "max_tokens": tokens}
            body = json.dumps(request | {"temperature": 0, "ignore_eos": True}).encode()
            head = (
                "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
            )
            began, moments = time.monotonic(), list[float]()
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(head.encode() + body)
            async for line in reader:
                if line.startswith(b"data: {"):
                    moments.append(time.monotonic())  # a chunk, mostly of one token
                elif line.startswith(b"data: [DONE]"):
                    break
            writer.close()
            return streamed(began, moments, max(len(moments), tokens))

        return list(await asyncio.gather(*map(one, wanted)))


@asynccontextmanager
async def http_client(port: int) -> AsyncIterator[HttpClient]:
    """A client of vLLM's OpenAI server."""
    yield HttpClient(port)


async def run_stock(engine: Stock, wanted: Sequence[list[int]], tokens: int) -> list[Streamed]:
    """An order: streams all prompts at the same time, in process."""

    async def one(prompt: list[int]) -> Streamed:
        began, moments = time.monotonic(), list[float]()
        async for output in engine.stream(prompt, tokens):
            moments += [time.monotonic()] * len(output.outputs[0].token_ids)
        return streamed(began, moments, len(moments))

    return list(await asyncio.gather(*map(one, wanted)))


Run = Callable[[list[list[int]], int], Turn]
"""Streams prompts with so many tokens each, at the same time."""


@contextmanager
def openai_server(config: ServerConfig, api_servers: int, log: Path) -> Iterator[int]:
    """vLLM's OpenAI server, with the engine's arguments of `config`; yields its port."""
    port = unused_port()
    flags = {
        "--port": port,
        "--served-model-name": "m",
        "--api-server-count": api_servers,
        "--load-format": config.load_format,
        "--dtype": config.dtype,
        "--max-model-len": config.max_model_len,
        "--max-num-seqs": config.max_num_seqs,
        "--max-num-batched-tokens": config.max_num_batched_tokens,
        "--seed": config.seed,
        "--gpu-memory-utilization": config.gpu_memory_utilization,
        "--kv-cache-memory-bytes": config.kv_cache_memory_bytes,
        "--block-size": config.block_size,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", config.model]
    for flag, value in flags.items():
        command += [] if value is None else [flag, str(value)]
    command += ["--disable-log-stats", "--disable-uvicorn-access-log"]
    command += ["--enforce-eager"] if config.enforce_eager else []
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + _STARTUP
        while time.monotonic() < deadline:
            with suppress(URLError, OSError), urlopen(f"http://127.0.0.1:{port}/health"):
                break
            if process.poll() is not None:
                raise RuntimeError(log.read_text(errors="replace")[-4000:])
            time.sleep(1)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def spread(prompts: list[list[int]], workers: Sequence[Worker[Any]]) -> list[list[list[int]]]:
    """The prompts of each of the first workers, none of which has none."""
    return [prompts[number :: len(workers)] for number in range(min(len(workers), len(prompts)))]


def runs_of_stock(engine: Worker[Stock]) -> dict[str, Run]:
    """Stock vLLM in a process of its own, which is its only client."""

    def run(wanted: list[list[int]], tokens: int) -> Turn:
        return turn(engine.do(partial(run_stock, wanted=wanted, tokens=tokens)), 0, 0)

    return {STOCK: run}


def runs_of_openai(name: str, clients: Sequence[Worker[HttpClient]]) -> dict[str, Run]:
    """vLLM's OpenAI server."""

    def run(wanted: list[list[int]], tokens: int) -> Turn:
        orders = [
            partial(HttpClient.run, wanted=share, tokens=tokens)
            for share in spread(wanted, clients)
        ]
        streams = together(clients[: len(orders)], orders)
        return turn([stream for part in streams for stream in part], 0, 0)

    return {name: run}


def runs_of_server(
    name: str,
    clients: Sequence[Worker[Client]],
    watcher: Worker[Watcher],
    model: rheostat.ModelInfo,
    arms: Sequence[str],
) -> dict[str, Run]:
    """This server, idle and with everything that is asked of it."""
    layer = model.layer_count // 2
    # Rows that come too fast wait on disk. By default they would end the subscription.
    options = rheostat.SubscribeOptions(
        every=True, capture=rheostat.Capture("resid_post", layers=layer), overload="spill"
    )

    def run(arm: str, wanted: list[list[int]], tokens: int) -> Turn:
        if arm == SUBSCRIBED:
            watcher.do(partial(Watcher.open, options=options, requests=len(wanted)))
        orders = [
            partial(Client.run, arm=arm, wanted=share, tokens=tokens)
            for share in spread(wanted, clients)
        ]
        streams = [stream for part in together(clients[: len(orders)], orders) for stream in part]
        watched = watcher.do(Watcher.finish).rows if arm == SUBSCRIBED else 0
        rows = sum(len(prompt) + tokens - 1 for prompt in wanted)
        wanted_rows = {
            CAPTURED: rows,
            SUBSCRIBED: rows,
            LAST_PROMPT: model.layer_count * len(wanted),
        }
        return turn(streams, wanted_rows.get(arm, 0), watched)

    return {f"{name}, {arm}": partial(run, arm) for arm in arms}


def store_vectors(target: str) -> rheostat.ModelInfo:
    """Stores the vectors that the steered arms name; returns the model."""
    drawn = np.random.default_rng(0)
    with rheostat.connect(target) as engine:
        model = engine.model()
        layers = range(model.layer_count)
        one = drawn.standard_normal((1, model.width), dtype="f")
        every = drawn.standard_normal((model.layer_count, model.width), dtype="f")
        engine.vectors.put(one, points="resid_post", layers=model.layer_count // 2, name="one")
        engine.vectors.put(every, points="resid_post", layers=layers, name="all")
    return model


def measure(
    runs: Mapping[str, Run],
    streams: Sequence[int],
    tokens: int,
    repeats: int,
    turns: dict[str, dict[str, list[Turn]]],
    save: Callable[[Mapping[str, Mapping[str, Sequence[Turn]]]], None],
    *,
    prompt: int = _PROMPT,
    same_prompts: bool = False,
) -> None:
    """Times every arm at every number of streams; arms take turns.

    Args:
        runs: the arms, by name.
        streams: the numbers of streams.
        tokens: tokens of each stream.
        repeats: turns of each arm and workload.
        turns: gets the turns, by arm and workload, behind those of earlier starts.
        save: is called with all turns so far after each workload.
        prompt: tokens of each prompt.
        same_prompts: whether all arms of a repeat get the same prompts.
    """
    workloads = [(str(count), count, tokens) for count in streams]
    workloads.append((_ONE_TOKEN, _ONE_TOKEN_TIMES * max(streams), 1))
    for workload, count, length in workloads:
        for run in runs.values():
            run(prompts(count, prompt), length)
        for repeat in range(repeats):
            shared = prompts(count, prompt)
            for name in list(runs)[:: 1 if repeat % 2 == 0 else -1]:
                found = runs[name](shared if same_prompts else prompts(count, prompt), length)
                turns.setdefault(name, {}).setdefault(workload, []).append(found)
        show(turns, workload)
        save(turns)


def summary(
    turns: Mapping[str, Mapping[str, Sequence[Turn]]],
) -> dict[str, dict[str, dict[str, float]]]:
    """Medians by arm and workload, and the share of stock's tokens (or requests) per second."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for name, by_workload in turns.items():
        for workload, some in by_workload.items():
            row = {
                field: float(statistics.median(getattr(result, field) for result in some))
                for field in Turn._fields
            }
            row["lost_rows"] = float(sum(result.lost_rows for result in some))
            table.setdefault(name, {})[workload] = row
    for by_name in table.values():
        for workload, row in by_name.items():
            stock_row = table[STOCK][workload]
            row["share"] = row["tokens_per_s"] / stock_row["tokens_per_s"]
            row["first_token_later_ms"] = row["first_token_ms"] - stock_row["first_token_ms"]
            if stock_row["per_token_ms"]:
                for measure in ("per_token", "second_half_per_token", "together_per_token"):
                    if stock_row[f"{measure}_ms"]:
                        to_stock = row[f"{measure}_ms"] / stock_row[f"{measure}_ms"]
                        row[f"{measure}_to_stock"] = to_stock
    return table


def show(turns: Mapping[str, Mapping[str, Sequence[Turn]]], workload: str) -> None:
    """Prints the medians of a workload."""
    some = {name: {workload: by[workload]} for name, by in turns.items() if workload in by}
    print(f"\n{workload}" if workload == _ONE_TOKEN else f"\n{workload} streams")
    for name, by_workload in summary(some).items():
        row = by_workload[workload]
        per_token = row.get("per_token_to_stock", 1.0)
        together = row.get("together_per_token_to_stock", 1.0)
        print(
            f"{name:64}{row['tokens_per_s']:8.0f} tokens/s {row['share']:7.1%}"
            f"{row['per_token_ms']:8.3f} ms {per_token - 1:+7.2%} (all run {together - 1:+7.2%})"
            f"{row['first_token_ms']:8.0f} ms first{row['requests_per_s']:7.0f} requests/s"
            f"{row['lost_rows']:8.0f} lost",
            flush=True,
        )


def main() -> None:
    """Measures, prints the figures and writes `sidebyside-SHAPE.json`."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser, default="qwen3-8b")
    add_client_argument(parser)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for the JSON")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--prompt", type=int, default=_PROMPT, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--front-ends", type=int, nargs="+", default=[1, 6])
    parser.add_argument("--api-servers", type=int, nargs="*", default=[1, 6])
    parser.add_argument("--arms", nargs="+", choices=(*ARMS, *GATED_ARMS), default=ARMS)
    parser.add_argument("--starts", type=int, default=1, help="of each engine")
    parser.add_argument(
        "--options",
        nargs="*",
        default=[],
        help="of this server alone: flags of `rheostat serve` without --, such as seed=1",
    )
    parser.add_argument(
        "--same-prompts",
        action="store_true",
        help="all arms of a repeat get the same prompts; only for steered arms, whose KV differs",
    )
    arguments = parser.parse_args()
    unsteered = [arm for arm in arguments.arms if arm not in STEERED_ARMS]
    if arguments.same_prompts and unsteered:
        parser.error(f"--same-prompts: requests would find each other's KV: {', '.join(unsteered)}")
    if refused := _OWN_OPTIONS.intersection(option.split("=")[0] for option in arguments.options):
        parser.error(f"--options: the benchmark itself sets {', '.join(sorted(refused))}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    turns: dict[str, dict[str, list[Turn]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = chosen(arguments, scratch)
        if model.load_format == "dummy":
            copy_tokenizer(model.path)  # every engine makes text of its tokens, as users want it
        engines = 1 + len(arguments.front_ends) + len(arguments.api_servers)
        most = max(arguments.streams)
        held = most * (arguments.prompt + arguments.tokens)
        config = server_config(model, engines=engines, requests=most, tokens=held)
        calls = max(config.maximum_concurrent_rpcs, _ONE_TOKEN_TIMES * most)
        config = replace(config, skip_tokenizer_init=False, maximum_concurrent_rpcs=calls)
        for start in range(arguments.starts):
            own = scratch / str(start)
            own.mkdir()
            _measure_start(config, model, own, arguments, start, turns)


def _measure_start(
    config: ServerConfig,
    model: Model,
    scratch: Path,
    arguments: argparse.Namespace,
    start: int,
    turns: dict[str, dict[str, list[Turn]]],
) -> None:
    """Starts all engines, adds their turns to `turns`, and ends them."""
    with ExitStack() as stack:
        engine = stack.enter_context(Worker(partial(stock, config), parent=True))
        stock_step_tokens = engine.do(Stock.read_step_tokens)
        runs, served = _start(stack, engine, config, scratch, arguments)
        about = {
            "benchmark": "sidebyside",
            "measures": "what clients get of stock vLLM, vLLM's OpenAI server, and this server",
            **described(model, served.engine.runner),
            "compiled": served.engine.compiled,
            "client_processes": arguments.client_processes,
            "prompt": arguments.prompt,
            "tokens": arguments.tokens,
            "step_tokens": served.limits.step_tokens,
            "stock_step_tokens": stock_step_tokens,
            "options": arguments.options,
            "starts": start + 1,
            "repeats": arguments.repeats,
            "same_prompts": arguments.same_prompts,
        }
        path = arguments.out / f"sidebyside-{model.name}.json"
        save = partial(_save, path, about)
        measure(
            runs,
            arguments.streams,
            arguments.tokens,
            arguments.repeats,
            turns,
            save,
            prompt=arguments.prompt,
            same_prompts=arguments.same_prompts,
        )


def _save(
    path: Path, about: Mapping[str, object], turns: Mapping[str, Mapping[str, Sequence[Turn]]]
) -> None:
    """Writes the turns so far, so that a run which is cut short leaves what it has measured."""
    by_arm = {
        name: {workload: [result._asdict() for result in some] for workload, some in by.items()}
        for name, by in turns.items()
    }
    path.write_text(json.dumps({**about, "summary": summary(turns), "turns": by_arm}, indent=1))


def _start(
    stack: ExitStack,
    engine: Worker[Stock],
    config: ServerConfig,
    scratch: Path,
    arguments: argparse.Namespace,
) -> tuple[dict[str, Run], rheostat.ModelInfo]:
    """Starts all other engines, one after the other, and their clients. `engine` is stock's."""
    runs = runs_of_stock(engine)

    def clients(state: Callable[[], Any]) -> list[Worker[Any]]:
        return [stack.enter_context(Worker(state)) for _ in range(arguments.client_processes)]

    for count in arguments.api_servers:
        log = scratch / f"openai-{count}.log"
        port = stack.enter_context(openai_server(config, count, log))
        name = f"vLLM's OpenAI server, {_counted(count, 'process', 'processes')}"
        runs |= runs_of_openai(name, clients(partial(http_client, port)))
    served: rheostat.ModelInfo | None = None
    for count in arguments.front_ends:
        log = arguments.out / f"server-{count}.log"
        spooled = replace(config, spool=str(scratch / f"spool-{count}"))
        flags = server_flags(spooled, count) + [f"--{option}" for option in arguments.options]
        process = served_process(str(config.model), log, flags)
        target = stack.enter_context(process).target
        served = store_vectors(target)
        watcher = stack.enter_context(Worker(partial(watching, target)))
        streamers = clients(partial(streaming, target, served.layer_count // 2))
        name = f"this server, {_counted(count, 'front end', 'front ends')}"
        runs |= runs_of_server(name, streamers, watcher, served, arguments.arms)
    assert served is not None, "there is at least one"
    return runs, served


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def server_flags(config: ServerConfig, front_ends: int) -> list[str]:
    """The arguments of `rheostat serve` for the engine of a config."""
    flags = {
        "--load-format": config.load_format,
        "--dtype": config.dtype,
        "--max-model-len": config.max_model_len,
        "--max-num-seqs": config.max_num_seqs,
        "--max-num-batched-tokens": config.max_num_batched_tokens,
        "--gpu-memory-utilization": config.gpu_memory_utilization,
        "--front-ends": front_ends,
        "--maximum-concurrent-rpcs": config.maximum_concurrent_rpcs,
        "--spool": config.spool,
    }
    if config.kv_cache_memory_bytes is not None:
        flags["--kv-cache-memory-mib"] = config.kv_cache_memory_bytes >> 20
    given = [f"{flag}={value}" for flag, value in flags.items() if value is not None]
    return [*given, *(["--enforce-eager"] if config.enforce_eager else [])]


if __name__ == "__main__":
    main()
