"""Compiles steering that replaces the steering of a running request."""

from collections.abc import Awaitable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from rheostat_engine import Plan
from rheostat_server.admission.admit import AdmissionContext, any_needs_text
from rheostat_server.admission.planning import check_ranges, compile_plan
from rheostat_server.admission.request_work import steering_work
from rheostat_server.errors import NotSupported
from rheostat_server.selectors.selection import SelectionContext
from rheostat_server.steering.gates import Probe
from rheostat_server.steering.interventions import Intervention, check_sums, resolve_steering
from rheostat_server.tasks.offload import offload
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import Vector, VectorView
from rheostat_server.vectors.token_directions import with_directions
from rheostat_wire.v1 import receipt_pb2, steering_pb2


class CompiledUpdate(NamedTuple):
    """Steering for a running request."""

    interventions: tuple[Intervention, ...]
    """The server-wide ones of the request, then those of the update."""
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
    server_wide: Sequence[Intervention],
    probes: Collection[Probe] = (),
) -> CompiledUpdate:
    """Compiles steering that replaces the steering of a running request.

    Args:
        steering: the message.
        admission: what it is checked against.
        context: the request.
        server_wide: the server-wide interventions of the request.
        probes: the probes that go on reading.

    Raises:
        InvalidArgument, FailedPrecondition, NotFound, MessageTooLarge: it cannot be applied.
    """
    if any(one.gate is not None for one in server_wide):
        raise NotSupported(
            "the server-wide steering of this request has gates, which an update would decide "
            "anew: send the steering with the request",
            field="steering",
        )
    check_ranges(steering)
    if context.prompt.text is None and await offload(
        steering.ByteSize(), any_needs_text, steering, (), ()
    ):
        context = replace(context, prompt=await admission.prompts.decode(context.prompt))
    view = admission.store.view()
    work = steering_work(steering, context.prompt_len, admission.sites, view)

    def attempt() -> Awaitable[CompiledUpdate]:
        return offload(
            work, _compile_update, steering, view, admission, context, server_wide, probes, work
        )

    return await with_directions(admission.store.directions, steering, attempt)


def _compile_update(
    steering: steering_pb2.Steering,
    vectors: VectorView,
    admission: AdmissionContext,
    context: SelectionContext,
    server_wide: Sequence[Intervention],
    probes: Collection[Probe],
    work: int,
) -> CompiledUpdate:
    origin = receipt_pb2.ORIGIN_UPDATE
    own = resolve_steering(steering, admission.sites, context, vectors, origin, admission.runs)
    interventions = (*server_wide, *own)
    check_sums(interventions, FloatType(admission.sites.dtype))
    plan, needed = compile_plan("", interventions, (), probes)
    return CompiledUpdate(interventions, plan, needed, work)
