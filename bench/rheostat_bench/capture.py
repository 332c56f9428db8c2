"""Cost of capturing, and speed of rows compared with the fastest copies off the device.

Three things. The way itself: plain copies from the device to pinned memory, the fastest that there
is. The outlet: the engine's own hand-over of rows, alone and beside a device that computes. The
engine: the time to the first token of one request that captures one layer of its prompt, and a
batch of long prompts that captures every layer, with the rows that found no room. What capturing
costs per generated token is in `tpot`, suite `capture`.

Sampled tokens leave the device the same way, behind the rows that are under way. So each of this is
measured with few pieces of rows under way, as the engine does it, and with all of a step's at once.

    rheostat bench capture --shape qwen3-8b --out results
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rheostat_bench.arms import EVERYWHERE, middle, posts
from rheostat_bench.engines import Engines
from rheostat_bench.machine import (
    add_model_arguments,
    chosen,
    described,
    device,
    engine_options,
    leave,
)
from rheostat_bench.shapes import SHAPES
from rheostat_engine import Capture, ModelSites, Plan
from rheostat_engine.channel.events import RowsHead
from rheostat_engine.channel.staging import StagingReader
from rheostat_engine.worker.transport.event_sender import Fence, Frame
from rheostat_engine.worker.transport.row_sender import Group, RowSender
from rheostat_engine.worker.transport.staging_area import StagingArea

_MIB = 1 << 20
ALONE = 512
"""Tokens of the prompt of one request alone."""
LONG = 1024
"""Tokens of each prompt of the batch."""
REQUESTS = 8
"""Prompts of the batch."""
_COPIES = 20
_SIZES = (1 * _MIB, 32 * _MIB, 256 * _MIB)
"""Bytes that are copied at once: about a step of decoding at one layer, at all, and a prefill."""

UNPACED = 0
"""Pieces in flight of an engine that launches all copies of a step's rows at once."""
_TOKENS_BESIDE = 300_000
"""Rows of a step beside whose copies sampled tokens leave: 2.4 GB at a width of 4,096."""
_STEPS = 10

Copies = dict[str, dict[str, float]]
"""GB/s by way and bytes of one copy."""


@dataclass(frozen=True)
class Arm:
    """What the requests capture of their prompts."""

    name: str
    """What the table calls it."""
    where: Callable[[ModelSites], list[int]] | None
    """Sites; None: nothing, by stock vLLM."""
    length: int
    """Tokens of each prompt."""
    requests: int
    """How many arrive together."""
    engine: int = 0
    """Which of the engines with sites runs them; 1: the one that is `UNPACED`."""


ARMS = (
    Arm("stock, 512 tokens alone", None, ALONE, 1),
    Arm("idle, 512 tokens alone", lambda sites: [], ALONE, 1),
    Arm("one layer, 512 tokens alone", middle, ALONE, 1),
    Arm("all layers, 512 tokens alone", posts, ALONE, 1),
    Arm("stock, 8 of 1,024 tokens", None, LONG, REQUESTS),
    Arm("idle, 8 of 1,024 tokens", lambda sites: [], LONG, REQUESTS),
    Arm("one layer, 8 of 1,024 tokens", middle, LONG, REQUESTS),
    Arm("all layers, 8 of 1,024 tokens", posts, LONG, REQUESTS),
    Arm("all layers, 8 of 1,024 tokens, all pieces at once", posts, LONG, REQUESTS, engine=1),
)
"""The measured workloads; the reference of each is the stock arm above it."""


class _Sent:
    """Takes the place of the way to the server: rows end in pinned memory, and go from there."""

    def __init__(self, area: StagingArea) -> None:
        self._reader = StagingReader(area.report(0))

    def send(self, frame: Frame) -> None:
        head = frame.head
        if isinstance(head, RowsHead) and head.staging_range is not None:
            with self._reader.taken(head.staging_range):
                pass

    def close(self) -> None:
        pass


