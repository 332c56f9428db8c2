"""Steering resolved into additions.

In two stages: `draft_steering` checks all that the request says by itself and may run on a thread;
`resolve_steering` looks vectors up in the store and settles rows and doses.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rheostat._proto.v1 import steering_pb2, tensor_pb2
from rheostat_engine import Addition, ModelSites, Site, Spans
from rheostat_server import checks
from rheostat_server.checks import join
from rheostat_server.errors import (
    InvalidValue,
    MessageTooLarge,
    MissingField,
    NonFinite,
    NotSupported,
    OpNotServed,
    VectorShape,
)
from rheostat_server.limits import INLINE_VECTOR_BYTES, INTERVENTIONS
from rheostat_server.selection import EVERYTHING, SelectionContext, resolve_selector
from rheostat_server.sites import SiteSelection, refuse_double_names, resolve_sites
from rheostat_server.tensors import FloatType, checked_payload, float_type
from rheostat_server.vectors import Vector, VectorStore, make_vector, vector_rows

OPS: Mapping[str, str] = {
    "norm_add": "NormAdd",
    "ablate": "Ablate",
    "clamp": "Clamp",
    "scale": "Scale",
    "replace": "Replace",
}
"""Ops of the contract that are not served yet."""

ONLY_ADD = "is not served yet; Add is"
"""Why, and what can be done."""


@dataclass(frozen=True, slots=True)
class DraftAdd:
    """An Add whose vector is not looked up yet."""

    path: str
    """Path of the intervention."""
    selection: SiteSelection
    """Where."""
    spans: Spans
    """Which tokens."""
    scale: float
    """Factor, a float32."""
    vector: Vector | steering_pb2.VectorRef
    """The vector if it came inline, otherwise what to look up."""


@dataclass(frozen=True, slots=True)
class ResolvedAdd:
    """An Add, resolved."""

    sites: tuple[Site, ...]
    """Where, by layer, then point."""
    spans: Spans
    """Which tokens."""
    vector: Vector
    """What is added."""
    scale: float
    """Factor."""
    rows: tuple[int, ...]
    """The vector's row at each of the sites."""

    @property
    def doses(self) -> tuple[float, ...]:
        """|scale * v| at each of the sites."""
        return tuple(abs(self.scale) * self.vector.norms[row] for row in self.rows)

    def addition(self) -> Addition | None:
        """What the engine has to do: None where nothing would change a bit."""
        acting = tuple(
            sorted(
                (site.index, row)
                for site, row in zip(self.sites, self.rows, strict=True)
                if self.vector.peaks[row] > 0
            )
        )
        if self.scale == 0 or not acting or not self.spans:
            return None
        return Addition(self.vector.digest, acting, self.scale, self.spans)


def draft_steering(
    steering: steering_pb2.Steering, model: ModelSites, context: SelectionContext
) -> list[DraftAdd]:
    """Checks a request's steering as far as the request itself goes.

    Raises:
        InvalidArgument: something is malformed.
        FailedPrecondition: something is not served.
        MessageTooLarge: an inline vector is too large.
    """
    path = "steering.interventions"
    checks.at_most(len(steering.interventions), INTERVENTIONS, path, "interventions")
    return [
        _draft(intervention, model, context, f"{path}[{index}]")
        for index, intervention in enumerate(steering.interventions)
    ]


def resolve_steering(
    drafts: Sequence[DraftAdd], store: VectorStore, model: ModelSites
) -> tuple[ResolvedAdd, ...]:
    """Looks the vectors up and checks that they fit.

    Raises:
        NotFound: a vector is not stored or a name not known.
        VectorShape: a vector does not fit model or layers.
        NonFinite: what would be added is not finite in the model's dtype.
    """
    resolved = tuple(_resolve(draft, store, model) for draft in drafts)
    _check_overflow(drafts, resolved, FloatType(model.dtype))
    return resolved


