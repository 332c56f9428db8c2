"""Resolves CaptureSpecs: which rows, under which names, in which form.

Everything here may run on a thread, because vectors are looked up in a `VectorView`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from rheostat_engine import Codec, Directions, ModelSites, RowEncoding, Site
from rheostat_engine.cached_property import cached_property
from rheostat_server import validation
from rheostat_server.capture.encodings import RAW, Form
from rheostat_server.capture.projections import Projection, resolve_projection
from rheostat_server.errors import InvalidValue, MissingField, NotSupported
from rheostat_server.limits import CAPTURES
from rheostat_server.runs.store import RunStore
from rheostat_server.runs.targets import RunTarget, run_target
from rheostat_server.selectors.selection import Selection, SelectionContext, resolve_where
from rheostat_server.selectors.sites import of_routers, resolve_sites, width_of, write_site
from rheostat_server.selectors.spans import clipped, length
from rheostat_server.sinks import Target as SinkTarget
from rheostat_server.sinks.registry import Sinks
from rheostat_server.sinks.wire import encoding_of, group_targets
from rheostat_server.tensors import FloatType, float_type
from rheostat_server.validation import field_path
from rheostat_server.vectors.store import Vector, VectorView
from rheostat_wire.v1 import capture_pb2, receipt_pb2, tensor_pb2


class Target(Enum):
    """Where a capture's rows go."""

    INLINE = "inline"
    SUBSCRIPTION = "subscription_id"
    SINK = "sink"
    RUN = "run"


_RECEIPTS = 16
"""Receipts that equal captures keep, for different numbers of rows."""


class SiteForms:
    """The sites of a capture as the engine knows them, computed once.

    Captures that differ in nothing but their selection share it.
    """

    def __init__(self, sites: tuple[Site, ...], row_encodings: Mapping[Site, RowEncoding]) -> None:
        """Of these sites, whose rows may leave in these forms."""
        self.sites = sites
        self.row_encodings = row_encodings
        self._receipts: dict[tuple[int, int], bytes] = {}
        """The results of `receipt`, because requests with equal captures often come together."""

    @cached_property
    def by_index(self) -> dict[int, frozenset[RowEncoding | None]]:
        """The forms in which each site's rows are wanted; several where its two names differ."""
        forms_of: dict[int, set[RowEncoding | None]] = {}
        for site in self.sites:
            forms_of.setdefault(site.index, set()).add(self.row_encodings.get(site))
        return {index: frozenset(forms) for index, forms in forms_of.items()}

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """The sites' indices, ascending, each once."""
        return tuple(sorted(self.by_index))

    @cached_property
    def index_of_each(self) -> tuple[int, ...]:
        """The index of each site, in their order."""
        return tuple([site.index for site in self.sites])

    @cached_property
    def labels(self) -> bytes:
        """A message of rows with the names of all sites and nothing else, serialized."""
        message = capture_pb2.Captured()
        for site in self.sites:
            write_site(message.sites.add(), site)
        return message.SerializeToString()

    def receipt(self, rows: int, lost: int) -> bytes:
        """The receipt of a capture that has as many rows at each site, serialized.

        Args:
            rows: delivered rows at a site.
            lost: lost rows at a site.
        """
        known = self._receipts.get((rows, lost))
        if known is not None:
            return known
        message = receipt_pb2.CaptureReceipt()
        for site in self.sites:
            write_site(message.sites.add(row_count=rows, dropped_row_count=lost).site, site)
        if len(self._receipts) >= _RECEIPTS:
            self._receipts.clear()
        self._receipts[rows, lost] = receipt = message.SerializeToString()
        return receipt

    @cached_property
    def alike(self) -> frozenset[RowEncoding | None] | None:
        """The forms in which the rows of every site are wanted; None: they differ."""
        first, *others = set(self.by_index.values())
        return None if others else first


