"""Converts ops of messages to acts of the engine.

An op that would not change a bit (scale 0, strength 0, factor 1, only zero rows to add) has no act.
All its fields are checked nevertheless.
"""

import math
from dataclasses import dataclass
from typing import assert_never

from google.protobuf.message import Message

from rheostat_engine import Act, Activation, Band, Kind, Readout, Site, Spans
from rheostat_server import validation
from rheostat_server.errors import InvalidValue, MissingField
from rheostat_server.limits import DIRECTIONS
from rheostat_server.selectors.selection import Selection
from rheostat_server.steering.readouts import check_pulled, resolve_readout
from rheostat_server.steering.replacements import (
    OpContext,
    Replacement,
    resolve_mask,
    resolve_replacement,
)
from rheostat_server.steering.vector_lookup import find_vector, rows_by_layer
from rheostat_server.validation import field_path
from rheostat_server.vectors.store import Vector
from rheostat_wire.v1 import receipt_pb2, steering_pb2, vector_pb2

SERVED: dict[str, receipt_pb2.Op.ValueType] = {
    "add": receipt_pb2.OP_ADD,
    "norm_add": receipt_pb2.OP_NORM_ADD,
    "ablate": receipt_pb2.OP_ABLATE,
    "clamp": receipt_pb2.OP_CLAMP,
    "scale": receipt_pb2.OP_SCALE,
    "replace": receipt_pb2.OP_REPLACE,
}
"""The ops that are served, by their field in `Intervention`."""


@dataclass(frozen=True, slots=True)
class ResolvedOp:
    """An op at sites."""

    op: receipt_pb2.Op.ValueType
    path: str
    """Path of the op: "steering.interventions[0].add"."""
    sites: tuple[Site, ...]
    """By layer, then point."""
    vectors: tuple[Vector, ...]
    """In the order of the op's fields."""
    row_layers: tuple[tuple[int, ...], ...]
    """For each vector the layer of each row; empty: row i is for the i-th layer of the sites."""
    rows: tuple[tuple[int, ...], ...]
    """For each site the row of each vector."""
    scale: float = 1.0
    """Add, NormAdd: the factor. Replace: alpha."""
    bands: tuple[Band, ...] = ()
    """Ablate, Clamp, Scale: each has one vector, or two if it writes."""
    replacement: Replacement | None = None
    """Replace: the rows that it puts in. They are the first vector; a mask is the second."""

    @property
    def band_of(self) -> tuple[Band, ...]:
        """Ablate, Clamp, Scale: for each vector the band to which it belongs."""
        return tuple(band for band in self.bands for _ in range(band.vectors))

    @property
    def doses(self) -> tuple[float, ...]:
        """For each site, |scale * v| of Add or |scale| of NormAdd. Empty for other ops."""
        if self.op == receipt_pb2.OP_ADD:
            (vector,) = self.vectors
            return tuple(abs(self.scale) * vector.norms[row] for (row,) in self.rows)
        if self.op == receipt_pb2.OP_NORM_ADD:
            return (abs(self.scale),) * len(self.sites)
        return ()

    def acts(self, selection: Selection) -> tuple[Act, ...]:
        """The acts on the selected tokens; none if they would not change a bit.

        A Replace with a row for each position has an act for each.
        """
        replacement = self.replacement
        if replacement is None:
            acts = [self._act(selection)]
        elif replacement.positions and all(vector.peaks[0] for vector in self.vectors[1:]):
            acts = [
                self._last(replacement, ((position, position + 1),), offset)
                for offset, position in enumerate(replacement.positions)
            ]
        else:
            acts = [self._last(replacement, selection.spans, 0)]
        return tuple(act for act in acts if act.acts)

    def _last(self, replacement: Replacement, spans: Spans, offset: int) -> Act:
        """The act of a Replace at some positions; `offset` counts its replaced positions."""
        mask = self.vectors[1:]
        return Act(
            kind=Kind.ADD_LAST if replacement.added else Kind.REPLACE,
            vectors=tuple(vector.digest for vector in self.vectors),
            rows=tuple(
                sorted(
                    (site.index, (rows[0] + offset, *rows[1:]))
                    for site, rows in zip(self.sites, self.rows, strict=True)
                )
            ),
            spans=spans,
            scale=self.scale if all(vector.peaks[0] for vector in mask) else 0.0,
        )

    def _act(self, selection: Selection) -> Act:
        kind, used = _KINDS[self.op], [0]
        if kind is Kind.PULL:
            used = [i for i, band in enumerate(self.band_of) if band.strength != 0]
        sites = tuple(
            sorted(
                (site.index, tuple(rows[i] for i in used))
                for site, rows in zip(self.sites, self.rows, strict=True)
                if kind is not Kind.ADD or self.vectors[0].peaks[rows[0]] > 0
            )
        )
        return Act(
            kind=kind,
            vectors=tuple(self.vectors[i].digest for i in used),
            rows=sites,
            spans=selection.spans,
            scale=self.scale,
            bands=tuple(band for band in self.bands if band.strength != 0),
            orthogonal=self.op == receipt_pb2.OP_ABLATE,
            conditions=selection.conditions,
        )


