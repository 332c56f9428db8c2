"""The plan that a request of vLLM's brings, as the scheduler needs it.

Invariant: a plan is read once for each request. One that can't be read shares no block, captures
nothing, and raises nothing: the worker fails its request.
"""

from typing import NamedTuple

from vllm.v1.request import Request

from rheostat_engine.block_keys import BlockKeys
from rheostat_engine.plan import EXTRA_ARG, Plan

_CARRIED = "_rheostat_carried"


class Carried(NamedTuple):
    """What a request's plan means for the prefix cache."""

    keys: BlockKeys
    """What touches its blocks."""
    first_captured: int
    """See `Plan`."""


def carried(request: Request) -> Carried | None:
    """What a request brings; None if it has no plan."""
    if _CARRIED not in request.__dict__:
        request.__dict__[_CARRIED] = _read(request)
    found: Carried | None = request.__dict__[_CARRIED]
    return found


def _read(request: Request) -> Carried | None:
    params = request.sampling_params
    wire = (params.extra_args or {}).get(EXTRA_ARG) if params is not None else None
    if wire is None:
        return None
    try:
        plan = Plan.from_wire(wire)
    except ValueError:
        plan = Plan(request.request_id, private_from=0)
    return Carried(BlockKeys(plan), plan.first_captured)
