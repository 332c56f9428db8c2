"""Sweeps: how fast cells are computed, beside other ways to compute them, and what neighbours feel.

A sweep replaces one row of `resid_post` in each cell, at every layer and position of a prompt.
Its competitors: stock vLLM that computes as many whole prompts; the same cells as single requests,
one or 64 at a time; Hugging Face's model, one batch for each layer, from that layer on; and
TransformerLens on the CPU. All use one device, by turns. If a grid has more than `--cells` cells,
evenly spaced positions are taken. Single requests take a random part of the cells. A further sweep
takes many pairs of prompts and four groups of positions in one call.

A cell's tokens are those of its prompt, whether the prefix cache had some or not.

    rheostat bench sweeps --shape qwen3-8b --out results
    rheostat bench sweeps --shape qwen3-8b --arms neighbours --no-normal --budget 150 --out results
    rheostat bench sweeps --shape qwen3-8b --arms pairs --concurrency 256 --budget 225 --out results
    rheostat bench sweeps --shape tiny --same-weights --transformer-lens --out results
"""

import argparse
import json
import math
import os
import statistics
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import rheostat
from rheostat_bench.limits import Limits
from rheostat_bench.machine import add_model_arguments, chosen, described, server_config
from rheostat_bench.processes import Worker
from rheostat_bench.served import add_client_argument, address, serving, stock
from rheostat_bench.sweep_arms import (
    ARMS,
    PREFILL,
    SINGLES,
    SINGLES_64,
    Amounts,
    Bench,
    Beside,
    Measured,
    Result,
    Server,
    measure,
    measure_neighbours,
    profile,
)
from rheostat_bench.sweep_clients import connected
from rheostat_bench.sweep_references import (
    HuggingFace,
    hugging_face,
    transformer_lens,
    without_transformer_lens,
)
from rheostat_server.config import ServerConfig

_START = 300.0
"""Seconds that an engine has to start."""
_REQUESTS = 256
"""Requests that run at the same time at most, unless more cells should."""


_WITHOUT_STOCK = frozenset({"neighbours", "singles", "pairs"})
"""Arms that don't run stock vLLM."""

_BESIDE = (
    (PREFILL, "tokens_per_s", "share_of_prefill"),
    (SINGLES, "cells_per_s", "times_singles"),
    (SINGLES_64, "cells_per_s", "times_64_singles"),
)
"""Arms that the others stand beside: by which figure, and what the ratio is called."""


async def process_id(_server: object) -> int:
    """An order: the process that serves."""
    return os.getpid()


