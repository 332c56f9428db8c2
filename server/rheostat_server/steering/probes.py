"""Resolves probes, which read numbers of the residual stream in the forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rheostat_engine import MAX_COLUMNS, NEVER, Act, Kind, ModelSites, Normalise, Reading, Site
from rheostat_engine.cached_property import cached_property
from rheostat_server import validation
from rheostat_server.errors import InvalidValue, MissingField, ZeroVector
from rheostat_server.selectors.selection import Selection, SelectionContext, resolve_where
from rheostat_server.selectors.sites import (
    SiteSelection,
    refuse_double_names,
    refuse_what_is_no_stream,
    resolve_sites,
)
from rheostat_server.steering.readouts import check_norm, resolve_readout
from rheostat_server.steering.vector_lookup import find_vector, rows_by_layer
from rheostat_server.validation import field_path
from rheostat_server.vectors.store import Vector, VectorView
from rheostat_wire.v1 import gate_pb2, steering_pb2

_ROWS = (gate_pb2.PROBE_ROWS_EACH, gate_pb2.PROBE_ROWS_PROMPT_MEAN)


@dataclass(frozen=True)
class Probe:
    """A resolved probe: reads a number per site and selected token."""

    name: str
    path: str
    sites: tuple[Site, ...]
    """By layer, then point."""
    selection: Selection
    vector: Vector
    rows: tuple[int, ...]
    """For each site the row of the vector."""
    row_layers: tuple[int, ...]
    """The layer of each row of the vector; empty: neither the request nor a name says it."""
    reading: Reading
    """What is read; with the column of the first site."""
    signals: bool = False
    """Whether the client gets what it reads."""

    @property
    def reads_once(self) -> bool:
        """Whether it reads one number at each site, of the mean row of the prompt."""
        return self.reading.of_mean

    @cached_property
    def acts(self) -> tuple[Act, ...]:
        """The act that reads; none if no token is selected."""
        act = Act(
            kind=Kind.READ,
            vectors=(self.vector.digest,),
            rows=tuple(
                sorted(
                    (site.index, (row,)) for site, row in zip(self.sites, self.rows, strict=True)
                )
            ),
            spans=self.selection.spans,
            conditions=self.selection.conditions,
            reading=self.reading,
        )
        return (act,) if act.spans or act.conditions else ()

    @property
    def columns(self) -> tuple[int, ...]:
        """The columns to which it reads, one per site."""
        first = self.reading.column
        return tuple(range(first, first + len(self.sites)))

    def in_request(self, selection: Selection, prompt_len: int, column: int) -> "Probe":
        """The same in one of many requests, if it is of the server-wide steering or of a watch.

        Args:
            selection: the selected tokens of the request.
            prompt_len: the number of its prompt tokens.
            column: the column of the first site.
        """
        reading = self.reading._replace(column=column)
        if self.reads_once:
            reading = reading._replace(mean_at=prompt_len - 1)
            selection = selection.before(prompt_len)
        return replace(self, selection=selection, reading=reading)


def resolve_probes(
    probes: Sequence[gate_pb2.Probe],
    model: ModelSites,
    context: SelectionContext,
    vectors: VectorView,
    columns_taken: int = 0,
) -> dict[str, Probe]:
    """Resolves the probes of a request or of the server-wide steering; by name.

    Args:
        probes: the messages.
        model: the model's sites.
        context: what selectors are resolved against.
        vectors: where vectors are looked up.
        columns_taken: columns of readings that the server-wide steering takes before them.

    Raises:
        InvalidArgument: something is malformed, or two probes have one name.
        FailedPrecondition: the model does not serve a site.
        NotFound: a vector is not stored, or a name not known.
        MessageTooLarge: an inline vector is too large.
    """
    found: dict[str, Probe] = {}
    column = columns_taken
    beside = f", of which the server-wide steering takes {columns_taken}" if columns_taken else ""
    for index, message in enumerate(probes):
        path = f"probes[{index}]"
        probe = _resolve_probe(message, model, context, vectors, column, path)
        if probe.name in found:
            raise InvalidValue(
                f"another probe has the name {probe.name!r}: give each its own",
                field=field_path(path, "name"),
            )
        column += len(probe.sites)
        validation.check_count(
            column,
            MAX_COLUMNS,
            field_path(path, "sites"),
            f"readings (probes times their sites{beside})",
        )
        found[probe.name] = probe
    return found


def stream_sites(
    message: gate_pb2.Probe | steering_pb2.Intervention, model: ModelSites, path: str
) -> SiteSelection:
    """The sites of the stream at which a probe reads or an intervention acts, each once.

    Raises:
        InvalidArgument: the set is malformed, or has one site under two names.
        FailedPrecondition: a site is not served, or is no part of the stream.
    """
    field = field_path(path, "sites")
    if not message.HasField("sites"):
        raise MissingField("sites are required", field=field)
    sites = resolve_sites(message.sites, model, field)
    refuse_what_is_no_stream(sites, field)
    refuse_double_names(sites, field)
    return sites


def _resolve_probe(
    message: gate_pb2.Probe,
    model: ModelSites,
    context: SelectionContext,
    vectors: VectorView,
    column: int,
    path: str,
) -> Probe:
    name = validation.matches(message.name, validation.PROBE_NAME, field_path(path, "name"))
    sites = stream_sites(message, model, path)
    read = field_path(path, "read")
    if not message.HasField("read"):
        raise MissingField("a readout is required", field=read)
    readout = resolve_readout(message.read, read)
    ref = message.read.vector if message.read.HasField("vector") else None
    vector = find_vector(ref, vectors, model, field_path(read, "vector"))
    row_of = rows_by_layer(vector, sites.layers)
    rows = tuple(row_of[site.layer] for site in sites.sites)
    for row in sorted(set(rows)):
        if vector.vector.peaks[row] == 0:
            raise ZeroVector(
                f"row {row} is zero, so the same number would be read of every token",
                field=field_path(read, "vector"),
            )
        if readout.normalise is Normalise.NONE:
            check_norm(vector.vector, row, field_path(read, "vector"))
    selection = resolve_where(message, context, path)
    mean_at = NEVER
    if message.HasField("rows"):
        validation.known_enum(message.rows, _ROWS, field_path(path, "rows"))
        if message.rows == gate_pb2.PROBE_ROWS_PROMPT_MEAN:
            mean_at = context.prompt_len - 1
            selection = selection.before(context.prompt_len)
    return Probe(
        name,
        path,
        sites.sites,
        selection,
        vector.vector,
        rows,
        vector.row_layers,
        Reading(*readout, column, mean_at),
        message.signals,
    )
