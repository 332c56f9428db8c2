"""Updates of a running request's plan from a position on, as one plan for all positions.

Invariant: after a preemption, positions before the update are computed as before. The old acts and
captures keep those positions; the new ones get the later positions.
"""

from dataclasses import replace

from rheostat_engine import OPEN_END, Act, Capture, Plan, Spans


def update_steering(plan: Plan, acts: tuple[Act, ...], first: int) -> Plan:
    """The plan with other acts from position `first` on.

    The old acts keep their indices; the new acts follow them.
    """
    return replace(
        plan,
        acts=(
            *(_within(act, 0, first) for act in plan.acts),
            *(_within(act, first, OPEN_END) for act in acts),
        ),
    )


def update_captures(plan: Plan, captures: tuple[Capture, ...], first: int) -> Plan:
    """The plan with other captures from position `first` on."""
    clipped = [
        *(replace(old, spans=_clip(old.spans, 0, first)) for old in plan.captures),
        *(replace(new, spans=_clip(new.spans, first, OPEN_END)) for new in captures),
    ]
    return replace(plan, captures=tuple(capture for capture in clipped if capture.spans))


def _within(act: Act, start: int, end: int) -> Act:
    conditions = tuple(
        condition._replace(spans=spans)
        for condition in act.conditions
        if (spans := _clip(condition.spans, start, end))
    )
    return replace(act, spans=_clip(act.spans, start, end), conditions=conditions)


def _clip(spans: Spans, start: int, end: int) -> Spans:
    pairs = ((max(a, start), min(b, end)) for a, b in spans)
    return tuple((a, b) for a, b in pairs if a < b)
