"""Requests whose steering makes infinities and NaN, and their neighbours in the batch.

Such a request spoils itself alone, unless a kernel looks at several tokens at once: one scale for
all activations of a step would, and so would an expert's tokens if they were sorted by NaN.
"""

from typing import Any

from cases import EVERYWHERE, VECTOR, same
from offline import OfflineEngine, Outcome
from verdicts import Lines, Verdict, at_least, each

from rheostat_engine import Act, Band, Kind, Plan

LARGEST = 3e38
"""Near the largest float32, and beyond the largest float16; bfloat16 holds it."""
CLAMPED = 1e38


def huge_acts(site: int) -> dict[str, Act]:
    """Acts at a site that leave nothing finite behind it."""
    rows = ((site, (0,)),)
    band = Band(CLAMPED, CLAMPED, 1.0)
    return {
        "norm_add by 3e38": Act(Kind.NORM_ADD, (VECTOR,), rows, EVERYWHERE, LARGEST),
        "add times 3e38": Act(Kind.ADD, (VECTOR,), rows, EVERYWHERE, LARGEST),
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
    results["after huge doses: all requests bit-identical"] = each([*map(same, plain, after)])
    return results