@dataclass(frozen=True, slots=True)
class ResolvedCapture:
    """A capture, resolved."""

    sites: tuple[Site, ...]
    """Every name under which rows come, by layer, then point."""
    selection: Selection
    """Which tokens. The engine copies every row within its reach; see `CaptureStream`."""
    kind: FloatType
    """Element type of the delivered rows, once decoded."""
    form: Form = RAW
    """How they travel."""
    target: Target = Target.INLINE
    """Where they go."""
    subscription: str = ""
    """The subscription that they go to."""
    sink: SinkTarget | None = None
    """The sink that they go to."""
    run: RunTarget | None = None
    """The run that they make."""
    overload: capture_pb2.Overload.ValueType = capture_pb2.OVERLOAD_FAIL
    """What happens when they come faster than they are taken; a subscription has its own."""
    projection: Projection | None = None
    """What rows are projected on."""
    row_encodings: Mapping[Site, RowEncoding] = field(default_factory=dict)
    """The encoding in which a site's rows may leave the device. Rows of other sites leave raw."""
    width: int = 0
    """Numbers of a row in the engine: W, or the experts of a router."""
    site_forms: SiteForms = field(init=False, repr=False, compare=False)
    """Its sites as the engine knows them."""

    def __post_init__(self) -> None:
        """Works nothing out yet."""
        object.__setattr__(self, "site_forms", SiteForms(self.sites, self.row_encodings))

    def with_selection(
        self, selection: Selection, target: Target | None = None
    ) -> "ResolvedCapture":
        """The same rows of other tokens; `target`: where they go, if it is elsewhere."""
        other = replace(self, selection=selection, target=target or self.target)
        object.__setattr__(other, "site_forms", self.site_forms)
        return other

    @property
    def numbers(self) -> int:
        """Numbers of a row before it is encoded."""
        return self.width if self.projection is None else self.projection.numbers

    @property
    def decoded_bytes(self) -> int:
        """Bytes of a row once it is decoded."""
        projected = self.form.encoding == tensor_pb2.ENCODING_RP8
        return self.kind.itemsize * (self.form.kept if projected else self.numbers)

    @property
    def indices(self) -> tuple[int, ...]:
        """The sites' indices, ascending, each once."""
        return self.site_forms.indices

    @property
    def forms(self) -> Mapping[int, frozenset[RowEncoding | None]]:
        """The forms in which each site's rows are wanted; several where its two names differ."""
        return self.site_forms.by_index

    def payload_bytes(self, *, row_end: int) -> int:
        """Bytes of payload if every position below `row_end` that is known is computed."""
        positions = length(clipped(self.selection.known, 0, row_end))
        row_bytes = self.form.row_bytes(self.numbers, self.kind)
        return positions * len(self.sites) * row_bytes


def resolve_captures(
    specs: Sequence[capture_pb2.CaptureSpec],
    model: ModelSites,
    context: SelectionContext,
    vectors: VectorView,
    sinks: Sinks,
    *,
    spools: bool,
) -> tuple[ResolvedCapture, ...]:
    """The captures of a request.

    Args:
        specs: as they came.
        model: its sites.
        context: what selectors are resolved against.
        vectors: where the vectors of projections are looked up.
        sinks: the server's sinks.
        spools: whether rows can wait on disk.

    Raises:
        InvalidArgument: something is malformed.
        FailedPrecondition: something is not served.
        NotFound: a vector is not stored, or a name not known.
    """
    validation.check_count(len(specs), CAPTURES, "captures", "captures")
    captures = tuple(
        _aimed(
            resolve_capture(spec, model, context, vectors, path, _target(spec, path)),
            spec,
            sinks,
            path,
        )
        for spec, path in ((spec, f"captures[{index}]") for index, spec in enumerate(specs))
    )
    for index, capture in enumerate(captures):
        check_spill(capture.overload, f"captures[{index}].overload", spools=spools)
    sink_groups(captures)
    return captures


def check_runs(
    captures: Sequence[ResolvedCapture], runs: RunStore, *, samples: int, prompt_len: int
) -> None:
    """Checks the runs that a request's captures would store.

    Raises:
        InvalidValue: two captures name one run, or there are several samples.
        RunExists: a stored run has the same id.
        StoreFull: a run is larger than the memory for runs.
    """
    seen: dict[str, int] = {}
    for index, capture in enumerate(captures):
        if capture.run is None:
            continue
        if samples > 1:
            raise InvalidValue(
                f"a run has one sample, and the request has {samples}: send a request for each",
                field="sampling.n",
            )
        path = f"captures[{index}].run.run_id"
        other = seen.setdefault(capture.run.id, index)
        if other != index:
            raise InvalidValue(
                f"captures {other} and {index} name the same run: give each its own", field=path
            )
        runs.check(capture.run.id, capture.payload_bytes(row_end=prompt_len), path)


