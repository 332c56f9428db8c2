"""What it costs to put a plan in force, known before anything of it is made.

Invariant: a plan that is amended (`amend`) costs no more than both of its parts; finding out costs
no more than putting a plan of `MAX_EFFORT` in force.
"""

from collections.abc import Callable, Sequence

from rheostat_engine.clauses import clauses_of
from rheostat_engine.composition import MAX_TOKEN_SETS
from rheostat_engine.pieces import sweep
from rheostat_engine.plan import Plan, Spans

MAX_EFFORT = 50_000
"""The most that a plan may cost (`effort`). A step waits for a plan that begins: for about half a
second at most."""

_GLANCES = 64
"""Acts that are looked at, or token ids that are read, for the price of one thing that is made."""


def effort(plan: Plan) -> int:
    """What it costs to put a plan in force: its pieces, and what each combination holds.

    Beyond `MAX_EFFORT` only that it is more is certain.
    """
    clauses = clauses_of(plan.acts)
    sizes = [sum(len(rows) for _, rows in plan.acts[owner.act].rows) for owner in clauses.owners]

    def combining(members: tuple[int, ...]) -> int:
        sets = {clauses.owners[i].tokens for i in members} - {None}
        variants = 1 << min(len(sets), MAX_TOKEN_SETS + 1)
        return variants * sum(sizes[i] for i in members)

    def capturing(members: tuple[int, ...]) -> int:
        return sum(len(plan.captures[i].sites) for i in members)

    acting = _price(clauses.spans, combining, sum(map(len, clauses.sets)))
    return acting + _price([capture.spans for capture in plan.captures], capturing, 0)


def _price(spans: Sequence[Spans], of: Callable[[tuple[int, ...]], int], glances: int) -> int:
    total = 0
    made: set[tuple[int, ...]] = set()
    for _, members in sweep(spans):
        total += 1
        glances += len(members)
        if members not in made:
            made.add(members)
            total += of(members)
        if total + glances // _GLANCES > MAX_EFFORT:
            break
    return total - -glances // _GLANCES
