"""A model split over two GPUs, by tensor or pipeline parallelism, against the same on one.

What adds up over ranks is rounded once more on each of them, so rows agree within `REORDERED` and
tokens mostly. Stock vLLM split alike is what mates are bit-identical to. Gates are not served over
a pipeline, so only tensor parallelism has lines of gates (`gates.py`, `gate_runs.py`).
"""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from attach import check_attached
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
from gate_runs import GatedRequests, compare_gated, compare_shut, gated_requests
from gates import check_gates
from offline import OfflineEngine, Outcome
from verdicts import APART, REORDERED, Lines, Verdict, at_least, at_most, each, equal

from rheostat_engine import OPEN_END, Act, Capture, Kind, Plan, Point, Site, TokenCondition
from rheostat_engine.plan.points import site_count

SPLITS = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size"}

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
    even = TokenCondition(((0, OPEN_END),), tuple(range(0, vocabulary, 2)), True)
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
    names: Collection[str], model: Path, vocabulary: int, scratch: Path, options: dict[str, Any]
) -> Iterator[Lines]:
    """All checks of a model with weights on disk: every line so far, after each engine.

    Args:
        names: how to split it, of `SPLITS`.
        model: has weights on disk.
        vocabulary: how many token ids it knows.
        scratch: where channels may lie.
        options: of every engine.
    """
    results: dict[str, Verdict] = {}
    alone: list[Outcome] | None = None
    gated: GatedRequests | None = None
    opened: list[Outcome] = []
    for name in names:
        halved = {**options, SPLITS[name]: 2}
        given = prompts(COUNT, PROMPT[0][1], vocabulary)
        stock = OfflineEngine(model, "", sited=False, **halved)
        plain, again = (stock.run(given, **SAMPLING) for _ in range(2))
        stock.close()
        results[f"{name}: stock equals itself"] = each([*map(same, plain, again)])
        yield results
        ours = OfflineEngine(model, f"ipc://{scratch}/{name}", **halved)
        assert ours.sites is not None
        layers = ours.sites.num_layers
        vector = np.random.default_rng(1).normal(size=(2, ours.sites.width)).astype(np.float32)
        batch = batch_of(layers, vocabulary)
        results[f"{name}: points that are not served"] = equal(sorted(ours.sites.refused), [])
        idle = ours.run(given, **SAMPLING)
        results[f"{name}: idle requests bit-identical to stock"] = each([*map(same, plain, idle)])
        ours.load({VECTOR: vector})
        split = ours.run(given, batch.plans, **SAMPLING)
        results[f"{name}: captured requests and mates bit-identical to stock"] = each(
            [same(plain[i], split[i]) for i in batch.mates]
        )
        sites = tuple(range(site_count(layers)))
        middle = Site(Point.RESID_PRE, layers // 2).index
        attached = check_attached(ours, plain, given, middle, sites, SAMPLING)
        results |= {f"{name}: {line}": verdict for line, verdict in attached.items()}
        if name == "tp":
            yield results
            read = Site(Point.RESID_PRE, layers // 4).index
            found = check_gates(ours, plain, given, read, middle, vector, SAMPLING)
            results |= {f"{name}: gate {line}": verdict for line, verdict in found.items()}
            last = Site(Point.RESID_POST, layers - 1).index
            gated = gated_requests(ours, given, read, middle, last, SAMPLING)
            opened = ours.run(given, gated.plans, **SAMPLING)
            found = compare_shut(gated, plain, opened)
            results |= {f"{name}: gate {line}": verdict for line, verdict in found.items()}
        for worker, stats in enumerate(ours.stats_of_all()):
            used = {key: stats[key] for key in stats if key.endswith("_used") or key == "requests"}
            results[f"{name}: left over on worker {worker}"] = equal(any(used.values()), False)
            results[f"{name}: rows lost on worker {worker}"] = equal(stats["lost_rows"], 0)
            if "pinned" in stats:  # one that reports
                line = f"{name}: staging memory of worker {worker} is pinned"
                results[line] = equal(stats["pinned"], options["device"] == "cuda")
        ours.close()
        yield results
        if alone is None:
            one = OfflineEngine(model, f"ipc://{scratch}/one", **options)
            one.load({VECTOR: vector})
            alone = one.run(given, batch.plans, **SAMPLING)
            if gated is not None:
                opened_alone = one.run(given, gated.plans, **SAMPLING)
                found = compare_gated(gated, opened_alone, opened)
                results |= {f"{name}: gate to one GPU, {line}": v for line, v in found.items()}
            one.close()
        results |= {f"{name}: {line}": v for line, v in compared(batch, layers, alone, split)}
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
        yield f"{what} rows, worst relative difference to one GPU", at_most(max(found), REORDERED)
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
    yield "worst relative difference of a dose to one GPU", at_most(worst, REORDERED)
    ruled = split[batch.ruled]
    read = [*batch.prompts[batch.ruled], *ruled.token_ids[:-1]]
    held = [] if ruled.released is None else [dose.rows for dose in ruled.released.doses]
    even = sum(token % 2 == 0 for token in read)
    yield "rows steered by token ids in the first and the last layer", equal(held, [even, even])