def copies(width: int, dtype: torch.dtype) -> Copies:
    """GB/s off the device, by way and size; on a CPU there is no such way."""
    found: Copies = {"plain copies": {}, "the outlet": {}, "the outlet, busy device": {}}
    stream = torch.cuda.Stream()
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(a)
    for size in _SIZES:
        rows = torch.zeros(size // (width * dtype.itemsize), width, device="cuda", dtype=dtype)
        host = torch.empty(rows.shape, dtype=dtype, pin_memory=True)

        def plain(rows: torch.Tensor = rows, host: torch.Tensor = host) -> Fence | None:
            with torch.cuda.stream(stream):
                host.copy_(rows, non_blocking=True)
            return None

        area = StagingArea(2 * size, rows.device)
        row_sender = RowSender(_Sent(area), rows.device, area, scratch=1)  # type: ignore[arg-type]  # all of it that is used
        head = RowsHead(0, "", width, [], b"", b"", b"", b"")

        def through(
            row_sender: RowSender = row_sender, head: RowsHead = head, rows: torch.Tensor = rows
        ) -> Fence | None:
            return row_sender.send_rows(head, rows, [Group(None, len(rows))])

        def beside(through: Callable[[], Fence | None] = through) -> Fence | None:
            torch.matmul(a, a, out=product)
            return through()

        for name, one in (
            ("plain copies", plain),
            ("the outlet", through),
            ("the outlet, busy device", beside),
        ):
            found[name][str(size)] = _rate(one, size)
        row_sender.close()
    return found


def token_delays(width: int, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """How long sampled tokens take off the device beside the rows of one step, by pieces in flight.

    Milliseconds from the end of the step's computing to the tokens on the host, median and most,
    and GB/s until the step's last row is on the host.
    """
    rows = torch.zeros(_TOKENS_BESIDE, width, device="cuda", dtype=dtype)
    tokens = torch.zeros(128, device="cuda", dtype=torch.int64)
    sampled = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(a)
    stream = torch.cuda.Stream()
    found: dict[str, dict[str, float]] = {}
    for in_flight in (0, 1, 2, 4):
        area = StagingArea(2 * rows.nbytes, rows.device)
        row_sender = RowSender(_Sent(area), rows.device, area, scratch=1, in_flight=in_flight)  # type: ignore[arg-type]  # all of it that is used
        head = RowsHead(0, "", width, [], b"", b"", b"", b"")
        delays, rates = [], []
        for _ in range(_STEPS):
            computed, arrived = torch.cuda.Event(), torch.cuda.Event()
            for _ in range(4):
                torch.matmul(a, a, out=product)
            begun = time.perf_counter()
            fence = row_sender.send_rows(head, rows, [Group(None, len(rows))])
            time.sleep(0.001)  # the sampler's turn; by then the outlet has launched what it may
            computed.record()
            stream.wait_event(computed)
            with torch.cuda.stream(stream):
                sampled.copy_(tokens, non_blocking=True)
                arrived.record(stream)
            computed.synchronize()
            over = time.perf_counter()
            arrived.synchronize()
            delays.append((time.perf_counter() - over) * 1e3)
            fence.synchronize()
            rates.append(rows.nbytes / (time.perf_counter() - begun) / 1e9)
        row_sender.close()
        found[str(in_flight)] = {
            "median_ms": statistics.median(delays),
            "most_ms": max(delays),
            "gb_per_s": statistics.median(rates),
        }
    return found


def _rate(copy: Callable[[], Fence | None], size: int) -> float:
    """GB/s of the copies themselves, by the device's clock where it computes besides."""

    def copies(count: int) -> None:
        for fence in [copy() for _ in range(count)]:
            if fence is not None:
                fence.synchronize()
        torch.cuda.synchronize()

    copies(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        copies(_COPIES)
    took = sum(e.time_range.elapsed_us() for e in seen.events() if "Memcpy DtoH" in e.name)
    return size * _COPIES / float(took) / 1e3


def measure(engines: Engines, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Milliseconds to the first token of an arm's median request and of the whole batch, and rows.

    Arms take turns.
    """
    found: dict[str, list[dict[str, float]]] = {arm.name: [] for arm in ARMS}
    row_bytes = engines.sites.width * getattr(torch, engines.sites.dtype).itemsize

    def run(arm: Arm) -> dict[str, float]:
        prompts = engines.prompts(arm.requests, arm.length)
        plans: list[Plan | None] | None = None
        sites: Sequence[int] = ()
        if arm.where is not None:
            sites = arm.where(engines.sites)
            captures = (Capture(tuple(sites), EVERYWHERE),) if sites else ()
            plans = [Plan("", (), captures) if sites else None] * arm.requests
        begun = time.perf_counter()
        ran = engines.run(arm.engine, prompts, plans, tokens=1)
        return {
            "first_token_ms": statistics.median(ran.first_token) * 1e3,
            "batch_ms": ran.seconds * 1e3,
            "until_last_row_ms": (time.perf_counter() - begun) * 1e3,
            "bytes": arm.requests * arm.length * len(sites) * row_bytes,
            "lost_rows": ran.lost_rows,
        }

    for arm in ARMS:
        run(arm)
        run(arm)
    for repeat in range(repeats):
        first = repeat % len(ARMS)
        for arm in (*ARMS[first:], *ARMS[:first]):
            found[arm.name].append(run(arm))
    return found


def summary(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians over the repeats, beside the stock arm of the same prompts."""
    table: dict[str, dict[str, float]] = {}
    stock: dict[str, float] = {}
    for arm in ARMS:
        row = {name: statistics.median(ran[name] for ran in found[arm.name]) for name in _NAMES}
        if arm.where is None:
            stock = row
        table[arm.name] = row | {
            "first_token_more_ms": row["first_token_ms"] - stock["first_token_ms"],
            "batch_to_stock": row["batch_ms"] / stock["batch_ms"],
            "gb_per_s": row["bytes"] / row["until_last_row_ms"] / 1e6,
        }
    return table


_NAMES = ("first_token_ms", "batch_ms", "until_last_row_ms", "bytes", "lost_rows")


def show(
    copied: Copies, delays: dict[str, dict[str, float]], table: dict[str, dict[str, float]]
) -> None:
    """Prints the figures."""
    for in_flight, row in delays.items():
        print(
            f"tokens beside a step's rows, {in_flight} pieces in flight (0: all): "
            f"{row['median_ms']:.2f} ms, at most {row['most_ms']:.2f} ms; "
            f"rows {row['gb_per_s']:.1f} GB/s"
        )
    for name, by_size in copied.items():
        cells = "".join(f"{int(size) // _MIB:>6} MiB {gb:6.1f}" for size, gb in by_size.items())
        print(f"{name:52} GB/s{cells}")
    for name, row in table.items():
        print(
            f"{name:52} first token {row['first_token_ms']:8.2f} ms "
            f"({row['first_token_more_ms']:+6.2f}), batch {row['batch_ms']:8.1f} ms "
            f"({row['batch_to_stock'] * 100 - 100:+6.1f} %), until the last row "
            f"{row['until_last_row_ms']:8.1f} ms, {row['gb_per_s']:5.2f} GB/s, "
            f"lost {row['lost_rows']:.0f}"
        )


def main() -> None:
    """Measures, prints the figures and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser, default="qwen3-8b")
    parser.add_argument("--out", type=Path, required=True, help="a folder, for capture.json")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {}
    copied: Copies = {}
    delays: dict[str, dict[str, float]] = {}
    if device() == "cuda" and arguments.model is None:
        width = int(str(SHAPES[arguments.shape]["hidden_size"]))
        copied = copies(width, torch.bfloat16)
        delays = token_delays(width, torch.bfloat16)
        torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory() as scratch:
        model = chosen(arguments, Path(scratch))
        options = engine_options(
            model,
            engines=3,
            requests=REQUESTS,
            enable_prefix_caching=False,
            disable_log_stats=False,
            max_num_batched_tokens=LONG * REQUESTS,
        )
        engines = Engines(
            model.path,
            scratch,
            device(),
            1,
            options,
            capture_bytes=4 << 30,
            copies_in_flight=[UNPACED],
        )
        found = measure(engines, arguments.repeats)
        table = summary(found)
        result = {
            "benchmark": "capture",
            **described(model, engines.sites.runner),
            "repeats": arguments.repeats,
            "copies_gb_per_s": copied,
            "tokens_beside_rows": delays,
            "summary": table,
            "repeated": found,
        }
        (arguments.out / "capture.json").write_text(json.dumps(result, indent=1))
        show(copied, delays, table)
    leave()


if __name__ == "__main__":
    main()