_KINDS = {
    receipt_pb2.OP_ADD: Kind.ADD,
    receipt_pb2.OP_NORM_ADD: Kind.NORM_ADD,
    receipt_pb2.OP_ABLATE: Kind.PULL,
    receipt_pb2.OP_CLAMP: Kind.PULL,
    receipt_pb2.OP_SCALE: Kind.PULL,
}
"""The acts of ops other than Replace."""


def resolve_op(
    intervention: steering_pb2.Intervention, context: OpContext, path: str
) -> ResolvedOp:
    """An op at sites, with its vectors.

    Args:
        intervention: the intervention, which has an op.
        context: what it is resolved against.
        path: its path.

    Raises:
        InvalidArgument: something is malformed.
        NotFound: a vector is not stored, a name not known, or there is no such run.
        RunIncomplete: a run lacks a site or a position.
        MessageTooLarge: an inline vector is too large.
    """
    sites = context.sites
    name = intervention.WhichOneof("op") or ""
    field = field_path(path, name)
    scale, bands = _numbers(intervention, field)
    if name == "replace":
        return _resolve_replace(intervention, scale, context, field)
    found = [
        find_vector(ref, context.vectors, context.model, field_path(field, where))
        for where, ref in vector_refs(intervention)
    ]
    row_of = [rows_by_layer(vector, sites.layers) for vector in found]
    return ResolvedOp(
        op=SERVED[name],
        path=field,
        sites=sites.sites,
        vectors=tuple(vector.vector for vector in found),
        row_layers=tuple(vector.row_layers for vector in found),
        rows=tuple(tuple(rows[site.layer] for rows in row_of) for site in sites.sites),
        scale=scale,
        bands=bands,
    )


def _resolve_replace(
    intervention: steering_pb2.Intervention, alpha: float, context: OpContext, path: str
) -> ResolvedOp:
    replace = intervention.replace
    if not intervention.HasField("where"):
        raise MissingField(
            "a Replace needs the positions that it replaces",
            field=f"{path.rpartition('.')[0]}.where",
        )
    replacement = resolve_replacement(replace, context, path)
    mask = resolve_mask(replace, context, path)
    vectors = (replacement.rows,) if mask is None else (replacement.rows, mask)
    return ResolvedOp(
        op=receipt_pb2.OP_REPLACE,
        path=path,
        sites=context.sites.sites,
        vectors=vectors,
        row_layers=(replacement.row_layers, ())[: len(vectors)],
        rows=tuple((first, *(0 for _ in vectors[1:])) for first in replacement.first_rows),
        scale=alpha,
        replacement=replacement,
    )


