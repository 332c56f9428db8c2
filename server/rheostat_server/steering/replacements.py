"""The rows that a Replace puts in the place of a request's own, or adds to them (noise).

A source gives either one row for all positions of a site (a vector, zeros, the mean of a run), or a
row for each site and position (a tensor, a run, noise).

Invariant: everything that a source needs is found at admission, and copied. A request that runs
never lacks a row, even if its run is deleted meanwhile.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine import ModelSites, Site, Spans, largest_replaced
from rheostat_engine.cached_property import cached_property
from rheostat_server import validation
from rheostat_server.errors import InvalidValue, NonFinite, NotSupported, RunIncomplete, VectorShape
from rheostat_server.limits import REPLACED_ROWS, VECTOR_BYTES
from rheostat_server.runs.positions import absolute_positions, row_indices
from rheostat_server.runs.store import Run, RunStore
from rheostat_server.runs.targets import RUN_ID
from rheostat_server.selectors.selection import Selection, SelectionContext
from rheostat_server.selectors.sites import SiteSelection, resolve_site
from rheostat_server.selectors.spans import clipped, length
from rheostat_server.steering.vector_lookup import find_vector, rows_by_layer
from rheostat_server.tensors import FloatType, checked_payload, converted, float_type, widened
from rheostat_server.validation import counted, field_path
from rheostat_server.vectors.store import Vector, VectorView, make_vector
from rheostat_wire.dtypes import FloatArray, StoredArray
from rheostat_wire.noise import normal_row
from rheostat_wire.v1 import replace_pb2, tensor_pb2

_SOURCES = "vector, run, rows, zeros, mean and noise"


@dataclass(frozen=True)
class Replacement:
    """The rows of a Replace."""

    rows: Vector
    """All of them."""
    first_rows: tuple[int, ...]
    """For each site, the index of its first row. Its further positions have the following rows."""
    positions: tuple[int, ...] = ()
    """The replaced positions, ascending, each of which has a row of its own. Empty: every position
    has the same row."""
    run_id: str = ""
    """The run that the rows come from; empty if there is none."""
    source_positions: tuple[int, ...] = ()
    """The run's position for each replaced position; empty if the rows come from elsewhere."""
    row_layers: tuple[int, ...] = ()
    """The layer of each row, if the source is a vector whose rows are for layers."""
    added: bool = False
    """Whether the rows are added to the request's own."""

    @cached_property
    def sha256(self) -> bytes:
        """SHA-256 of the rows as float32, by site, then position."""
        values = widened(np.frombuffer(self.rows.data, self.rows.kind.numpy), self.rows.kind)
        values = values.reshape(self.rows.rows, self.rows.width)
        count = max(1, len(self.positions))
        digest = hashlib.sha256()
        for first in self.first_rows:
            digest.update(values[first : first + count].tobytes())
        return digest.digest()

    def write_source(self, source: replace_pb2.ReplaceSource) -> None:
        """Writes, for a receipt or an explanation, which rows it puts where."""
        source.run_id, source.sha256 = self.run_id, self.sha256
        for position, of_run in zip_longest(self.positions, self.source_positions):
            source.rows.add(position=position, source_position=of_run)


@dataclass(frozen=True, slots=True)
class OpContext:
    """Everything that an op is resolved against."""

    sites: SiteSelection
    """The sites at which it acts."""
    selection: Selection
    """The selected tokens."""
    request: SelectionContext
    """The request."""
    model: ModelSites
    """The model's sites."""
    vectors: VectorView
    """Where vectors are looked up."""
    runs: RunStore | None
    """The stored runs. None: they cannot be used here."""

    @property
    def dtype(self) -> FloatType:
        """The stream's element type."""
        return FloatType(self.model.dtype)

    def positions(self, kind: FloatType, path: str) -> tuple[int, ...]:
        """The selected positions that the request can reach, ascending, for rows of a type.

        Raises:
            InvalidValue: there are none, or their rows are too many or too large.
            NotSupported: the steering is server-wide.
        """
        if self.request.lenient:
            raise NotSupported(
                "the steering of many requests has no rows by position, because prompts differ: "
                "send the Replace with a request",
                field=path,
            )
        spans: Spans = clipped(self.selection.spans, 0, self.request.row_end)
        count = length(spans) * len(self.sites.sites)
        if not count:
            raise InvalidValue("no position of the request is selected", field=path)
        if count > REPLACED_ROWS:
            raise InvalidValue(
                f"{count} rows would be replaced, at {counted(len(self.sites.sites), 'site')}; at "
                f"most {REPLACED_ROWS} can be",
                field=path,
            )
        size = count * self.model.width * kind.itemsize
        if size > VECTOR_BYTES:
            raise InvalidValue(
                f"{counted(count, 'row')} of {size} bytes would be put in; at most "
                f"{VECTOR_BYTES} bytes can be: replace fewer positions or sites in one Replace",
                field=path,
            )
        return tuple(position for start, end in spans for position in range(start, end))


