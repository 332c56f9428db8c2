"""Time per output token: stock vLLM beside the same engine with sites, idle and at work.

All engines live on one device, so that the arms can take turns; each arm's time is that of a batch
of generations less that of their prefill. Two starts of the same engine differ by about a percent,
so each kind is started several times and the arms are pooled over the starts. Medians, ratios to
stock and the spread are written as JSON, the starts kept apart.

    python -m rheostat_server.bench.tpot --shape qwen3-8b --out tpot.json
"""

import argparse
import asyncio
import hashlib
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rheostat_engine import (
    EXTRA_ARG,
    OPEN_END,
    Addition,
    Capture,
    EngineSettings,
    ModelSites,
    Plan,
    Point,
    Released,
    Site,
    WorkerChannel,
    engine_kwargs,
)
from rheostat_server.bench.shapes import SHAPES, write_shape

if TYPE_CHECKING:
    pass

_PROMPT = 32
_VECTOR = hashlib.sha256(b"bench").digest()


class _Releases:
    """Counts what the workers let go of."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.count = 0

    def __call__(self, event: object) -> None:
        if isinstance(event, Released):
            with self._changed:
                self.count += 1
                self._changed.notify_all()

    def wait_for(self, count: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.count >= count, 60):
                raise TimeoutError(f"{self.count} of {count} requests were released")


class _Arms:
    """The two engines and what they are asked to do."""

    def __init__(
        self, model: Path, scratch: str, device: str, starts: int, options: dict[str, Any]
    ) -> None:
        from vllm import LLM

        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, daemon=True).start()
        self._releases = _Releases()
        self.stock: list[LLM] = []
        self.sited: list[LLM] = []
        for start in range(starts):
            self.stock.append(LLM(model=str(model), **options))
            settings = EngineSettings(channel=f"ipc://{scratch}/channel-{start}")
            channel = WorkerChannel(settings, ranks=1)
            channel.start(loop, self._releases)
            extension = engine_kwargs(settings, device="cuda" if device == "cuda" else "cpu")
            self.sited.append(LLM(model=str(model), **options, **extension))  # type: ignore[arg-type]  # vLLM's own types
        reports = self.sited[0].collective_rpc("rheostat_describe")
        self.sites = ModelSites.from_reports(reports)
        vector = np.full((self.sites.num_layers, self.sites.width), 0.01, "<f4")
        data = {_VECTOR.hex(): (list(vector.shape), vector.tobytes())}
        for engine in self.sited:
            engine.collective_rpc("rheostat_load_vectors", args=(data,))
        self._made = 0

    def plan(self, arm: str) -> Plan | None:
        layers = range(self.sites.num_layers)
        middle = self.sites.num_layers // 2
        everywhere = ((0, OPEN_END),)
        posts = [Site(Point.RESID_POST, layer).index for layer in layers]
        if arm == "steered, one layer":
            return Plan("", (Addition(_VECTOR, ((posts[middle], 0),), 1.0, everywhere),))
        if arm == "steered, all layers":
            rows = tuple(zip(posts, layers, strict=True))
            return Plan("", (Addition(_VECTOR, rows, 1.0, everywhere),))
        if arm == "captured, one layer":
            return Plan("", (), (Capture((posts[middle],), everywhere),))
        return None

    def seconds(self, arm: str, start: int, batch: int, prompt: int, tokens: int) -> float:
        """How long a batch of generations takes, from submission to the last token."""
        from vllm import SamplingParams

        plan = self.plan(arm)
        prompts, params = [], []
        for i in range(batch):
            self._made += 1
            ids = [(7 * i + 13 * j + self._made) % 1000 + 5 for j in range(prompt)]
            extra = None
            if plan is not None:
                named = Plan(f"b{self._made}", plan.additions, plan.captures)
                extra = {EXTRA_ARG: named.to_wire()}
            prompts.append({"prompt_token_ids": ids})
            params.append(
                SamplingParams(
                    temperature=0,
                    max_tokens=tokens,
                    ignore_eos=True,
                    detokenize=False,
                    extra_args=extra,
                )
            )
        engine = (self.stock if arm == "stock" else self.sited)[start]
        released = self._releases.count
        begun = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]  # plain token prompts
        taken = time.perf_counter() - begun
        if plan is not None:
            self._releases.wait_for(released + batch)
        return taken


ARMS = ("stock", "idle", "steered, one layer", "steered, all layers", "captured, one layer")


def measure(
    arms: _Arms, batches: Sequence[int], *, tokens: int, repeats: int
) -> dict[str, dict[str, list[list[float]]]]:
    """Milliseconds per output token, by arm, batch size, start and repeat; arms take turns."""
    turns = [(arm, start) for start in range(len(arms.stock)) for arm in ARMS]
    times: dict[str, dict[str, list[list[float]]]] = {
        arm: {str(batch): [[] for _ in arms.stock] for batch in batches} for arm in ARMS
    }
    for batch in batches:
        for arm, start in turns:
            arms.seconds(arm, start, batch, _PROMPT, 4)
    for repeat in range(repeats):
        for batch in batches:
            first = repeat % len(turns)
            for arm, start in turns[first:] + turns[:first]:
                whole = arms.seconds(arm, start, batch, _PROMPT, tokens)
                prefill = arms.seconds(arm, start, batch, _PROMPT, 1)
                times[arm][str(batch)][start].append((whole - prefill) / (tokens - 1) * 1e3)
    return times


def summary(
    times: dict[str, dict[str, list[list[float]]]],
) -> dict[str, dict[str, dict[str, float]]]:
    """Median over all starts, least and most, and the ratio of the median to stock's."""
    table: dict[str, dict[str, dict[str, float]]] = {}
    for arm, by_batch in times.items():
        for batch, starts in by_batch.items():
            values = [value for start in starts for value in start]
            median = statistics.median(values)
            stock = statistics.median(value for start in times["stock"][batch] for value in start)
            medians = [statistics.median(start) for start in starts]
            table.setdefault(arm, {})[batch] = {
                "median_ms": median,
                "min_ms": min(values),
                "max_ms": max(values),
                "to_stock": median / stock,
                "between_starts": max(medians) / min(medians),
            }
    return table


