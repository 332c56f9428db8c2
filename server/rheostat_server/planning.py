"""Plans made of interventions and captures, and whether any engine could carry them out.

Invariant: what `compile_plan` returns can be composed and is worth no more than the engine's limit
of effort. What would take long to find out is refused, and whatever takes a while leaves the event
loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rheostat._proto.v1 import capture_pb2, receipt_pb2, steering_pb2
from rheostat_engine import MAX_EFFORT, Act, Plan, Spans, compose, effort
from rheostat_server import checks
from rheostat_server.capture_specs import ResolvedCapture, engine_captures
from rheostat_server.errors import InvalidValue
from rheostat_server.limits import REQUEST_RANGES
from rheostat_server.offload import offload
from rheostat_server.steering import INTERVENTION_PATH, Intervention
from rheostat_server.vectors import Vector

_SPAN_BYTES = 1024
"""What `offload` counts for a span of a plan: it is looked at for every other intervention."""

_LOOKS = 1_000_000
"""Most times that a plan may ask whether an intervention holds a piece of positions: a second."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A plan, and what has to be with the workers before it."""

    plan: Plan
    """What the engine has to do: the acts of those interventions that have one, in order."""
    vectors: tuple[Vector, ...]
    """Every vector that the plan needs, each once."""


async def compile_plan(
    request_id: str, interventions: Sequence[Intervention], captures: Sequence[ResolvedCapture]
) -> Compiled:
    """The plan of interventions, in their order, and captures.

    Raises:
        InvalidValue: no engine could carry it out.
    """
    acts: list[Act] = []
    own: list[Act] = []
    vectors: dict[bytes, Vector] = {}
    for one in interventions:
        act = one.act
        if act is not None:
            acts.append(act)
            vectors |= {v.digest: v for v in one.op.vectors if v.digest in act.vectors}
            if one.origin != receipt_pb2.ORIGIN_GLOBAL:
                own.append(act)
    plan = Plan(request_id, tuple(acts), engine_captures(captures))
    problem = await offload(plan_work(plan), _problem, plan, tuple(own))
    if problem:
        raise InvalidValue(problem, field="steering")
    return Compiled(plan, tuple(vectors.values()))


def plan_work(plan: Plan) -> int:
    """Bytes that looking through a plan's pieces counts for; see `offload`."""
    spans = sum(map(len, (*_clauses(plan.acts), *(c.spans for c in plan.captures))))
    return spans * _SPAN_BYTES


async def check_affordable(plan: Plan) -> None:
    """Checks a plan that grew while its request ran.

    Raises:
        InvalidValue: no engine could carry it out.
    """
    problem = await offload(plan_work(plan), _why_not, plan)
    if problem:
        raise InvalidValue(
            f"together with what the session did before: {problem}", field="steering"
        )


def check_ranges(
    steering: steering_pb2.Steering, captures: Sequence[capture_pb2.CaptureSpec] = ()
) -> None:
    """Limits the ranges of all selectors together.

    Raises:
        InvalidValue: there are too many; the path is that of the selector that is too much.
    """
    selectors = [
        (f"{INTERVENTION_PATH}[{index}].where", intervention.where)
        for index, intervention in enumerate(steering.interventions)
    ]
    selectors += [
        (f"captures[{index}].where", capture.where) for index, capture in enumerate(captures)
    ]
    total = 0
    for path, selector in selectors:
        total += len(selector.include) + len(selector.exclude)
        checks.at_most(total, REQUEST_RANGES, path, "ranges in the request")


def _problem(plan: Plan, own: tuple[Act, ...]) -> str:
    """Why no engine could carry a plan out; empty if one could.

    `own` are the acts that are not server-wide steering's: it is named where they alone would do.
    """
    problem = _why_not(plan)
    if problem and len(own) < len(plan.acts) and not _why_not(replace(plan, acts=own)):
        return f"together with the server-wide steering: {problem}"
    return problem


def _why_not(plan: Plan) -> str:
    too_much = (
        "the selectors cut the request into too many different combinations of interventions, "
        "captures and sites; use fewer"
    )
    for held in (_clauses(plan.acts), [capture.spans for capture in plan.captures]):
        edges = {edge for spans in held for span in spans for edge in span}
        if len(edges) * len(held) > _LOOKS:
            return too_much
    if effort(plan) > MAX_EFFORT:
        return too_much
    try:
        compose(plan.acts)
    except ValueError as error:
        return str(error)
    return ""


def _clauses(acts: Sequence[Act]) -> list[Spans]:
    return [spans for act in acts for spans in (act.spans, *(one.spans for one in act.conditions))]