def resolve_replacement(replace: replace_pb2.Replace, context: OpContext, path: str) -> Replacement:
    """The rows of a Replace.

    Args:
        replace: the message.
        context: what its source is resolved against.
        path: its path: "steering.interventions[0].replace".

    Raises:
        InvalidArgument: something is malformed.
        NotFound: a vector is not stored, or there is no such run.
        RunIncomplete: the run lacks a site or a position.
        MessageTooLarge: an inline tensor is too large.
        NotSupported: this source is not served here.
    """
    kind = validation.required(replace.WhichOneof("source"), path, _SOURCES)
    if context.selection.conditions:
        raise InvalidValue(
            "a Replace selects positions, not token ids: which tokens come is not known before",
            field=f"{path.rpartition('.')[0]}.where",
        )
    field = field_path(path, kind)
    match kind:
        case "vector":
            replacement = _from_vector(replace, context, field)
        case "zeros":
            zeros = np.zeros((1, context.model.width), np.float32)
            replacement = _row_for_all_positions(zeros, context, field)
        case "rows":
            replacement = _from_rows(replace, context, field)
        case "run":
            replacement = _from_run(replace.run, context, field)
        case "mean":
            replacement = _from_mean(replace.mean, context, field)
        case _:
            replacement = _from_noise(replace.noise, context, field)
    _check_range(replacement, context, field)
    return replacement


def resolve_mask(replace: replace_pb2.Replace, context: OpContext, path: str) -> Vector | None:
    """The mask of a Replace as a vector of one row, rounded to the stream's dtype; None: no mask.

    Raises:
        InvalidArgument: it is malformed.
    """
    if not replace.HasField("mask"):
        return None
    field, width = field_path(path, "mask"), context.model.width
    kind = validation.required(replace.mask.WhichOneof("kind"), field, "dimensions and weights")
    field = field_path(field, kind)
    if kind == "dimensions":
        weights = np.zeros(width, np.float32)
        weights[_dimensions(replace.mask.dimensions.dimensions, width, field)] = 1.0
    else:
        weights = _weights(replace.mask.weights, width, field)
    rounded = converted(weights, row_type=FloatType.FLOAT32, wanted=context.dtype)
    return make_vector(context.dtype, 1, width, rounded.tobytes(), field)


def _dimensions(dimensions: Sequence[int], width: int, path: str) -> list[int]:
    path = field_path(path, "dimensions")
    if not dimensions:
        raise InvalidValue("at least one dimension is required", field=path)
    validation.check_count(len(dimensions), width, path, "dimensions")
    validation.no_repeats(dimensions, path, "dimensions")
    if max(dimensions) >= width:
        raise InvalidValue(
            f"dimension {max(dimensions)} is not one of 0 to {width - 1}", field=path
        )
    return list(dimensions)


def _weights(tensor: tensor_pb2.Tensor, width: int, path: str) -> FloatArray:
    kind = float_type(tensor.dtype, field_path(path, "dtype"))
    if list(tensor.shape) != [width]:
        raise _shape(tensor.shape, [width], field_path(path, "shape"))
    values = widened(np.frombuffer(checked_payload(tensor, path, kind=kind), kind.numpy), kind)
    if not ((values >= 0) & (values <= 1)).all():
        raise InvalidValue("weights are 0 to 1", field=field_path(path, "inline"))
    return values


def _from_vector(replace: replace_pb2.Replace, context: OpContext, path: str) -> Replacement:
    found = find_vector(replace.vector, context.vectors, context.model, path)
    row_of = rows_by_layer(found, context.sites.layers)
    return Replacement(
        found.vector,
        tuple(row_of[site.layer] for site in context.sites.sites),
        row_layers=found.row_layers,
    )


def _row_for_all_positions(rows: FloatArray, context: OpContext, path: str) -> Replacement:
    """A replacement by rows [1, W] for all sites, or [sites, W]."""
    vector = make_vector(FloatType.FLOAT32, len(rows), rows.shape[1], rows.tobytes(), path)
    numbers = range(len(rows)) if len(rows) > 1 else (0,) * len(context.sites.sites)
    return Replacement(vector, tuple(numbers))