def main() -> None:
    """Measures, prints a table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--starts", type=int, default=2)
    arguments = parser.parse_args()
    import torch
    import vllm

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as scratch:
        model = write_shape(arguments.shape, Path(scratch))
        options: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "dtype": "bfloat16",
            "max_model_len": 4096,
            "max_num_seqs": max(arguments.batches),
            "gpu_memory_utilization": 0.8 / (2 * arguments.starts),
            "enable_prefix_caching": False,
            "seed": 0,
            "disable_log_stats": True,
        }
        arms = _Arms(model, scratch, device, arguments.starts, options)
        times = measure(arms, arguments.batches, tokens=arguments.tokens, repeats=arguments.repeats)
    table = summary(times)
    result = {
        "benchmark": "tpot",
        "shape": arguments.shape,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "runner": arms.sites.runner,
        "prompt_tokens": _PROMPT,
        "output_tokens": arguments.tokens,
        "repeats": arguments.repeats,
        "starts": arguments.starts,
        "summary": table,
        "times_ms": times,
    }
    arguments.out.write_text(json.dumps(result, indent=1))
    print(
        f"{'ms per token (to stock)':24}" + "".join(f"{f'bs {b}':>18}" for b in arguments.batches)
    )
    for arm in ARMS:
        cells = [table[arm][str(b)] for b in arguments.batches]
        print(
            f"{arm:24}"
            + "".join(f"{c['median_ms']:9.3f} ({(c['to_stock'] - 1) * 100:+5.2f}%)" for c in cells)
        )
    os._exit(0)  # vLLM's engines have no public way to stop both in one process cleanly


if __name__ == "__main__":
    main()
