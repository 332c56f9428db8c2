"""Time per output token: stock vLLM beside the same engine with sites, idle and at work.

All engines live on one device, so that the arms can take turns; each arm's time is that of a batch
of generations less that of their prefill. The arms are pooled over the starts. Medians, ratios to
stock and the spread are written as JSON, the starts kept apart.

    python -m rheostat_server.bench.tpot --shape qwen3-8b --suite serving --out tpot.json
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rheostat_server.bench.arms import SUITES, Arm
from rheostat_server.bench.engines import Engines
from rheostat_server.bench.shapes import SHAPES, write_shape

_PROMPT = 32

Times = dict[str, dict[str, list[list[float]]]]
"""Milliseconds per output token, by arm, batch size, start and repeat."""


def measure(
    engines: Engines, arms: Sequence[Arm], batches: Sequence[int], *, tokens: int, repeats: int
) -> Times:
    """Times every arm; arms take turns."""
    starts = len(engines.stock)
    turns = [(arm, start) for start in range(starts) for arm in arms]
    times: Times = {
        arm.name: {str(batch): [[] for _ in range(starts)] for batch in batches} for arm in arms
    }

    def seconds(arm: Arm, start: int, batch: int, count: int) -> float:
        plans = arm.plans(engines.sites, batch)
        return engines.seconds(start, plans, batch=batch, prompt=_PROMPT, tokens=count)

    for batch in batches:
        for arm, start in turns:
            seconds(arm, start, batch, 4)
    for repeat in range(repeats):
        for batch in batches:
            first = repeat % len(turns)
            for arm, start in turns[first:] + turns[:first]:
                whole = seconds(arm, start, batch, tokens)
                prefill = seconds(arm, start, batch, 1)
                times[arm.name][str(batch)][start].append((whole - prefill) / (tokens - 1) * 1e3)
    return times


def summary(times: Times) -> dict[str, dict[str, dict[str, float]]]:
    """Median over all starts, least and most, and the ratio of the median to the first arm's."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    reference = next(iter(times.values()))
    for arm, by_batch in times.items():
        for batch, starts in by_batch.items():
            values = [value for start in starts for value in start]
            median = statistics.median(values)
            stock = statistics.median(value for start in reference[batch] for value in start)
            medians = [statistics.median(start) for start in starts]
            table.setdefault(arm, {})[batch] = {
                "median_ms": median,
                "min_ms": min(values),
                "max_ms": max(values),
                "to_stock": median / stock,
                "between_starts": max(medians) / min(medians),
            }
    return table


def show(table: dict[str, dict[str, dict[str, float]]], batches: Sequence[int]) -> None:
    """Prints the table."""
    heads = "".join(f"{f'bs {batch}':>18}" for batch in batches)
    print(f"{'ms per token (to stock)':24}{heads}")
    for arm, by_batch in table.items():
        cells = [by_batch[str(batch)] for batch in batches]
        row = "".join(f"{c['median_ms']:9.3f} ({(c['to_stock'] - 1) * 100:+5.2f}%)" for c in cells)
        print(f"{arm:24}{row}")


def main() -> None:
    """Measures, prints tables and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--out", type=Path, required=True, help="a folder: one file per suite")
    parser.add_argument("--suite", choices=sorted(SUITES), nargs="+", default=["serving"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--configuration-batch", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--starts", type=int, default=2)
    arguments = parser.parse_args()
    import torch
    import vllm

    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    arguments.out.mkdir(parents=True, exist_ok=True)
    widest = max(*arguments.batches, arguments.configuration_batch)
    with tempfile.TemporaryDirectory() as scratch:
        model = write_shape(arguments.shape, Path(scratch))
        options: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": "bfloat16",
            "max_model_len": 4096,
            "max_num_seqs": widest,
            "gpu_memory_utilization": 0.8 / (2 * arguments.starts),
            "enable_prefix_caching": False,
            "seed": 0,
            "disable_log_stats": True,
        }
        engines = Engines(model, scratch, device, arguments.starts, options)
        for suite in arguments.suite:
            batches = arguments.batches
            if suite == "configurations":
                batches = [arguments.configuration_batch]
            times = measure(
                engines,
                SUITES[suite],
                batches,
                tokens=arguments.tokens,
                repeats=arguments.repeats,
            )
            table = summary(times)
            result = {
                "benchmark": f"tpot, {suite}",
                "shape": arguments.shape,
                "device": machine,
                "vllm": vllm.__version__,
                "torch": torch.__version__,
                "runner": engines.sites.runner,
                "prompt_tokens": _PROMPT,
                "output_tokens": arguments.tokens,
                "repeats": arguments.repeats,
                "starts": arguments.starts,
                "summary": table,
                "times_ms": times,
            }
            (arguments.out / f"tpot-{arguments.shape}-{suite}.json").write_text(
                json.dumps(result, indent=1)
            )
            show(table, batches)
    os._exit(0)  # vLLM's engines have no public way to stop both in one process cleanly


if __name__ == "__main__":
    main()
