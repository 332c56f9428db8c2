"""The same gated requests in two engines: a split model and one GPU, or the V1 and the V2 runner.

The two engines round in different orders. So readings and rows agree within `REORDERED`, as long as
the requests read the same tokens. The bound of the gates that the prompt decides lies in the widest
gap between the prompts' means, so rounding can't change a decision.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from cases import EVERYWHERE, PROMPT, VECTOR, agreed, difference, rows_of, same
from gates import decided_by_prompt, gate_above, reading_at
from offline import OfflineEngine, Outcome
from verdicts import REORDERED, Lines, Verdict, at_least, at_most, each, equal, report

from rheostat_engine import (
    Act,
    Capture,
    Combine,
    Form,
    Gate,
    GateCondition,
    Kind,
    Plan,
    Pool,
    Signals,
)

NAMES = ("open", "shut", "half open", "decided", "decided", "none")
"""The gate of request n is that of name n modulo their number."""

END = PROMPT[0][1]
FARTHER = 4
"""How much farther the prompts' means lie from the bound than the means of two engines differ."""

Floats = npt.NDArray[np.float64]


class GatedRequests(NamedTuple):
    """Prompts with gated additions."""

    prompts: list[list[int]]
    names: list[str]
    """The name of each request's gate; see `NAMES`."""
    plans: list[Plan | None]
    bound: float
    """Of the gates that are decided by the mean of the prompt."""
    watched: int
    """The captured site."""


def gated_requests(
    engine: OfflineEngine,
    prompts: list[list[int]],
    read: int,
    act: int,
    watched: int,
    sampling: dict[str, Any],
) -> GatedRequests:
    """Gates whose bounds suit what an engine reads of the prompts.

    Args:
        engine: has loaded `VECTOR`.
        prompts: of `PROMPT`'s length.
        read: the site that is read.
        act: a later site, where rows are added.
        watched: the site that is captured.
        sampling: of every run.
    """
    reads = Plan("", (reading_at(read),), signals=Signals(1))
    found = [readings(one, END) for one in engine.run(prompts, [reads] * len(prompts), **sampling)]
    names = [NAMES[at % len(NAMES)] for at in range(len(prompts))]
    pairs = zip(names, found, strict=True)
    means = np.sort([numbers.mean() for name, numbers in pairs if name == "decided"])
    inner = means[1:-1]  # at least two requests decide either way
    at = int(np.argmax(np.diff(inner)))
    bound = float(inner[at : at + 2].mean())
    numbers = np.concatenate(found)
    itself = GateCondition((0,), Pool.LAST, Combine.SUM, -math.inf, math.inf)
    half = gate_above(0.0, conditions=(itself,), form=Form.SIGMOID)
    gates: dict[str, Gate] = {
        "open": gate_above(-1e9),
        "shut": gate_above(1e9),
        "half open": half._replace(a=float(numbers.mean()), b=float(1 / numbers.std())),
        "decided": decided_by_prompt(bound, END),
    }
    captures = (Capture((watched,), EVERYWHERE),)

    def plan(name: str) -> Plan | None:
        if name not in gates:
            return None
        added = Act(Kind.ADD, (VECTOR,), ((act, (0,)),), EVERYWHERE, 0.5, gate=gates[name])
        return Plan("", (added, reading_at(read)), captures, signals=Signals(1, (), True))

    return GatedRequests(prompts, names, [plan(name) for name in names], bound, watched)


def readings(outcome: Outcome, end: int) -> Floats:
    """What was read at the positions below `end`, [end]."""
    return np.array([outcome.signals[position][0][0] for position in range(end)], np.float64)


def openness(outcome: Outcome, end: int) -> Floats:
    """How far the gate was open at the positions below `end`, [end]."""
    return np.array([outcome.signals[position][1][0] for position in range(end)], np.float64)


