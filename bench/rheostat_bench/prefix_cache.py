"""The prefix cache under steering: hit rates, and time to the first token.

Requests that share a long prompt and differ in its tail arrive together, in three states of the
cache: "unread" (every prompt is computed whole), "cold" (the cache is empty; requests find what the
first of them computes) and "warm" (the shared prompt has run before). Stock vLLM is the reference.
A hit rate counts the shared tokens that the requests found in the cache. Only whole blocks are
cached, so it can't exceed the part of them that lies in blocks that the requests have in common.

    rheostat bench prefix_cache --shape qwen3-8b --out results
    rheostat bench prefix_cache --shape qwen3-8b --arms unfired-gate --repeats 2 --out results

Without the arm "stock", stock vLLM is not started, which halves the time until the first batch.
"""

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rheostat_bench.arms import EVERYWHERE, act, posts
from rheostat_bench.engines import ROWS, Engines, Ran
from rheostat_bench.machine import (
    add_model_arguments,
    chosen,
    described,
    device,
    engine_options,
    leave,
)
from rheostat_bench.summaries import Figures
from rheostat_engine import (
    OPEN_END,
    Act,
    Activation,
    Band,
    Combine,
    Form,
    Gate,
    GateCondition,
    Hold,
    Kind,
    ModelSites,
    Normalise,
    Plan,
    Pool,
    Reading,
    Spans,
)

SHARED = 1500
"""Tokens that the prompts have in common."""
TAIL = 20
"""Tokens of each prompt that are its own."""
MIDDLE = SHARED // 2
"""Position from which on the requests of one arm are steered."""
REQUESTS = 24
"""Requests that arrive together."""
STATES = ("unread", "cold", "warm")
"""States of the cache, in the order in which each repeat goes through them."""

Samples = dict[str, dict[str, list[float]]]
"""Numbers by arm, state of the cache and repeat."""


@dataclass(frozen=True)
class Arm:
    """One way to steer the requests."""

    key: str
    """What the command line calls it."""
    name: str
    """What the table calls it."""
    plan: Callable[[ModelSites, int], Plan | None]
    """What request number i does."""
    warmed_alike: bool = False
    """Whether the shared prompt is steered too when it runs before them; else it runs plain."""
    shared: int = SHARED
    """How many tokens, from the first on, are the same and touched alike in all requests."""
    stock: bool = False
    """Whether stock vLLM runs them."""


def _pair(sites: ModelSites, row: int, spans: Spans) -> tuple[Act, ...]:
    """An addition and an ablation at every layer."""
    at = posts(sites)
    bands = (Band(0.0, 0.0, 1.0),)
    return (
        act(Kind.ADD, at, row, spans=spans),
        act(Kind.PULL, at, (row + 1) % ROWS, spans=spans, bands=bands),
    )


def _from(position: int) -> Callable[[ModelSites, int], Plan]:
    """Every request with rows of its own, from a position on."""
    spans = ((position, OPEN_END),)
    return lambda sites, i: Plan("", _pair(sites, 2 * i, spans))


def _late_gate(sites: ModelSites, i: int) -> Plan:
    """Every request with a row of its own, under a gate that its last prompt token leaves shut."""
    last = SHARED + TAIL - 1
    reading = Reading(Normalise.UNIT, Activation.IDENTITY, 0.0, 0.0, 0)
    where = ((last, last + 1),)
    read = replace(act(Kind.READ, posts(sites)[-1:], spans=where), reading=reading)
    condition = GateCondition((0,), Pool.LAST, Combine.ANY, 1e9 + i, math.inf, 1, last)
    gate = Gate((condition,), Combine.ALL, Form.STEP, 0.5, 0.0, Hold.REST, late=last + 1)
    return Plan("", (replace(act(Kind.ADD, posts(sites), i), gate=gate), read))


ARMS = (
    Arm("stock", "stock", lambda sites, i: None, stock=True),
    Arm("unsteered", "unsteered", lambda sites, i: None),
    Arm(
        "alike",
        "steered alike",
        lambda sites, i: Plan("", _pair(sites, 0, EVERYWHERE)),
        warmed_alike=True,
    ),
    Arm("decode-only", "decode-only, each another", _from(SHARED + TAIL)),
    Arm("from-middle", "from the middle, each another", _from(MIDDLE), shared=MIDDLE),
    Arm("unfired-gate", "late gate that stays shut", _late_gate),
)
"""All arms; the first is the reference."""


