"""Time of batches whose requests bring vectors that are new to the engine, end to end.

What is timed is the whole of it: the way of the vectors into the workers, prefill and all tokens.
They are loaded as the server loads those of a burst of requests: together, in calls of at most
`CALL_BYTES`, each vector once. Making a vector, its digest and its norms, and the way from a
client, are not part of it.

    rheostat bench inline --shape qwen3-8b --out results
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rheostat_bench.arms import EVERYWHERE, act, middle, posts
from rheostat_bench.engines import Engines, Ran, Vectors
from rheostat_bench.machine import (
    Model,
    add_model_arguments,
    chosen,
    described,
    device,
    engine_options,
    leave,
)
from rheostat_bench.summaries import Table, Times, empty, summary
from rheostat_engine import Act, Kind, ModelSites, Plan
from rheostat_server.limits import CALL_BYTES

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
    new: int = 0
    """How many new vectors the batch brings, with a row per site; at most one for each request."""


_EACH = sys.maxsize

ARMS = (
    Arm("stock"),
    Arm("one resident vector, one layer", middle),
    Arm("one resident vector, all layers", posts),
    Arm("16 new vectors, one layer", middle, 16),
    Arm("16 new vectors, all layers", posts, 16),
    Arm("a new vector each, one layer", middle, _EACH),
    Arm("a new vector each, all layers", posts, _EACH),
)
"""The measured arms; the first is the reference."""


def brought(sites: list[int], width: int, rng: np.random.Generator) -> tuple[Vectors, Plan]:
    """A new vector with a row for each of these sites, and the plan that adds it there."""
    values = rng.normal(0, 0.01, (len(sites), width)).astype("<f4")
    digest = hashlib.sha256(values.tobytes()).digest()
    rows = tuple((site, (row,)) for row, site in enumerate(sites))
    return {digest: values}, Plan("", (Act(Kind.ADD, (digest,), rows, EVERYWHERE),))


def in_calls(made: Iterable[Vectors], most: int = CALL_BYTES) -> list[Vectors]:
    """Vectors, call by call, so many bytes or one of `made` each."""
    calls: list[dict[bytes, npt.NDArray[np.float32]]] = []
    room = -1
    for vectors in made:
        size = sum(vector.nbytes for vector in vectors.values())
        if size > room:
            calls.append({})
            room = most
        calls[-1].update(vectors)
        room -= size
    return list(calls)


def run(
    engines: Engines, arm: Arm, start: int, batch: int, tokens: int, rng: np.random.Generator
) -> Ran:
    """One batch of an arm; its vectors are taken from the workers afterwards, off the clock."""
    prompts = engines.prompts(batch, _PROMPT)
    if arm.where is None:
        return engines.run(start, prompts, None, tokens=tokens)
    sites = arm.where(engines.sites)
    if not arm.new:
        plan = Plan("", (act(Kind.ADD, sites),))
        return engines.run(start, prompts, [plan] * batch, tokens=tokens)
    made = [brought(sites, engines.sites.width, rng) for _ in range(min(arm.new, batch))]
    plans = [made[i % len(made)][1] for i in range(batch)]
    loads = in_calls(vectors for vectors, _ in made)
    ran = engines.run(start, prompts, plans, tokens=tokens, loads=loads)
    engines.drop(start, [digest for vectors in loads for digest in vectors])
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
