"""Steering resolved into acts, server-wide interventions first, then the request's.

In three stages: `draft_steering` checks all that the request says by itself and may run on a
thread; `look_up` finds the vectors in the store, on the event loop; `check_vectors` looks into them
and may run on a thread again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rheostat._proto.v1 import receipt_pb2, steering_pb2
from rheostat_engine import Act, ModelSites
from rheostat_server import checks, directions
from rheostat_server.checks import join
from rheostat_server.errors import MissingField, NonFinite, NotSupported, VectorShape
from rheostat_server.limits import INTERVENTIONS
from rheostat_server.ops import OpDraft, ResolvedOp, VectorDraft, check_served, draft_op
from rheostat_server.selection import EVERYTHING, Selection, SelectionContext, resolve_selector
from rheostat_server.sites import SiteSelection, refuse_double_names, resolve_sites
from rheostat_server.tensors import FloatType
from rheostat_server.vectors import Vector, VectorStore

INTERVENTION_PATH = "steering.interventions"


@dataclass(frozen=True, slots=True)
class Draft:
    """An intervention whose vectors are not looked up yet."""

    op: OpDraft
    """What it does."""
    sites: SiteSelection
    """Where."""
    selection: Selection
    """Which tokens."""


@dataclass(frozen=True)
class Intervention:
    """An intervention, resolved: one of the server-wide steering or of the request's."""

    origin: receipt_pb2.Origin.ValueType
    """Where it came from."""
    index: int
    """Which one there."""
    op: ResolvedOp
    """What it does where."""
    selection: Selection
    """Which tokens."""

    @cached_property
    def act(self) -> Act | None:
        """What the engine has to do: None where no bit would change."""
        return self.op.act(self.selection)

    @property
    def ref(self) -> receipt_pb2.InterventionRef:
        """Its name in answers."""
        return receipt_pb2.InterventionRef(origin=self.origin, index=self.index, op=self.op.op)


def draft_steering(
    steering: steering_pb2.Steering, model: ModelSites, context: SelectionContext
) -> list[Draft]:
    """Checks a request's steering as far as the request itself goes.

    Raises:
        InvalidArgument: something is malformed.
        FailedPrecondition: something is not served.
        MessageTooLarge: an inline vector is too large.
    """
    path = INTERVENTION_PATH
    checks.at_most(len(steering.interventions), INTERVENTIONS, path, "interventions")
    return [
        _draft(intervention, model, context, f"{path}[{index}]")
        for index, intervention in enumerate(steering.interventions)
    ]


def look_up(
    drafts: Sequence[Draft],
    store: VectorStore,
    model: ModelSites,
    origin: receipt_pb2.Origin.ValueType,
) -> tuple[Intervention, ...]:
    """Finds the vectors.

    Raises:
        NotFound: a vector is not stored or a name not known.
        VectorShape: a vector does not fit model or layers.
        ZeroVector: a vector that is normalised is zero.
    """
    return tuple(
        Intervention(origin, index, _look_up(draft, store, model), draft.selection)
        for index, draft in enumerate(drafts)
    )


def vector_paths(draft: Draft) -> list[str]:
    """The paths of an intervention's vectors."""
    return [vector.path for vector in draft.op.vectors]


def check_vectors(drafts: Sequence[Draft], interventions: Sequence[Intervention]) -> None:
    """Looks into the vectors that were found for `drafts`.

    Raises:
        InvalidValue: directions are linearly dependent.
    """
    for draft, intervention in zip(drafts, interventions, strict=True):
        directions.check_independent(intervention.op, vector_paths(draft))


def check_sums(interventions: Sequence[Intervention], kind: FloatType) -> None:
    """Refuses sums that could leave the range of the dtype in which the engine holds them.

    Raises:
        NonFinite: one could; the path is that of the addend that is too much.
    """
    reached: dict[int, float] = {}
    server_wide: set[int] = set()
    for one in interventions:
        op = one.op
        if op.op != receipt_pb2.OP_ADD:
            continue
        (vector,) = op.vectors
        for site, (row,) in zip(op.sites, op.rows, strict=True):
            added = abs(op.scale) * vector.peaks[row]
            total = reached.get(site.index, 0.0) + added
            reached[site.index] = total
            if one.origin == receipt_pb2.ORIGIN_GLOBAL:
                server_wide.add(site.index)
            if not total < kind.largest:
                beside = ""
                if site.index in server_wide and one.origin != receipt_pb2.ORIGIN_GLOBAL:
                    beside = " together with what server-wide steering adds there"
                raise NonFinite(
                    f"what is added at {site.point.value} {site.layer} reaches {total:.4g}{beside},"
                    f" which is not finite in the model's {kind.value}",
                    field=join(op.path, "scale"),
                )


def _draft(
    intervention: steering_pb2.Intervention,
    model: ModelSites,
    context: SelectionContext,
    path: str,
) -> Draft:
    check_served(intervention, path)
    if intervention.HasField("gate"):
        raise NotSupported(
            "gates are not served yet; send the intervention without one", field=join(path, "gate")
        )
    if not intervention.HasField("sites"):
        raise MissingField("sites are required", field=join(path, "sites"))
    sites = resolve_sites(intervention.sites, model, join(path, "sites"))
    refuse_double_names(sites, join(path, "sites"))
    selection = EVERYTHING
    if intervention.HasField("where"):
        selection = resolve_selector(intervention.where, context, join(path, "where"))
    return Draft(draft_op(intervention, model.width, path), sites, selection)


def _look_up(draft: Draft, store: VectorStore, model: ModelSites) -> ResolvedOp:
    layers = draft.sites.layers
    place = {layer: index for index, layer in enumerate(layers)}
    vectors = [_vector(one, store, model, len(layers)) for one in draft.op.vectors]
    op = ResolvedOp(
        op=draft.op.op,
        path=draft.op.path,
        sites=draft.sites.sites,
        vectors=tuple(vectors),
        rows=tuple(
            tuple(place[site.layer] if vector.rows > 1 else 0 for vector in vectors)
            for site in draft.sites.sites
        ),
        scale=draft.op.scale,
        bands=draft.op.bands,
    )
    directions.check_not_zero(op, vector_paths(draft))
    return op


def _vector(draft: VectorDraft, store: VectorStore, model: ModelSites, layers: int) -> Vector:
    path, vector = draft
    if not isinstance(vector, Vector):
        if vector.WhichOneof("ref") == "digest":
            vector = store.get(vector.digest, join(path, "digest"))
        else:
            field = join(path, "name")
            vector = store.get(store.named(vector.name, field).digest, field)
    if vector.width != model.width:
        raise VectorShape(
            f"the vector has width {vector.width}; the model's stream has {model.width}",
            field=path,
            metadata={"expected": str(model.width), "got": str(vector.width)},
        )
    if vector.rows not in (1, layers):
        raise VectorShape(
            f"the vector has {vector.rows} rows for {layers} layers; it needs 1 or one each",
            field=path,
            metadata={"expected": str(layers), "got": str(vector.rows)},
        )
    return vector


def float32(value: float) -> float:
    """A number as a float field can hold it: rounded, and at most the largest finite float32."""
    limit = float(np.finfo(np.float32).max)
    return min(float(value), limit) if math.isfinite(value) else limit