def vector_refs(
    intervention: steering_pb2.Intervention,
) -> list[tuple[str, vector_pb2.VectorRef | None]]:
    """For each vector of the op, its path within the op, and its reference if it is set."""
    match intervention.WhichOneof("op"):
        case "add":
            add = intervention.add
            return [("vector", add.vector if add.HasField("vector") else None)]
        case "norm_add":
            norm_add = intervention.norm_add
            return [("vector", norm_add.vector if norm_add.HasField("vector") else None)]
        case "ablate":
            directions = intervention.ablate.directions
            return [(f"directions[{i}]", ref) for i, ref in enumerate(directions)]
        case "clamp":
            return [
                (f"bands[{i}].{where}", ref)
                for i, band in enumerate(intervention.clamp.bands)
                for where, ref in _pulled_refs(band)
            ]
        case "scale":
            return _pulled_refs(intervention.scale)
        case "replace" if intervention.replace.HasField("vector"):
            return [("vector", intervention.replace.vector)]
        case _:
            return []


def _pulled_refs(
    op: steering_pb2.Band | steering_pb2.Scale,
) -> list[tuple[str, vector_pb2.VectorRef | None]]:
    read = op.read.vector if op.read.HasField("vector") else None
    refs: list[tuple[str, vector_pb2.VectorRef | None]] = [("read.vector", read)]
    return [*refs, ("write", op.write)] if op.HasField("write") else refs


def _numbers(intervention: steering_pb2.Intervention, path: str) -> tuple[float, tuple[Band, ...]]:
    op = intervention.WhichOneof("op")
    assert op is not None  # as in `resolve_op`
    match op:
        case "ablate":
            ablate = intervention.ablate
            _check_count(len(ablate.directions), field_path(path, "directions"), "directions")
            strength = _fraction(ablate, "strength", path)
            return 1.0, (Band(0.0, 0.0, strength),) * len(ablate.directions)
        case "clamp":
            bands = intervention.clamp.bands
            _check_count(len(bands), field_path(path, "bands"), "bands")
            return 1.0, tuple(
                _band(band, field_path(path, f"bands[{index}]")) for index, band in enumerate(bands)
            )
        case "scale":
            if not intervention.scale.HasField("factor"):
                raise MissingField("a factor is required", field=field_path(path, "factor"))
            scale = intervention.scale
            factor = validation.finite(scale.factor, field_path(path, "factor"))
            readout, writes = _read(scale, path), scale.HasField("write")
            return 1.0, (Band(0.0, 0.0, 1.0 - factor, readout, writes),)
        case "norm_add":
            return validation.optional_number(intervention.norm_add, "scale", path, 1.0), ()
        case "replace":
            return _fraction(intervention.replace, "alpha", path), ()
        case "add":
            return validation.optional_number(intervention.add, "scale", path, 1.0), ()
        case _:
            assert_never(op)


def _check_count(count: int, path: str, what: str) -> None:
    if not count:
        raise MissingField(f"{what} are required", field=path)
    validation.check_count(count, DIRECTIONS, path, what)


def _band(band: steering_pb2.Band, path: str) -> Band:
    if not band.HasField("min") and not band.HasField("max"):
        raise MissingField("at least one of min and max is required", field=path)
    low = validation.optional_number(band, "min", path, -math.inf)
    high = validation.optional_number(band, "max", path, math.inf)
    if low > high:
        raise InvalidValue(
            f"max is {high:g}, which is below min, {low:g}", field=field_path(path, "max")
        )
    readout = _read(band, path)
    if band.only_on and readout.activation not in (Activation.RELU, Activation.JUMP_RELU):
        raise InvalidValue(
            "only what ACTIVATION_RELU and ACTIVATION_JUMP_RELU read can be off",
            field=field_path(path, "only_on"),
        )
    strength = _fraction(band, "strength", path)
    return Band(low, high, strength, readout, band.HasField("write"), band.only_on)


def _read(op: steering_pb2.Band | steering_pb2.Scale, path: str) -> Readout:
    if not op.HasField("read"):
        raise MissingField("a readout is required", field=field_path(path, "read"))
    readout = resolve_readout(op.read, field_path(path, "read"))
    check_pulled(readout, path, writes=op.HasField("write"))
    return readout


def _fraction(op: Message, name: str, path: str) -> float:
    """A number from 0 to 1, by default 1."""
    fraction = validation.optional_number(op, name, path, 1.0)
    if not 0 <= fraction <= 1:
        raise InvalidValue("must be 0 to 1", field=field_path(path, name))
    return fraction