def compare_gated(
    requests: GatedRequests, one: Sequence[Outcome], other: Sequence[Outcome]
) -> Lines:
    """What the same gated requests did in two engines."""
    gated = [at for at, plan in enumerate(requests.plans) if plan is not None]
    ends = {at: agreed(one[at], other[at]) for at in gated}
    missing = 0
    for outcome in (run[at] for run in (one, other) for at in gated):
        wanted = set(range(END + len(outcome.token_ids) - 1))
        missing += len(wanted ^ outcome.signals.keys()) + outcome.duplicates
    results: dict[str, Verdict] = {"positions missing, or sent twice": equal(missing, 0)}
    if missing:
        return results
    found = {at: [readings(run[at], ends[at]) for run in (one, other)] for at in gated}
    largest = max(float(np.abs(first).max()) for first, _ in found.values())
    results["readings, worst difference, relative to the largest"] = at_most(
        max(float(np.abs(first - second).max()) for first, second in found.values()) / largest,
        REORDERED,
    )
    rows = [[rows_of(run[at], requests.watched, ends[at]) for run in (one, other)] for at in gated]
    results["captured rows, worst relative difference"] = at_most(
        max(difference(second, first) for first, second in rows), REORDERED
    )
    for name, wanted_openness in {"open": 1.0, "shut": 0.0}.items():
        results[f"{name}: requests that are so at every token of both"] = each(
            [
                bool((openness(run[at], end) == wanted_openness).all())
                for at, end in ends.items()
                if requests.names[at] == name
                for run in (one, other)
            ]
        )
    results |= _compare_half_open(requests, ends, one, other)
    results |= _compare_decided(requests, ends, found, one, other)
    alike = sum(one[at].token_ids == other[at].token_ids for at in gated)
    results["requests with equal tokens"] = report(f"{alike}/{len(gated)}")
    return results


def _compare_half_open(
    requests: GatedRequests,
    ends: dict[int, int],
    one: Sequence[Outcome],
    other: Sequence[Outcome],
) -> Lines:
    """Gates that are open in part, at every token by another number."""
    pairs = [
        np.stack([openness(run[at], end) for run in (one, other)])
        for at, end in ends.items()
        if requests.names[at] == "half open"
    ]
    both = np.concatenate(pairs, axis=1)
    inner = (both > 0.05) & (both < 0.95)
    return {
        "half open: share of tokens between 0.05 and 0.95": at_least(inner.mean(), 0.8),
        "half open: worst difference": at_most(float(np.abs(both[0] - both[1]).max()), REORDERED),
    }


def _compare_decided(
    requests: GatedRequests,
    ends: dict[int, int],
    found: dict[int, list[Floats]],
    one: Sequence[Outcome],
    other: Sequence[Outcome],
) -> Lines:
    """Gates that the mean of the prompt decides once."""
    decided = [at for at in ends if requests.names[at] == "decided"]
    means = np.array([[numbers[:END].mean() for numbers in found[at]] for at in decided])
    margin = np.abs(means - requests.bound).min()
    noise = np.abs(means[:, 0] - means[:, 1]).max()
    wanted = means[:, 0] > requests.bound
    right = []
    for at, opens in zip(decided, wanted, strict=True):
        expected = np.where(np.arange(ends[at]) >= END - 1, float(opens), 0.0)
        right += [bool((openness(run[at], ends[at]) == expected).all()) for run in (one, other)]
    return {
        "decided: how much farther means are from the bound than from each other": at_least(
            margin / max(float(noise), 1e-30), FARTHER
        ),
        "decided: requests that are decided by the mean in both": each(right),
        "decided: requests that open": at_least(int(wanted.sum()), 1),
        "decided: requests that stay shut": at_least(int((~wanted).sum()), 1),
    }


def compare_shut(
    requests: GatedRequests, plain: Sequence[Outcome], found: Sequence[Outcome]
) -> Lines:
    """Requests whose gate stayed shut, and those without a gate, against stock vLLM split alike."""
    shut = [
        at
        for at, name in enumerate(requests.names)
        if name in ("shut", "decided") and not any(one[0] for _, one in found[at].signals.values())
    ]
    mates = [at for at, plan in enumerate(requests.plans) if plan is None]
    opened = [at for at, name in enumerate(requests.names) if name in ("open", "half open")]
    changed = [not same(plain[at], found[at]) for at in opened]
    return {
        "mixed: shut, bit-identical to stock": each([same(plain[at], found[at]) for at in shut]),
        "mixed: mates bit-identical to stock": each([same(plain[at], found[at]) for at in mates]),
        "mixed: open requests that changed": each(changed),
    }
