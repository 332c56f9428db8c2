"""A batch in which every request brings a vector that the engine has never seen, end to end.

What is timed is the whole of it: the way of the vectors into the workers, prefill and all tokens.
The server loads the vectors of each request by a call of its own as it arrives; the arms "together"
load those of the batch by one call, which shows what the calls cost beside the bytes. Making a
vector and its digest, and the way from a client, are not part of it.

    python -m rheostat_server.bench.inline --shape qwen3-8b --out results
"""

import argparse
import hashlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rheostat_engine import Act, Kind, ModelSites, Plan
from rheostat_server.bench.arms import EVERYWHERE, act, middle, posts
from rheostat_server.bench.engines import Engines, Ran, Vectors
from rheostat_server.bench.machine import (
    Model,
    add_model_arguments,
    chosen,
    described,
    device,
    engine_options,
    leave,
)
from rheostat_server.bench.summaries import Table, Times, empty, summary

_PROMPT = 32
_WARM_UP = 150
"""Tokens of the first batch of each arm, enough for a set of sites to get a graph of its own."""


@dataclass(frozen=True)
class Arm:
    """One way to run a batch."""

    name: str
    """What the table calls it."""
    where: Callable[[ModelSites], list[int]] | None = None
    """Where its requests are steered; None: nowhere."""
    fresh: bool = False
    """Whether each of them brings a vector, with a row per site."""
    together: bool = False
    """Whether one call loads them all."""


ARMS = (
    Arm("stock"),
    Arm("one resident vector, one layer", middle),
    Arm("one resident vector, all layers", posts),
    Arm("a new vector each, one layer", middle, fresh=True),
    Arm("a new vector each, all layers", posts, fresh=True),
    Arm("a new vector each, all layers, together", posts, fresh=True, together=True),
)
"""What is measured; the first is the reference."""


def brought(sites: list[int], width: int, rng: np.random.Generator) -> tuple[Vectors, Plan]:
    """A new vector with a row for each of these sites, and the plan that adds it there."""
    values = rng.normal(0, 0.01, (len(sites), width)).astype("<f4")
    digest = hashlib.sha256(values.tobytes()).digest()
    rows = tuple((site, (row,)) for row, site in enumerate(sites))
    return {digest: values}, Plan("", (Act(Kind.ADD, (digest,), rows, EVERYWHERE),))


def run(
    engines: Engines, arm: Arm, start: int, batch: int, tokens: int, rng: np.random.Generator
) -> Ran:
    """One batch of an arm; its vectors are taken from the workers afterwards, off the clock."""
    prompts = engines.prompts(batch, _PROMPT)
    if arm.where is None:
        return engines.run(start, prompts, None, tokens=tokens)
    sites = arm.where(engines.sites)
    if not arm.fresh:
        plan = Plan("", (act(Kind.ADD, sites),))
        return engines.run(start, prompts, [plan] * batch, tokens=tokens)
    made = [brought(sites, engines.sites.width, rng) for _ in range(batch)]
    each = [vectors for vectors, _ in made]
    every = {digest: values for vectors in each for digest, values in vectors.items()}
    plans = [plan for _, plan in made]
    loads = [every] if arm.together else each
    ran = engines.run(start, prompts, plans, tokens=tokens, loads=loads)
    engines.drop(start, list(every))
    return ran


def measure(engines: Engines, batch: int, *, starts: int, tokens: int, repeats: int) -> Times:
    """Times every arm on so many of the starts; arms take turns."""
    rng = np.random.default_rng(1)
    turns = [(arm, start) for start in range(starts) for arm in ARMS]
    times = empty([arm.name for arm in ARMS], [batch], starts)
    for arm, start in turns:
        run(engines, arm, start, batch, _WARM_UP, rng)
    for repeat in range(repeats):
        first = repeat % len(turns)
        for arm, start in turns[first:] + turns[:first]:
            seconds = run(engines, arm, start, batch, tokens, rng).seconds
            times[arm.name][str(batch)][start].append(seconds * 1e3)
    return times


def report(
    engines: Engines, model: Model, out: Path, *, batch: int, starts: int, tokens: int, repeats: int
) -> None:
    """Measures, prints the table and writes `inline.json`."""
    times = measure(engines, batch, starts=starts, tokens=tokens, repeats=repeats)
    table = summary(times)
    result = {
        "benchmark": "inline",
        "measures": "the whole of a batch, end to end and not per token: loading its vectors "
        "into the workers, prefill and all tokens",
        **described(model, engines.sites.runner),
        "prompt_tokens": _PROMPT,
        "output_tokens": tokens,
        "repeats": repeats,
        "starts": starts,
        "summary": table,
        "times_ms": times,
    }
    (out / "inline.json").write_text(json.dumps(result, indent=1))
    show(table)


def show(table: Table) -> None:
    """Prints the table."""
    print(f"{'ms of the whole generation':42}{'median':>10}  (to stock)")
    for arm, by_batch in table.items():
        for cell in by_batch.values():
            print(f"{arm:42}{cell['median_ms']:10.1f}  ({(cell['to_stock'] - 1) * 100:+.2f}%)")


def main() -> None:
    """Starts engines and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser, default="qwen3-8b")
    parser.add_argument("--out", type=Path, required=True, help="a folder, for inline.json")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--starts", type=int, default=2)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = chosen(arguments, Path(scratch))
        options = engine_options(
            model,
            engines=2 * arguments.starts,
            requests=arguments.batch,
            enable_prefix_caching=False,
        )
        engines = Engines(model.path, scratch, device(), arguments.starts, options)
        report(
            engines,
            model,
            arguments.out,
            batch=arguments.batch,
            starts=arguments.starts,
            tokens=arguments.tokens,
            repeats=arguments.repeats,
        )
    leave()


if __name__ == "__main__":
    main()
