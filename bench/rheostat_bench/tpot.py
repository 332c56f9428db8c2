"""Time per output token: stock vLLM beside the same engine with sites, idle and steered.

All engines live on one device, so that the arms can take turns. A batch's time per token is the
median over its requests of the time between first and last token, by vLLM's own clock in the
engine's process. The arms are pooled over the starts. Medians, ratios to stock and the spread are
written as JSON, the starts kept apart. Engines take minutes to start on a GPU: several suites, and
the benchmark of inline vectors, can share them.

    rheostat bench tpot --shape qwen3-8b --suite serving ops --inline --out results
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rheostat_bench import controllers, inline
from rheostat_bench.arms import PROMPT, SUITES, Arm
from rheostat_bench.engines import Engines
from rheostat_bench.machine import (
    add_model_arguments,
    chosen,
    described,
    device,
    engine_options,
    leave,
)
from rheostat_bench.summaries import Table, Times, empty, summary

_WARM_UP = 150
"""Tokens of the first batch of each arm, enough for a set of sites to get a graph of its own."""


def measure(
    engines: Engines,
    arms: Sequence[Arm],
    batches: Sequence[int],
    *,
    tokens: int,
    repeats: int,
    save: Callable[[Times, Mapping[str, int]], None],
) -> None:
    """Times every arm, and counts the captured rows that it lost; arms take turns.

    Calls `save` with both after each repeat, so that a run that is cut off keeps what it has.
    """
    starts = len(engines.stock)
    turns = [(arm, start) for start in range(starts) for arm in arms]
    times = empty([arm.name for arm in arms], batches, starts)
    lost = {arm.name: 0 for arm in arms}

    def milliseconds(arm: Arm, start: int, batch: int, count: int) -> float:
        plans = arm.plans(engines.sites, batch)
        ran = engines.run(start, engines.prompts(batch, PROMPT), plans, tokens=count)
        lost[arm.name] += ran.lost_rows
        return statistics.median(ran.per_token) * 1e3

    for batch in batches:
        for arm, start in turns:
            milliseconds(arm, start, batch, _WARM_UP)
    for repeat in range(repeats):
        for batch in batches:
            first = repeat % len(turns)
            for arm, start in turns[first:] + turns[:first]:
                taken = milliseconds(arm, start, batch, tokens)
                times[arm.name][str(batch)][start].append(taken)
        save(times, lost)


def save_result(
    path: Path, about: Mapping[str, object], times: Times, lost_rows: Mapping[str, int]
) -> None:
    """Writes the settings and all times so far as JSON. Every arm has as many repeats."""
    (repeats,) = {len(first) for by_batch in times.values() for (first, *_) in by_batch.values()}
    result = {
        **about,
        "repeats": repeats,
        "summary": summary(times),
        "times_ms": times,
        "lost_rows": lost_rows,
    }
    path.write_text(json.dumps(result, indent=1))


def show(table: Table, batches: Sequence[int]) -> None:
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
    add_model_arguments(parser, default="qwen3-8b")
    parser.add_argument("--out", type=Path, required=True, help="a folder: one file per suite")
    parser.add_argument("--suite", choices=sorted(SUITES), nargs="*", default=["serving"])
    parser.add_argument(
        "--inline", action="store_true", help="also what `inline` measures, on one of the starts"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--configuration-batch", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--starts", type=int, default=2)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    widest = max(*arguments.batches, arguments.configuration_batch)
    with tempfile.TemporaryDirectory() as scratch:
        model = chosen(arguments, Path(scratch))
        options = engine_options(
            model,
            engines=2 * arguments.starts,
            requests=widest,
            enable_prefix_caching=False,
            disable_log_stats=False,
        )
        plugins = list(controllers.PLUGINS) if "controllers" in arguments.suite else []
        if plugins:
            controllers.install(Path(scratch) / "plugins")
        engines = Engines(
            model.path, scratch, device(), arguments.starts, options, controllers=plugins
        )
        for suite in arguments.suite:
            batches = arguments.batches
            if suite == "configurations":
                batches = [arguments.configuration_batch]
            path = arguments.out / f"tpot-{model.name}-{suite}.json"
            about = {
                "benchmark": f"tpot, {suite}",
                **described(model, engines.sites.runner),
                "prompt_tokens": PROMPT,
                "output_tokens": arguments.tokens,
                "starts": arguments.starts,
            }
            measure(
                engines,
                SUITES[suite],
                batches,
                tokens=arguments.tokens,
                repeats=arguments.repeats,
                save=partial(save_result, path, about),
            )
            show(json.loads(path.read_text())["summary"], batches)
        if arguments.inline:
            inline.report(
                engines,
                model,
                arguments.out,
                batch=arguments.configuration_batch,
                starts=1,
                tokens=arguments.tokens,
                repeats=arguments.repeats,
            )
    leave()


if __name__ == "__main__":
    main()
