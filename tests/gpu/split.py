"""A model split over two GPUs, by tensor or pipeline parallelism, against the same on one.

What adds up over ranks is rounded once more on each of them, so rows agree within `SPLIT` and
tokens mostly. Stock vLLM split alike is what mates are bit-identical to.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cases import (
    EVERYWHERE,
    PROMPT,
    VECTOR,
    acts_at,
    agreed,
    difference,
    prompts,
    rows_of,
    same,
    whole,
)
from offline import OfflineEngine, Outcome
from verdicts import Lines, Verdict, at_least, at_most, each, equal

from rheostat_engine import OPEN_END, Act, Capture, Condition, Kind, Plan, Point, Site, site_count

SPLITS = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}
SPLIT = 5e-2
"""A bfloat16 sum of two bfloat16 parts, relative, after four layers; 2.2e-2 was seen on a CPU."""
APART = 0.15
"""How far a row lies at least from the next token's: `SPLIT` tells them apart."""

COUNT = 24
SAMPLING = {"max_tokens": 24, "logprobs": 3}


class Batch(NamedTuple):
    """Requests of one batch, by what is done to them."""

    prompts: list[list[int]]
    plans: list[Plan | None]
    steered: list[int]
    captured: list[int]
    ruled: int
    """Steered where its tokens say so."""
    mates: list[int]
    """Everything that is not steered."""


def batch_of(layers: int, vocabulary: int) -> Batch:
    """One op of each kind on both halves of the model, captures, a rule, and idle mates."""
    every = Capture(tuple(range(site_count(layers))), EVERYWHERE)
    sites = [
        Site(point, layer).index
        for point, layer in (
            (Point.ATTN_OUT, 0),
            (Point.RESID_MID, 1),
            (Point.MLP_OUT, layers - 2),
            (Point.RESID_POST, layers - 1),
        )
    ]
    plans: list[Plan | None] = [None] * COUNT
    kinds = list(acts_at(sites[0]))
    for number, kind in enumerate(kinds):
        plans[4 * number] = Plan("", tuple(acts_at(site)[kind] for site in sites), (every,))
    even = Condition(((0, OPEN_END),), tuple(range(0, vocabulary, 2)), True)
    ends = tuple((Site(Point.RESID_POST, layer).index, (0,)) for layer in (0, layers - 1))
    ruled = 4 * len(kinds)
    plans[ruled] = Plan("", (Act(Kind.ADD, (VECTOR,), ends, (), 0.5, conditions=(even,)),))
    captured = [1, 2]
    for index in captured:
        plans[index] = Plan("", (), (every,))
    steered = list(range(0, ruled, 4))
    mates = [i for i in range(COUNT) if i not in (*steered, ruled)]
    given = prompts(COUNT, PROMPT[0][1], vocabulary)
    return Batch(given, plans, steered, captured, ruled, mates)


def check_split(
    model: Path, vocabulary: int, scratch: Path, options: dict[str, Any]
) -> Iterator[Lines]:
    """All checks of a model with weights on disk: every line so far, again and again."""
    results: dict[str, Verdict] = {}
    whole_one = OfflineEngine(model, f"ipc://{scratch}/one", **options)
    assert whole_one.sites is not None
    layers, width = whole_one.sites.num_layers, whole_one.sites.width
    vector = np.random.default_rng(1).normal(size=(2, width)).astype(np.float32)
    batch = batch_of(layers, vocabulary)
    whole_one.load({VECTOR: vector})
    alone = whole_one.run(batch.prompts, batch.plans, **SAMPLING)
    whole_one.close()
    for name, size in SPLITS.items():
        halved = {**options, size: 2}
        stock = OfflineEngine(model, "", sited=False, **halved)
        plain, again = (stock.run(batch.prompts, **SAMPLING) for _ in range(2))
        stock.close()
        results[f"{name}: stock equals itself"] = each([*map(same, plain, again)])
        ours = OfflineEngine(model, f"ipc://{scratch}/{name}", **halved)
        assert ours.sites is not None
        results[f"{name}: points that are not served"] = equal(sorted(ours.sites.refused), [])
        idle = ours.run(batch.prompts, **SAMPLING)
        results[f"{name}: idle requests bit-identical to stock"] = each([*map(same, plain, idle)])
        ours.load({VECTOR: vector})
        split = ours.run(batch.prompts, batch.plans, **SAMPLING)
        results[f"{name}: captured requests and mates bit-identical to stock"] = each(
            [same(plain[i], split[i]) for i in batch.mates]
        )
        results |= {f"{name}: {line}": v for line, v in compared(batch, layers, alone, split)}
        for worker, stats in enumerate(ours.stats_of_all()):
            used = {key: stats[key] for key in stats if key.endswith("_used") or key == "requests"}
            results[f"{name}: left over on worker {worker}"] = equal(any(used.values()), False)
            results[f"{name}: rows lost on worker {worker}"] = equal(stats["lost_rows"], 0)
        ours.close()
        yield results


def compared(
    batch: Batch, layers: int, alone: list[Outcome], split: list[Outcome]
) -> Iterator[tuple[str, Verdict]]:
    """What the same plans did on one GPU and on two."""
    sites = tuple(range(site_count(layers)))
    rows = [*batch.steered, *batch.captured]
    yield "requests of which every position came once", each([whole(split[i], sites) for i in rows])
    for what, indices in (("captured", batch.captured), ("steered", batch.steered)):
        found, apart = [], []
        for index in indices:
            end = agreed(alone[index], split[index])
            for site in sites:
                one, two = (rows_of(run[index], site, end) for run in (alone, split))
                found.append(difference(two, one))
                apart.append(difference(one[1:], one[:-1]))
        yield f"{what} rows, worst relative difference to one GPU", at_most(max(found), SPLIT)
        yield f"{what} rows, least relative distance of two tokens", at_least(min(apart), APART)
    released = [
        (one.released, two.released)
        for one, two in ((alone[i], split[i]) for i in batch.steered)
        if one.released is not None and two.released is not None
    ]
    doses = [(one, two) for a, b in released for one, two in zip(a.doses, b.doses, strict=False)]
    yield (
        "acts that were measured, and at the same sites on as many rows",
        each([(a.act, a.site, a.rows) == (b.act, b.site, b.rows) for a, b in doses]),
    )
    yield "measured acts", equal(len(doses), 4 * len(batch.steered))
    worst = max(abs(b.relative / a.relative - 1) for a, b in doses)
    yield "worst relative difference of a dose to one GPU", at_most(worst, SPLIT)
    ruled = split[batch.ruled]
    read = [*batch.prompts[batch.ruled], *ruled.token_ids[:-1]]
    held = [] if ruled.released is None else [dose.rows for dose in ruled.released.doses]
    even = sum(token % 2 == 0 for token in read)
    yield "rows steered by token ids in the first and the last layer", equal(held, [even, even])
