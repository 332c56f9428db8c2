"""Requests that are steered by huge doses, their neighbours, and who comes after them.

Infinities or NaN in one request's stream could reach others. One scale may be shared by all
activations of a step, experts may be chosen by NaN, and what a request leaves in a block of the KV
cache is multiplied by 0 where the next one has not written yet, which keeps NaN.
"""

from typing import Any

from cases import EVERYWHERE, VECTOR, same
from offline import OfflineEngine, Outcome
from verdicts import Lines, Verdict, at_least, each

from rheostat_engine import Act, Band, Kind, Plan

LARGEST = 3e38
"""Near the largest float32."""
CLAMPED = 1e38
ADDED = 1e37
"""Times a row of some units: beyond it the sum is refused, because it is not finite."""


def huge_acts(site: int) -> dict[str, Act]:
    """Acts at a site that would leave nothing finite behind it."""
    rows = ((site, (0,)),)
    band = Band(CLAMPED, CLAMPED, 1.0)
    return {
        "norm_add by 3e38": Act(Kind.NORM_ADD, (VECTOR,), rows, EVERYWHERE, LARGEST),
        "add times 1e37": Act(Kind.ADD, (VECTOR,), rows, EVERYWHERE, ADDED),
        "clamp to 1e38": Act(Kind.PULL, (VECTOR,), rows, EVERYWHERE, bands=(band,)),
    }


def check_huge(
    engine: OfflineEngine,
    plain: list[Outcome],
    batch: list[list[int]],
    sites: dict[str, int],
    sampling: dict[str, Any],
) -> Lines:
    """Steers every fourth request of a batch so, at each site in turn.

    Args:
        engine: knows `VECTOR`.
        plain: what the same batch gave unsteered.
        batch: prompts.
        sites: sites by name.
        sampling: of every request.
    """
    results: dict[str, Verdict] = {}
    for name, site in sites.items():
        for what, act in huge_acts(site).items():
            plans = [None if i % 4 else Plan("", (act,)) for i in range(len(batch))]
            mixed = engine.run(batch, plans, **sampling)
            mates = [same(plain[i], mixed[i]) for i in range(len(batch)) if i % 4]
            changed = sum(not same(plain[i], mixed[i]) for i in range(0, len(batch), 4))
            results[f"{what} at {name}: neighbours bit-identical"] = each(mates)
            results[f"{what} at {name}: steered requests that changed"] = at_least(changed, 1)
            after = engine.run(batch, **sampling)
            line = f"{what} at {name}: the requests that come after bit-identical"
            results[line] = each([*map(same, plain, after)])
    return results