def run(engines: Engines, arm: Arm, state: str) -> Ran:
    """Brings an engine's cache into a state, then runs the requests of an arm to their first token.

    An "unread" batch leaves blocks behind, so the cache is emptied before every batch.
    """
    (prefix,) = engines.prompts(1, SHARED)
    prompts = [prefix + tail for tail in engines.prompts(REQUESTS, TAIL)]
    plans = None if arm.stock else [arm.plan(engines.sites, i) for i in range(REQUESTS)]
    engines.forget_prompts(0, stock=arm.stock)
    if state == "warm":
        before = [plans[0] if arm.warmed_alike else None] if plans else None
        engines.run(0, [prefix], before, tokens=1)
    return engines.run(0, prompts, plans, tokens=1, read_cache=state != "unread")


def measure(engines: Engines, arms: Sequence[Arm], repeats: int) -> tuple[Samples, Samples]:
    """Tokens that each batch found in the cache, and how long its median request waited.

    The wait is that for the first token, in milliseconds. Arms take turns.
    """
    cached: Samples = {arm.name: {state: [] for state in STATES} for arm in arms}
    first_token: Samples = {arm.name: {state: [] for state in STATES} for arm in arms}
    for arm in arms:
        for state in STATES:
            run(engines, arm, state)
    for repeat in range(repeats):
        first = repeat % len(arms)
        for arm in [*arms[first:], *arms[:first]]:
            for state in STATES:
                ran = run(engines, arm, state)
                cached[arm.name][state].append(sum(ran.cached))
                first_token[arm.name][state].append(statistics.median(ran.first_token) * 1e3)
    return cached, first_token


def most(shared: int, block: int) -> float:
    """The best hit rate there can be when requests are alike in so many of the shared tokens."""
    return min(shared, SHARED) // block * block / SHARED


def figures(cached: Samples, first_token: Samples) -> Figures:
    """Hit rates over all requests and repeats, and times to the first token.

    A time is the median over the repeats, in milliseconds. The gains say how many times sooner the
    first token comes with a warm cache than with a cold and an unread one. If stock vLLM was
    measured, `warm_to_stock` compares the warm time with its time.
    """
    table: Figures = {}
    reference = first_token.get(ARMS[0].name)
    for arm, states in cached.items():
        row: dict[str, float] = {}
        for state, found in states.items():
            times = first_token[arm][state]
            row[f"hit_rate_{state}"] = sum(found) / (len(found) * REQUESTS * SHARED)
            row[f"ttft_{state}_ms"] = statistics.median(times)
            row[f"ttft_{state}_min_ms"] = min(times)
            row[f"ttft_{state}_max_ms"] = max(times)
        warm = row["ttft_warm_ms"]
        row["gain_over_cold"] = row["ttft_cold_ms"] / warm
        row["gain_over_unread"] = row["ttft_unread_ms"] / warm
        if reference is not None:
            row["warm_to_stock"] = warm / statistics.median(reference["warm"])
        table[arm] = row
    return table


def show(table: Figures) -> None:
    """Prints the table."""
    heads = "".join(f"{f'{state}: hits, ttft ms':>24}" for state in STATES)
    print(f"{'':32}{heads}{'gain':>8}")
    for arm, row in table.items():
        cells = "".join(
            f"{row[f'hit_rate_{state}']:>12.1%}{row[f'ttft_{state}_ms']:>12.1f}" for state in STATES
        )
        print(f"{arm:32}{cells}{row['gain_over_unread']:>8.2f}")


def main() -> None:
    """Measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_model_arguments(parser, default="qwen3-8b")
    parser.add_argument("--out", type=Path, required=True, help="a folder, for prefix-cache.json")
    parser.add_argument("--repeats", type=int, default=5)
    keys = [arm.key for arm in ARMS]
    parser.add_argument("--arms", nargs="+", choices=keys, default=keys)
    arguments = parser.parse_args()
    arms = [arm for arm in ARMS if arm.key in arguments.arms]
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = chosen(arguments, Path(scratch))
        options = engine_options(
            model,
            engines=2,
            requests=REQUESTS,
            enable_prefix_caching=True,
            disable_log_stats=False,
        )
        stock = any(arm.stock for arm in arms)
        engines = Engines(model.path, scratch, device(), 1, options, stock=stock)
        cached, first_token = measure(engines, arms, arguments.repeats)
        table = figures(cached, first_token)
        block = engines.block_size
        result = {
            "benchmark": "prefix cache",
            **described(model, engines.sites.runner),
            "block_tokens": block,
            "shared_tokens": SHARED,
            "tail_tokens": TAIL,
            "requests": REQUESTS,
            "steered_from": MIDDLE,
            "repeats": arguments.repeats,
            "most_hits": {arm.name: most(arm.shared, block) for arm in arms},
            "summary": table,
            "cached_tokens": cached,
            "ttft_ms": first_token,
        }
        (arguments.out / "prefix-cache.json").write_text(json.dumps(result, indent=1))
        show(table)
    leave()


if __name__ == "__main__":
    main()