def summary(
    turns: Mapping[str, Mapping[str, Sequence[Result]]],
) -> dict[str, dict[str, dict[str, float]]]:
    """By arm and prompt length: medians of the turns, beside the device's own prefill."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for arm, by_length in turns.items():
        for length, some in by_length.items():
            row = {
                "cells": float(some[0].cells),
                "cells_per_s": statistics.median(one.cells / one.seconds for one in some),
                "tokens_per_s": statistics.median(one.tokens / one.seconds for one in some),
            }
            computed = [one.computed_tokens for one in some if one.computed_tokens is not None]
            if computed:
                row["computed_tokens_per_cell"] = computed[0] / some[0].cells
            errors = [one.answer_error for one in some if one.answer_error is not None]
            if errors:
                row["answer_error"] = max(errors)
            table.setdefault(arm, {})[length] = row
    for rows in table.values():
        for length, figures in rows.items():
            for arm, key, ratio in _BESIDE:
                if other := table.get(arm, {}).get(length):
                    figures[ratio] = figures[key] / other[key]
    return table


def show(measured: Measured) -> None:
    """Prints the medians."""
    print()
    table = summary(measured.turns)
    for arm, by_length in table.items():
        for length, row in by_length.items():
            error = f" error {row['answer_error']:.4f}" if "answer_error" in row else ""
            ratios = ""
            if "share_of_prefill" in row:
                ratios += f" {row['share_of_prefill']:6.1%} of prefill"
            if "times_singles" in row:
                ratios += f", {row['times_singles']:5.1f} x single"
            print(
                f"{arm:40}{length:>4} tokens {row['cells']:5.0f} cells"
                f"{row['cells_per_s']:8.1f} cells/s{row['tokens_per_s']:9.0f} tokens/s"
                f"{ratios}{error}"
            )
    for name, neighbours in measured.neighbours.items():
        median, p99, rate = (
            statistics.median(getattr(one, key) for one in neighbours)
            for key in ("median_ms", "p99_ms", "cells_per_s")
        )
        shares = [one.longer_share for one in neighbours if one.longer_share is not None]
        longer = f", {statistics.median(shares):.2%} longer" if shares else ""
        print(f"{name:70} median {median:6.2f} ms, p99 {p99:6.2f} ms{longer}, {rate:6.1f} cells/s")
    for name, kinds in measured.cpu_us_per_cell.items():
        some = sorted(kinds.items(), key=lambda item: -item[1])[:4]
        print(f"us of CPU, {name}: " + ", ".join(f"{kind} {value:.0f}" for kind, value in some))
    for step, reason in measured.failures.items():
        print(f"error: {step}: {reason[:120]}")


def save(path: Path, about: Mapping[str, object], measured: Measured) -> None:
    """Writes everything so far, so that a run which is cut short leaves what it has measured."""
    turns = {
        arm: {length: [one._asdict() for one in some] for length, some in by.items()}
        for arm, by in measured.turns.items()
    }
    content = {
        **about,
        "summary": summary(measured.turns),
        "neighbours": {
            name: [one._asdict() for one in some] for name, some in measured.neighbours.items()
        },
        "cpu_us_per_cell": measured.cpu_us_per_cell,
        "failures": measured.failures,
        "turns": turns,
    }
    path.write_text(json.dumps(content, indent=1))


def arguments_of(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_arguments(parser, default="qwen3-8b")
    add_client_argument(parser)
    parser.add_argument("--out", type=Path, required=True, help="a folder, for the JSON")
    parser.add_argument("--arms", choices=ARMS, nargs="+", default=ARMS, help="parts of the run")
    parser.add_argument("--lengths", type=int, nargs="+", default=[40, 200])
    parser.add_argument("--cells", type=int, default=2880, help="most cells of a grid")
    parser.add_argument("--singles", type=int, default=360, help="requests one at a time")
    parser.add_argument("--lens-cells", type=int, default=64, help="cells of TransformerLens")
    parser.add_argument("--long-prompts", type=int, default=64, help="of 2000 tokens")
    parser.add_argument("--pairs", type=int, default=64, help="of the sweep of many pairs")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32, help="neighbours")
    parser.add_argument("--tokens", type=int, default=1200, help="of a neighbour's stream")
    parser.add_argument("--turns", type=int, default=2, help="of the neighbours")
    parser.add_argument("--beside", type=int, default=64, help="cells at a time beside neighbours")
    parser.add_argument(
        "--normal",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="neighbours of a sweep that is not in the background, too",
    )
    parser.add_argument("--front-ends", type=int)
    parser.add_argument("--same-weights", action="store_true", help="and compare the cells")
    parser.add_argument("--transformer-lens", action="store_true")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds of the run")
    parser.add_argument("--py-spy", type=Path, help="records a profile with this program")
    return parser.parse_args(given)


def start(
    stack: ExitStack,
    config: ServerConfig,
    reference: Worker[HuggingFace] | None,
    clients: int,
    limits: Limits,
    arms: Collection[str],
) -> dict[str, Any]:
    """Starts stock vLLM if an arm needs it, the server and the clients."""
    competitor = None
    if not _WITHOUT_STOCK.issuperset(arms):
        competitor = stack.enter_context(Worker(partial(stock, config), parent=True))
    worker = stack.enter_context(Worker(partial(serving, config), parent=True))
    target = limits.ask_one(worker, address, _START)
    pid = limits.ask_one(worker, process_id, _START)
    try:
        if competitor is not None:
            limits.ask_one(competitor, process_id, _START)
    except Exception as error:  # sweeps tell something without it, too
        print(f"error: stock vLLM: {type(error).__name__}: {error}", flush=True)
    client = partial(connected, target)
    return {
        "server": Server(worker, target, pid),
        "stock": competitor,
        "hugging_face": reference,
        "sweeper": stack.enter_context(Worker(client)),
        "clients": [stack.enter_context(Worker(client)) for _ in range(clients)],
    }


def main() -> None:
    """Measures, prints the figures and writes `sweeps-SHAPE.json`."""
    arguments = arguments_of()
    if arguments.transformer_lens and (reason := without_transformer_lens()):
        raise SystemExit(reason)
    limits = Limits(arguments.budget)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = chosen(arguments, Path(folder))
        shape = json.loads((model.path / "config.json").read_text())
        dummy = model.load_format == "dummy"
        same = arguments.same_weights or not dummy
        reference = None
        if same or "references" in arguments.arms:
            reference = stack.enter_context(
                Worker(partial(hugging_face, model.path, model.dtype, random=dummy))
            )
        if reference is not None and same and dummy:
            reference.do(partial(HuggingFace.save, path=model.path))
            model = model._replace(load_format="auto")
        requests = max(_REQUESTS, *arguments.concurrency)
        config = server_config(model, engines=3, requests=requests)
        # Prompts and answers are token ids.
        config = replace(config, skip_tokenizer_init=True, front_ends=arguments.front_ends)
        clients = arguments.client_processes
        started = start(stack, config, reference, clients, limits, arguments.arms)
        lens = None
        if arguments.transformer_lens:
            lens = stack.enter_context(Worker(partial(transformer_lens, model.path)))
        with rheostat.connect(started["server"].target) as engine:
            served = engine.model()
        about = {
            "benchmark": "sweeps",
            "measures": "cells of sweeps in a second, beside other ways to compute them",
            **described(model, served.engine.runner),
            "compiled": served.engine.compiled,
            "layers": shape["num_hidden_layers"],
            "weights": "the same for all" if same else "random",
            "client_processes": arguments.client_processes,
            "step_tokens": served.limits.step_tokens,
        }
        path = arguments.out / f"sweeps-{model.name}.json"
        bench = Bench(
            layers=shape["num_hidden_layers"],
            transformer_lens=lens,
            same_weights=same,
            limits=limits,
            save=partial(save, path, about),
            **started,
        )
        amounts = Amounts(
            arguments.cells,
            arguments.singles,
            arguments.lens_cells,
            arguments.long_prompts,
            arguments.concurrency,
            arguments.repeats,
            arguments.pairs,
        )
        first, at_once = arguments.lengths[0], arguments.concurrency
        beside = Beside(
            arguments.streams, arguments.tokens, arguments.turns, first, arguments.beside
        )
        neighbours = partial(measure_neighbours, bench, beside, normal=arguments.normal)
        measure(bench, arguments.lengths, amounts, neighbours, arguments.arms)
        if arguments.py_spy is not None:
            out = arguments.out / f"sweeps-{model.name}-spy.txt"
            record = partial(profile, bench, arguments.py_spy, first, max(at_once), out)
            bench.attempt("profile", record)
        show(bench.measured)


if __name__ == "__main__":
    main()