def direction_vectors(captures: Sequence[ResolvedCapture]) -> dict[bytes, Vector]:
    """The vectors that rows are projected on, by digest."""
    projections = (capture.projection for capture in captures if capture.projection is not None)
    return {vector.digest: vector for projection in projections for vector in projection.vectors}


def sink_groups(
    captures: Sequence[ResolvedCapture],
) -> list[tuple[SinkTarget, dict[int, ResolvedCapture]]]:
    """The captures of a request that go to sinks, by index, in the groups that they keep together.

    Raises:
        InvalidValue: one group is to be kept in two ways.
    """
    aimed = [
        (index, capture.sink) for index, capture in enumerate(captures) if capture.sink is not None
    ]
    groups = []
    for target, indices in group_targets(aimed):
        members = {index: captures[index] for index in indices}
        for index, capture in members.items():
            if capture.overload != captures[indices[0]].overload:
                raise InvalidValue(
                    f"captures {indices[0]} and {index} go to one sink under one tag with "
                    "different overload policies: give them different tags",
                    field=f"captures[{index}].overload",
                )
        groups.append((target, members))
    return groups


def resolve_capture(
    spec: capture_pb2.CaptureSpec,
    model: ModelSites,
    context: SelectionContext,
    vectors: VectorView,
    path: str,
    target: Target,
) -> ResolvedCapture:
    """Resolves a capture, except for the details of its destination, such as the sink.

    Raises:
        InvalidArgument: something is malformed.
        FailedPrecondition: something is not served.
        NotFound: a vector is not stored, or a name not known.
    """
    key = _template_key(spec)
    known, template = _TEMPLATES.get(key, (None, None))
    if known is model and template is not None:
        return template.with_selection(resolve_where(spec, context, path), target)
    resolved = _resolve_capture(spec, model, context, vectors, path, target)
    if resolved.projection is None and len(resolved.sites) <= _TEMPLATE_SITES:
        if len(_TEMPLATES) >= _TEMPLATE_COUNT:
            _TEMPLATES.clear()
        _TEMPLATES[key] = model, resolved
    return resolved


_TEMPLATES: dict[bytes, tuple[ModelSites, ResolvedCapture]] = {}
"""Resolved captures by `_template_key`, because most requests of a client want the same."""

_TEMPLATE_COUNT = 64
_TEMPLATE_SITES = 256
"""Most entries of `_TEMPLATES`, and most sites of an entry."""


def _template_key(spec: capture_pb2.CaptureSpec) -> bytes:
    """The fields of a capture except its tokens and the destination of its rows, serialized."""
    key = capture_pb2.CaptureSpec()
    key.CopyFrom(spec)
    for name in ("where", "inline", "subscription_id", "sink", "run"):
        key.ClearField(name)
    return key.SerializeToString()


def _resolve_capture(
    spec: capture_pb2.CaptureSpec,
    model: ModelSites,
    context: SelectionContext,
    vectors: VectorView,
    path: str,
    target: Target,
) -> ResolvedCapture:
    if not spec.HasField("sites"):
        raise MissingField("sites are required", field=field_path(path, "sites"))
    sites = resolve_sites(spec.sites, model, field_path(path, "sites")).sites
    width = width_of(sites, model, field_path(path, "sites"))
    projection = None
    if spec.HasField("projection"):
        if of_routers(sites):
            raise NotSupported(
                "router_logits are not projected; capture them whole, they are few",
                field=field_path(path, "projection"),
            )
        layers = sorted({site.layer for site in sites})
        field = field_path(path, "projection")
        projection = resolve_projection(spec.projection, layers, vectors, model, field)
    form = _form(spec, width if projection is None else projection.numbers, path)
    _check_enum_options(spec, path)
    selection = resolve_where(spec, context, path)
    kind = FloatType(model.dtype) if projection is None else FloatType.FLOAT32
    if spec.HasField("dtype"):
        kind = float_type(spec.dtype, field_path(path, "dtype"))
    overload = spec.overload if spec.HasField("overload") else capture_pb2.OVERLOAD_FAIL
    capture = ResolvedCapture(
        sites,
        selection,
        kind,
        form,
        target,
        overload=overload,
        projection=projection,
        width=width,
    )
    return replace(capture, row_encodings=_row_encodings(capture, model))


