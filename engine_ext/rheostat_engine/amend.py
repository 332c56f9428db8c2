"""Changing what a plan does from a position on, while its request runs.

Invariant: what was computed under a plan is computed the same way again, should the request be
preempted: the old acts and captures keep the positions before the change, the new ones get those
after it.
"""

from dataclasses import replace

from rheostat_engine.acts import OPEN_END, Act, Capture, Spans
from rheostat_engine.plan import Plan


def amend(plan: Plan, acts: tuple[Act, ...], first: int) -> Plan:
    """`plan` with `acts` in place of its own from position `first` on.

    The old acts keep their indices; the new ones follow them.
    """
    return replace(
        plan,
        acts=(
            *(_within(act, 0, first) for act in plan.acts),
            *(_within(act, first, OPEN_END) for act in acts),
        ),
    )


def recapture(plan: Plan, captures: tuple[Capture, ...], first: int) -> Plan:
    """`plan` with `captures` in place of its own from position `first` on."""
    parts = [(one, 0, first) for one in plan.captures]
    parts += [(one, first, OPEN_END) for one in captures]
    kept = [replace(one, spans=_clip(one.spans, start, end)) for one, start, end in parts]
    return replace(plan, captures=tuple(one for one in kept if one.spans))


def _within(act: Act, start: int, end: int) -> Act:
    conditions = tuple(
        one._replace(spans=kept) for one in act.conditions if (kept := _clip(one.spans, start, end))
    )
    return replace(act, spans=_clip(act.spans, start, end), conditions=conditions)


def _clip(spans: Spans, start: int, end: int) -> Spans:
    pairs = ((max(a, start), min(b, end)) for a, b in spans)
    return tuple((a, b) for a, b in pairs if a < b)
