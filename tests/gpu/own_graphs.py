"""Clients that change their sites again and again get few CUDA graphs of their own."""

from typing import Any

from cases import EVERYWHERE, VECTOR, same
from offline import OfflineEngine
from verdicts import Lines, Verdict, at_least, at_most, each, report

from rheostat_engine import Act, Kind, Plan

SETS = 12
"""Sets of sites, one after another; each runs long enough for a graph of its own."""
HELD = 4 * 2
"""Graphs that may be held at the end: 4 for each size of a batch, of which at most two run here."""


def check_own_graphs(
    engine: OfflineEngine, batch: list[list[int]], sampling: dict[str, Any]
) -> Lines:
    """Steers one request of a batch at one set of sites after another.

    Args:
        engine: knows `VECTOR`.
        batch: prompts.
        sampling: of every request; of 150 tokens at least.
    """
    results: dict[str, Verdict] = {}
    plain = engine.run(batch, **sampling)
    before = engine.stats()["own_graphs"]
    mates = []
    for site in range(SETS):
        act = Act(Kind.ADD, (VECTOR,), ((site, (0,)),), EVERYWHERE)
        mixed = engine.run(batch, [Plan("", (act,)), *[None] * (len(batch) - 1)], **sampling)
        mates += [*map(same, plain[1:], mixed[1:])]
    stats = engine.stats()
    results["changing sites: graphs that were made"] = at_least(stats["own_graphs"] - before, SETS)
    results["changing sites: graphs that are held"] = at_most(stats["held_graphs"], HELD)
    results["changing sites: neighbours bit-identical to an idle run"] = each(mates)
    results["changing sites: sets"] = report(SETS)
    return results