def _target(spec: capture_pb2.CaptureSpec, path: str) -> Target:
    target = validation.required(
        spec.WhichOneof("to"), path, "inline, subscription_id, sink and run"
    )
    if target == "subscription_id" and spec.HasField("overload"):
        raise InvalidValue(
            "the subscription's own policy holds", field=field_path(path, "overload")
        )
    return Target(target)


def _aimed(
    capture: ResolvedCapture, spec: capture_pb2.CaptureSpec, sinks: Sinks, path: str
) -> ResolvedCapture:
    """A capture with its subscription, run or sink, which is checked."""
    if capture.target is Target.SUBSCRIPTION:
        return replace(capture, subscription=spec.subscription_id)
    if capture.target is Target.INLINE:
        return capture
    if capture.target is Target.RUN:
        return replace(capture, run=run_target(spec, path))
    encoding_of(capture.form.encoding, field_path(path, "encoding"))
    return replace(capture, sink=sinks.check(spec.sink, field_path(path, "sink")))


_LOSSY = (tensor_pb2.ENCODING_RP8, tensor_pb2.ENCODING_TOPK8)
"""Encodings that keep K numbers of each row."""


def _form(spec: capture_pb2.CaptureSpec, width: int, path: str) -> Form:
    encoding = spec.encoding if spec.HasField("encoding") else tensor_pb2.ENCODING_RAW
    validation.known_enum(encoding, tensor_pb2.Encoding.values(), field_path(path, "encoding"))
    name = tensor_pb2.Encoding.Name(encoding)
    if spec.HasField("seed") and encoding != tensor_pb2.ENCODING_RP8:
        raise InvalidValue(f"has no meaning for {name}", field=field_path(path, "seed"))
    if encoding not in _LOSSY:
        if spec.HasField("kept"):
            raise InvalidValue(f"has no meaning for {name}", field=field_path(path, "kept"))
        return Form(encoding)
    if not spec.HasField("kept"):
        raise MissingField(f"is required for {name}", field=field_path(path, "kept"))
    if not 1 <= spec.kept <= width:
        raise InvalidValue(f"must be 1 to {width}", field=field_path(path, "kept"))
    return Form(encoding, spec.kept, spec.seed)


_CODINGS = {
    tensor_pb2.ENCODING_RAW: Codec.CAST,
    tensor_pb2.ENCODING_LZ4_PLANES: Codec.CAST,
    tensor_pb2.ENCODING_FULL8: Codec.FULL8,
    tensor_pb2.ENCODING_RP8: Codec.RP8,
    tensor_pb2.ENCODING_TOPK8: Codec.TOPK8,
}
"""The engine's codec for each encoding. The server makes the planes from the elements."""


def _row_encodings(capture: ResolvedCapture, model: ModelSites) -> dict[Site, RowEncoding]:
    """The encoding that makes each site's rows smaller on the device; empty if none does."""
    row_type, projection = FloatType(model.dtype), capture.projection
    if of_routers(capture.sites):
        return {}  # the ring stores them beside other numbers
    codec, form = _CODINGS[capture.form.encoding], capture.form
    if codec is Codec.CAST and capture.kind is row_type and projection is None:
        return {}
    dtype = capture.kind.value if codec is Codec.CAST else ""
    by_directions: dict[Directions | None, RowEncoding] = {}
    encodings = {}
    for site in capture.sites:
        along = None if projection is None else projection.directions(site.layer)
        encoding = RowEncoding(codec, dtype, form.kept, form.seed, along)
        encodings[site] = by_directions.setdefault(along, encoding)
    smaller = encoding.row_bytes(model.width) <= model.width * row_type.itemsize
    return encodings if smaller else {}


def _check_enum_options(spec: capture_pb2.CaptureSpec, path: str) -> None:
    if spec.HasField("sharding"):
        validation.known_enum(
            spec.sharding, capture_pb2.Sharding.values(), field_path(path, "sharding")
        )
    if spec.HasField("overload"):
        field = field_path(path, "overload")
        validation.known_enum(spec.overload, capture_pb2.Overload.values(), field)


def check_spill(overload: capture_pb2.Overload.ValueType, path: str, *, spools: bool) -> None:
    """Refuses to let rows wait on disk where there is none for them.

    Raises:
        NotSupported: the server has no spool.
    """
    if overload == capture_pb2.OVERLOAD_SPILL and not spools:
        raise NotSupported(
            "the server has no spool for OVERLOAD_SPILL: start it with --spool FOLDER, or choose "
            "another policy",
            field=path,
        )
