"""Captures that are added to requests which run already, against the same from their start on.

Where vLLM's engine runs in a process of its own it goes on meanwhile, so nobody knows beforehand
which step takes a change up: `Attached` says so.
"""

from typing import Any, NamedTuple

import numpy as np
from cases import EVERYWHERE, PROMPT, VECTOR, same
from offline import OfflineEngine, Outcome
from routers import trimmed
from stepped import Stepped
from verdicts import Lines, Verdict, at_least, each, equal

from rheostat_engine import Act, Capture, Kind, Plan

STEPS = 2
"""After which the captures come: the prompts in one, and one token."""
LEAST = 4
"""Generated tokens that each request has to have left by then."""


class Begun(NamedTuple):
    """Requests of a batch, by their number, before anything is attached."""

    plans: dict[int, Plan | None]
    """Without a plan, with captures, steered, and both."""
    own: Capture
    """Captures of those that have some."""
    steered: tuple[int, ...]


def begun(site: int) -> Begun:
    """Far apart in a batch of 24."""
    act = Act(Kind.ADD, (VECTOR,), ((site, (0,)),), EVERYWHERE)
    own = Capture((site,), ((5, PROMPT[0][1]),))
    plans = (None, Plan("", (), (own,)), Plan("", (act,)), Plan("", (act,), (own,)))
    return Begun(dict(zip((1, 8, 15, 22), plans, strict=True)), own, (15, 22))


def check_attached(
    engine: OfflineEngine,
    plain: list[Outcome],
    batch: list[list[int]],
    site: int,
    sites: tuple[int, ...],
    sampling: dict[str, Any],
) -> Lines:
    """Attaches to four of a batch's requests.

    Args:
        engine: knows `VECTOR`.
        plain: what the same engine made of the batch, idle.
        batch: prompts of one length.
        site: where some are steered, and captured from their start.
        sites: what is asked for while they run.
        sampling: of every request.
    """
    four = begun(site)
    everything = Capture(sites, EVERYWHERE)
    complete = {
        number: Plan("", () if plan is None else plan.acts, (everything,))
        for number, plan in four.plans.items()
    }
    numbers = range(len(batch))
    assert engine.sites is not None
    experts = dict(engine.sites.experts)
    plans = [complete.get(number) for number in numbers]
    early = [trimmed(one, experts) for one in engine.run(batch, plans, **sampling)]
    stepped = Stepped(engine)
    names = [f"attached {number}" for number in numbers]
    with stepped.held():
        for number, prompt in enumerate(batch):
            plan = four.plans.get(number)
            stepped.begin(names[number], prompt, plan, skip_reading_prefix_cache=True, **sampling)
    stepped.step(STEPS)
    stepped.update_captures(1, {names[number]: complete[number] for number in four.plans})
    outcomes = stepped.finish()
    late = [trimmed(outcomes[name], experts) for name in names]
    results: dict[str, Verdict] = {}
    results["attached, without an error"] = each(
        [[one.error for one in late[i].attached] == [""] for i in four.plans]
    )
    first = {i: max((one.first for one in late[i].attached), default=0) for i in four.plans}
    ends = {i: len(batch[i]) + len(late[i].token_ids) - 1 for i in four.plans}
    results["attached: first position"] = at_least(min(first.values()), PROMPT[0][1])
    left = min(ends[i] - first[i] for i in four.plans)
    results["attached: generated tokens that were left"] = at_least(left, LEAST)
    results["attached: every position from there on once, at these sites"] = each(
        [
            found(late[i]) == wanted(plan, four.own, sites, first[i], ends[i])
            and not late[i].duplicates
            for i, plan in four.plans.items()
        ]
    )
    results["attached: requests that are not steered bit-identical to idle ones"] = each(
        [same(plain[i], late[i]) for i in numbers if i not in four.steered]
    )
    results["attached: steered as if captured from the start"] = each(
        [same(early[i], late[i]) and not same(plain[i], late[i]) for i in four.steered]
    )
    results["attached: rows bit-identical to those captured from the start"] = each(
        [
            np.array_equal(row, early[i].rows[at][position])
            for i in four.plans
            for at, rows in late[i].rows.items()
            for position, row in rows.items()
        ]
    )
    stats = engine.stats()
    results["attached: rows lost"] = equal(stats["lost_rows"], 0)
    used = [key for key in stats if key.endswith("_used") or key == "requests"]
    results["attached: left over"] = equal({key: stats[key] for key in used if stats[key]}, {})
    return results


def found(outcome: Outcome) -> set[tuple[int, int]]:
    """Sites and positions of its rows."""
    return {(site, position) for site, rows in outcome.rows.items() for position in rows}


def wanted(
    plan: Plan | None, own: Capture, sites: tuple[int, ...], first: int, end: int
) -> set[tuple[int, int]]:
    """Sites and positions that should come, of a request that ends at `end`."""
    rows = {(site, position) for site in sites for position in range(first, end)}
    if plan is not None and plan.captures:
        begin, stop = own.spans[0]
        rows |= {(site, p) for site in own.sites for p in range(begin, min(stop, first))}
    return rows
