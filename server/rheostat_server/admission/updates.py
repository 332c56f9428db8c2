"""Compiles steering that replaces the steering of a running request, or a watch's layer of it."""

from collections.abc import Awaitable
from dataclasses import replace
from typing import NamedTuple

from rheostat_engine import Plan
from rheostat_server.admission.admit import AdmissionContext, any_needs_text
from rheostat_server.admission.planning import GoingOn, check_ranges, compile_plan
from rheostat_server.errors import NotSupported
from rheostat_server.selectors.selection import SelectionContext
from rheostat_server.steering.estimates import estimate_steering
from rheostat_server.steering.interventions import Intervention, check_sums, resolve_steering
from rheostat_server.steering.rules import refuse_gained_sums
from rheostat_server.tasks.offload import offload_plan
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import Vector, VectorView
from rheostat_server.vectors.token_directions import with_directions
from rheostat_wire.v1 import receipt_pb2, steering_pb2


class Kept(NamedTuple):
    """What stays of a request when a part of its steering is replaced."""

    before: tuple[Intervention, ...]
    """The interventions before those of the update: server-wide ones first."""
    after: tuple[Intervention, ...] = ()
    """The interventions behind them."""
    going_on: GoingOn = GoingOn()
    """The probes and gates of the request."""
    work: int = 0
    """Bytes that `offload` counts for each pass over all of these."""


class Replacing(NamedTuple):
    """Where new steering comes from."""

    origin: receipt_pb2.Origin.ValueType
    update_id: int
    """The update of the session, or of the watch."""
    watch_id: str = ""
    """The watch; empty: the session."""


class CompiledUpdate(NamedTuple):
    """Steering for a running request."""

    own: tuple[Intervention, ...]
    """The interventions of the update."""
    interventions: tuple[Intervention, ...]
    """All interventions, in order."""
    plan: Plan
    """The packed plan, without an id."""
    vectors: tuple[Vector, ...]
    """Every vector that the workers need, each once."""
    work: int
    """Bytes that `offload` counts for each pass over the steering and its plan."""


async def compile_update(
    steering: steering_pb2.Steering,
    admission: AdmissionContext,
    context: SelectionContext,
    kept: Kept,
    replacing: Replacing,
) -> CompiledUpdate:
    """Compiles steering that replaces a part of the steering of a running request.

    Args:
        steering: the message.
        admission: what it is checked against.
        context: the request.
        kept: what stays.
        replacing: where the steering comes from.

    Raises:
        InvalidArgument, FailedPrecondition, NotFound, MessageTooLarge: it cannot be applied.
    """
    check_ranges(steering)
    if context.prompt.text is None and await offload_plan(
        steering.ByteSize(), any_needs_text, [steering], (), ()
    ):
        context = replace(context, prompt=await admission.prompts.decode(context.prompt))
    view = admission.store.view()
    work = kept.work + estimate_steering(steering, context.prompt_len, admission.sites, view)

    def attempt() -> Awaitable[CompiledUpdate]:
        return offload_plan(
            work, _compile_update, steering, view, admission, context, kept, replacing, work
        )

    return await with_directions(admission.store.directions, steering, attempt)


def _compile_update(
    steering: steering_pb2.Steering,
    vectors: VectorView,
    admission: AdmissionContext,
    context: SelectionContext,
    kept: Kept,
    replacing: Replacing,
    work: int,
) -> CompiledUpdate:
    origin, update_id, watch_id = replacing
    resolved = resolve_steering(steering, admission.sites, context, vectors, origin, admission.runs)
    own = tuple(
        replace(intervention, update_id=update_id, watch_id=watch_id) for intervention in resolved
    )
    interventions = (*kept.before, *own, *kept.after)
    check_sums(interventions, FloatType(admission.sites.dtype))
    try:
        refuse_gained_sums(interventions)
    except NotSupported as error:
        error.field = "steering"
        raise
    plan, needed = compile_plan("", interventions, (), going_on=kept.going_on)
    return CompiledUpdate(own, interventions, plan, needed, work)