def _from_rows(replace: replace_pb2.Replace, context: OpContext, path: str) -> Replacement:
    """Rows that the request holds, a row for each site and position."""
    tensor, width = replace.rows, context.model.width
    kind = float_type(tensor.dtype, field_path(path, "dtype"))
    positions = context.positions(kind, path)
    expected = [len(context.sites.sites), len(positions), width]
    if list(tensor.shape) != expected:
        raise _shape(tensor.shape, expected, field_path(path, "shape"))
    data = checked_payload(tensor, path, kind=kind)
    return _row_per_position(kind, data, positions, context, field_path(path, "inline"))


def _row_per_position(
    kind: FloatType, data: bytes, positions: tuple[int, ...], context: OpContext, path: str
) -> Replacement:
    """A replacement by rows [sites, positions, W]."""
    count = len(positions)
    rows = make_vector(kind, len(context.sites.sites) * count, context.model.width, data, path)
    first_rows = tuple(site * count for site in range(len(context.sites.sites)))
    return Replacement(rows, first_rows, positions)


def _from_run(source: replace_pb2.RunSource, context: OpContext, path: str) -> Replacement:
    with _held_run(source.run_id, context, path) as run:
        positions = context.positions(run.dtype, path)
        wanted = _source_positions(source, run, positions, context, path)
        field = field_path(path, "positions") if source.HasField("positions") else path
        at = row_indices(run, wanted, field)
        sites = context.sites.sites
        if source.HasField("site"):
            site = resolve_site(source.site, context.model, field_path(path, "site"))
            sites = (site,) * len(sites)
        rows = np.stack([_rows_of(run, site, path)[at] for site in sites])
        replacement = _row_per_position(run.dtype, rows.tobytes(), positions, context, path)
    return replace_fields(replacement, run_id=run.id, source_positions=tuple(wanted))


def _from_mean(source: replace_pb2.MeanSource, context: OpContext, path: str) -> Replacement:
    with _held_run(source.run_id, context, path) as run:
        at = averaged_rows(source, run, path)
        means = np.stack(
            [
                widened(_rows_of(run, site, path)[at], run.dtype).mean(axis=0, dtype=np.float64)
                for site in context.sites.sites
            ]
        ).astype(np.float32)
    return replace_fields(_row_for_all_positions(means, context, path), run_id=run.id)


def averaged_rows(source: replace_pb2.MeanSource, run: Run, path: str) -> npt.NDArray[np.intp]:
    """Which rows of each of a run's sites a mean is taken of.

    Raises:
        InvalidPosition: a position is not one of the run's prompt.
        InvalidValue: a position is repeated.
        RunIncomplete: the run does not hold a position, or none.
    """
    at = np.arange(len(run.positions))
    if source.HasField("positions"):
        field = field_path(path, "positions")
        wanted = absolute_positions(source.positions.positions, run, field)
        validation.no_repeats(wanted, field, "positions")
        at = row_indices(run, wanted, field)
    if not len(at):
        raise RunIncomplete(f"the run {run.id} has no position to average", field=path)
    return at


def _from_noise(source: replace_pb2.NoiseSource, context: OpContext, path: str) -> Replacement:
    """Rows of noise, drawn here."""
    std = _noise_std(source, context.model, path)
    positions = context.positions(FloatType.FLOAT32, path)
    sites, width = context.sites.sites, context.model.width
    rows = np.empty((len(sites), len(positions), width), np.float32)
    with np.errstate(over="ignore"):  # `_check_range` refuses infinities
        for site, rows_of_site in zip(sites, rows, strict=True):
            for position, row in zip(positions, rows_of_site, strict=True):
                row[:] = std * normal_row(source.seed, site.index, position, width)
    replacement = _row_per_position(FloatType.FLOAT32, rows.tobytes(), positions, context, path)
    return replace_fields(replacement, added=True)


def _noise_std(source: replace_pb2.NoiseSource, model: ModelSites, path: str) -> float:
    """The standard deviation of noise.

    Raises:
        NotSupported: it is a multiple of the embedding's, which could not be measured.
    """
    kind = validation.required(source.WhichOneof("scale"), path, "std and embedding_std")
    if kind == "relative_std":
        raise NotSupported(
            "noise relative to a row's own elements is not served: give embedding_std, a multiple "
            "of the standard deviation of the model's embedding",
            field=field_path(path, kind),
        )
    field = field_path(path, kind)
    given = source.std if kind == "std" else source.embedding_std
    if validation.finite(given, field) <= 0:
        raise InvalidValue("must be above 0", field=field)
    if kind == "std":
        return given
    if not model.embedding_std:
        raise NotSupported(
            "the standard deviation of the model's embedding is not known, because "
            f"{model.embedding_refused}: give std",
            field=field,
        )
    return given * model.embedding_std