def _draft(
    intervention: steering_pb2.Intervention,
    model: ModelSites,
    context: SelectionContext,
    path: str,
) -> DraftAdd:
    op = checks.required(
        intervention.WhichOneof("op"), path, "add, norm_add, ablate, clamp, scale and replace"
    )
    if op in OPS:
        raise OpNotServed(f"{OPS[op]} {ONLY_ADD}", field=join(path, op))
    if intervention.HasField("gate"):
        raise NotSupported(
            "gates are not served yet; send the intervention without one", field=join(path, "gate")
        )
    if not intervention.HasField("sites"):
        raise MissingField("sites are required", field=join(path, "sites"))
    selection = resolve_sites(intervention.sites, model, join(path, "sites"))
    refuse_double_names(selection, join(path, "sites"))
    spans = EVERYTHING
    if intervention.HasField("where"):
        spans = resolve_selector(intervention.where, context, join(path, "where"))
    add = intervention.add
    scale = checks.finite(add.scale, join(path, "add.scale")) if add.HasField("scale") else 1.0
    vector = _draft_vector(add, model.width, join(path, "add.vector"))
    return DraftAdd(path, selection, spans, scale, vector)


def _draft_vector(add: steering_pb2.Add, width: int, path: str) -> Vector | steering_pb2.VectorRef:
    if not add.HasField("vector"):
        raise MissingField("a vector is required", field=path)
    kind = checks.required(add.vector.WhichOneof("ref"), path, "digest, name and inline")
    if kind == "inline":
        return inline_vector(add.vector.inline, width, join(path, "inline"))
    if kind == "digest" and len(add.vector.digest) != 32:
        raise InvalidValue("a digest has 32 bytes", field=join(path, "digest"))
    if kind == "name":
        checks.matches(add.vector.name, checks.VECTOR_NAME, join(path, "name"))
    return add.vector


def inline_vector(tensor: tensor_pb2.Tensor, width: int, path: str) -> Vector:
    """The vector of a model of this width that a tensor in a request holds.

    Raises:
        InvalidArgument: it is no vector.
        MessageTooLarge: it is too large.
    """
    kind = float_type(tensor.dtype, join(path, "dtype"))
    if len(tensor.inline) > INLINE_VECTOR_BYTES:
        raise MessageTooLarge(
            f"{len(tensor.inline)} bytes; inline vectors have at most {INLINE_VECTOR_BYTES}. "
            "Put it first",
            field=join(path, "inline"),
        )
    rows = vector_rows(tensor.shape, width, join(path, "shape"))
    data = checked_payload(tensor, path, kind=kind)
    return make_vector(kind, rows, width, data, join(path, "inline"))


def _resolve(draft: DraftAdd, store: VectorStore, model: ModelSites) -> ResolvedAdd:
    path = join(draft.path, "add.vector")
    vector = draft.vector
    if not isinstance(vector, Vector):
        if vector.WhichOneof("ref") == "digest":
            vector = store.get(vector.digest, join(path, "digest"))
        else:
            field = join(path, "name")
            vector = store.get(store.named(vector.name, field).digest, field)
    layers = draft.selection.layers
    if vector.width != model.width:
        raise VectorShape(
            f"the vector has width {vector.width}; the model's stream has {model.width}",
            field=path,
            metadata={"expected": str(model.width), "got": str(vector.width)},
        )
    if vector.rows not in (1, len(layers)):
        raise VectorShape(
            f"the vector has {vector.rows} rows for {len(layers)} layers; it needs 1 or one each",
            field=path,
            metadata={"expected": str(len(layers)), "got": str(vector.rows)},
        )
    row_of = {layer: (i if vector.rows > 1 else 0) for i, layer in enumerate(layers)}
    rows = tuple(row_of[site.layer] for site in draft.selection.sites)
    return ResolvedAdd(draft.selection.sites, draft.spans, vector, draft.scale, rows)


def _check_overflow(
    drafts: Sequence[DraftAdd], resolved: Sequence[ResolvedAdd], kind: FloatType
) -> None:
    """Refuses sums that could leave the range of the dtype in which the engine holds them."""
    reached: dict[int, float] = {}
    for draft, add in zip(drafts, resolved, strict=True):
        for site, row in zip(add.sites, add.rows, strict=True):
            total = reached.get(site.index, 0.0) + abs(add.scale) * add.vector.peaks[row]
            reached[site.index] = total
            if not total < kind.largest:
                raise NonFinite(
                    f"what is added at {site.point.value} {site.layer} reaches {total:.4g}, which "
                    f"is not finite in the model's {kind.value}",
                    field=join(draft.path, "add.scale"),
                )


def float32(value: float) -> float:
    """A number as a float field can hold it: rounded, and at most the largest finite float32."""
    limit = float(np.finfo(np.float32).max)
    return min(float(value), limit) if math.isfinite(value) else limit
