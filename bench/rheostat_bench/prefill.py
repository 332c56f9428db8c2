"""Time to the first token of long prompts: steered with gates, without gates, and stock vLLM.

A step computes thousands of tokens of a prompt, and a gate may depend on all readings before each.
So the gates differ in how much of the prompt they need at each token: its own reading, all readings
so far, the openings before, or nothing until the prompt's end. All gates are open, so that the same
rows are added as without gates, except before the prompt's end by the last one.

    rheostat bench prefill --shape qwen3-8b --out results
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rheostat_bench.arms import STOCK, Arm, act, alike, behind_the_first, gated
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
from rheostat_engine import Hold, Kind, Pool


class Batch(NamedTuple):
    """Prompts that arrive together."""

    prompts: int
    tokens: int
    """Of each prompt."""

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"{self.prompts} x {self.tokens}"


def arms(tokens: int) -> tuple[Arm, ...]:
    """The arms for prompts of so many tokens."""
    where, low = behind_the_first, -1e9
    return (
        STOCK,
        Arm("steered", alike(lambda sites: [act(Kind.ADD, where(sites))])),
        Arm("gate of the token itself", gated(1, where, low)),
        Arm("gate of the mean so far", gated(1, where, low, pool=Pool.MEAN)),
        Arm("gate held for 8 tokens", gated(1, where, low, hold=Hold.TOKENS)),
        Arm(
            "gate decided by the prompt",
            gated(1, where, low, pool=Pool.MEAN, hold=Hold.REST, decided_at=tokens - 1),
        ),
    )


def measure(engines: Engines, batches: Sequence[Batch], repeats: int) -> Times:
    """Milliseconds to the first token of the slowest request of each batch; arms take turns."""
    times = empty([arm.name for arm in arms(1)], [], 1)
    for batch in batches:
        turns = arms(batch.tokens)
        for repeat in range(-1, repeats):  # the first turn warms up
            first = max(repeat, 0) % len(turns)
            for arm in turns[first:] + turns[:first]:
                prompts = engines.prompts(batch.prompts, batch.tokens)
                ran = engines.run(0, prompts, arm.plans(engines.sites, batch.prompts), tokens=1)
                if repeat >= 0:
                    own = times[arm.name].setdefault(batch.name, [[]])
                    own[0].append(max(ran.first_token) * 1e3)
    return times


def show(table: Table) -> None:
    """Prints the table, with each arm beside stock vLLM and beside steering without gates."""
    ungated = list(table.values())[1]
    for arm, by_batch in table.items():
        cells = "".join(
            f"{name:>12}: {one['median_ms']:8.2f} ms ({(one['to_stock'] - 1) * 100:+6.2f}%, "
            f"{(one['median_ms'] / ungated[name]['median_ms'] - 1) * 100:+6.2f}%)"
            for name, one in by_batch.items()
        )
        print(f"{arm:28}{cells}")


def main() -> None:
    """Measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser, default="qwen3-8b")
    parser.add_argument("--out", type=Path, required=True, help="a folder, for prefill.json")
    parser.add_argument(
        "--prompts", type=int, nargs=2, action="append", metavar=("COUNT", "TOKENS")
    )
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    batches = [Batch(*pair) for pair in arguments.prompts or ((8, 1024), (1, 8192))]
    longest = max(batch.tokens for batch in batches)
    with tempfile.TemporaryDirectory() as scratch:
        model = chosen(arguments, Path(scratch))
        options = engine_options(
            model,
            engines=2,
            requests=max(batch.prompts for batch in batches),
            enable_prefix_caching=False,
            disable_log_stats=False,
            max_model_len=longest + 32,
            max_num_batched_tokens=max(batch.prompts * batch.tokens for batch in batches),
        )
        engines = Engines(model.path, scratch, device(), 1, options)
        times = measure(engines, batches, arguments.repeats)
        table = summary(times)
        result = {
            "benchmark": "prefill under gates",
            **described(model, engines.sites.runner),
            "repeats": arguments.repeats,
            "summary": table,
            "median_ms": {
                arm: {name: statistics.median(one[0]) for name, one in by_batch.items()}
                for arm, by_batch in times.items()
            },
            "times_ms": times,
        }
        (arguments.out / "prefill.json").write_text(json.dumps(result, indent=1))
        show(table)
    leave()


if __name__ == "__main__":
    main()