@contextmanager
def _held_run(run_id: str, context: OpContext, path: str) -> Iterator[Run]:
    """A run, which is not evicted while the context lasts.

    Raises:
        NotSupported: runs cannot be used here.
        RunNotFound: there is none.
        VectorShape: its rows are not rows of this model's stream.
    """
    if context.runs is None:
        raise NotSupported(
            "runs cannot be used here, because they belong to a prompt: send the Replace with a "
            "request",
            field=path,
        )
    field = field_path(path, "run_id")
    run = context.runs.hold(validation.matches(run_id, RUN_ID, field), field)
    try:
        if run.width != context.model.width:
            raise _shape([run.width], [context.model.width], field)
        yield run
    finally:
        context.runs.release(run)


def _source_positions(
    source: replace_pb2.RunSource,
    run: Run,
    positions: Sequence[int],
    context: OpContext,
    path: str,
) -> list[int]:
    """The run's position for each replaced position."""
    if source.HasField("positions"):
        field = field_path(path, "positions")
        if source.HasField("alignment"):
            raise InvalidValue("give positions or an alignment, not both", field=field)
        wanted = absolute_positions(source.positions.positions, run, field)
        if len(wanted) != len(positions):
            raise InvalidValue(
                f"{counted(len(wanted), 'position')} of the run cannot fill "
                f"{counted(len(positions), 'replaced position')}; give one for each",
                field=field,
            )
        return wanted
    alignment = replace_pb2.ALIGNMENT_IDENTITY
    if source.HasField("alignment"):
        field = field_path(path, "alignment")
        validation.known_enum(source.alignment, replace_pb2.Alignment.values(), field)
        alignment = source.alignment
    if alignment == replace_pb2.ALIGNMENT_IDENTITY:
        return list(positions)
    aligned = align(context.request.prompt.token_ids, run.prompt_token_ids.tolist())
    wanted = [aligned.partner(position) for position in positions]
    if -1 in wanted:
        raise RunIncomplete(
            f"position {positions[wanted.index(-1)]} has no partner in the run {run.id}: its "
            "prompt differs there. Choose the positions of the run",
            field=path,
        )
    return wanted


class AlignedPrompts(NamedTuple):
    """How the positions of a prompt correspond to those of another prompt."""

    prefix: int
    """Tokens that both begin with."""
    suffix: int
    """Tokens that both end with, beyond the prefix."""
    length: int
    """Tokens of the prompt."""
    other_length: int
    """Tokens of the other prompt."""

    def partner(self, position: int) -> int:
        """The other prompt's position; -1 if there is none. Generated tokens follow the suffix."""
        if position < self.prefix and position < self.length:
            return position
        if position >= self.length - self.suffix:
            return position - self.length + self.other_length
        return -1


def align(tokens: Sequence[int], others: Sequence[int]) -> AlignedPrompts:
    """Aligns two prompts by their longest common prefix, then their longest common suffix."""
    shorter = min(len(tokens), len(others))
    prefix = next((i for i in range(shorter) if tokens[i] != others[i]), shorter)
    suffix = next(
        (i for i in range(shorter - prefix) if tokens[-1 - i] != others[-1 - i]), shorter - prefix
    )
    return AlignedPrompts(prefix, suffix, len(tokens), len(others))


def _rows_of(run: Run, site: Site, path: str) -> StoredArray:
    try:
        return run.rows(site)
    except KeyError:
        raise RunIncomplete(
            f"the run {run.id} has no rows of {site.point.value} {site.layer}", field=path
        ) from None


def _check_range(replacement: Replacement, context: OpContext, path: str) -> None:
    """Refuses rows with elements that the engine would limit.

    Raises:
        NonFinite: an element is too large.
    """
    largest = largest_replaced(context.dtype.finite_max)
    count = max(1, len(replacement.positions))
    peak = max(
        replacement.rows.peaks[row]
        for first in replacement.first_rows
        for row in range(first, first + count)
    )
    if peak > largest:
        raise NonFinite(
            f"a row reaches {peak:.4g}; rows of at most {largest:.4g} can replace rows in the "
            f"model's {context.dtype.value}",
            field=path,
        )


def _shape(got: Sequence[int], expected: Sequence[int], path: str) -> VectorShape:
    texts = [f"[{', '.join(map(str, shape[:8]))}]" for shape in (got, expected)]
    return VectorShape(
        f"the shape is {texts[0]}; it must be {texts[1]}",
        field=path,
        metadata={"expected": texts[1], "got": texts[0]},
    )
