"""Grades: the numbers by which a sweep judges its cells.

A grade is a metric of the token after the prompt, or what a probe reads of the stream. A probe and
the metric KL need rows, so each prompt that is asked captures them.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rheostat_engine import Normalise, Readout
from rheostat_server import validation
from rheostat_server.derivation.lens import refuse_without_lens
from rheostat_server.derivation.prompt_rows import EVERY_TOKEN, LAST_TOKEN, check_prompt_selector
from rheostat_server.errors import (
    Defect,
    InvalidValue,
    MissingField,
    NonFinite,
    NotSupported,
    RheostatError,
    ZeroVector,
)
from rheostat_server.limits import GRADES
from rheostat_server.requests.manager import RequestManager
from rheostat_server.selectors.sites import resolve_sites, to_wire
from rheostat_server.steering.readouts import read_numbers, resolve_product
from rheostat_server.steering.vector_lookup import find_vector, rows_by_layer
from rheostat_server.validation import field_path
from rheostat_server.vectors.token_directions import with_directions
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.v1 import (
    capture_pb2,
    gate_pb2,
    selector_pb2,
    sweep_pb2,
    tensor_pb2,
    types_pb2,
    vector_pb2,
)

Numbers = npt.NDArray[np.float64]


class RowReader(Protocol):
    """Takes the rows of one capture of a prompt."""

    def add(self, rows: FloatArray) -> None:
        """Takes rows [n, W], positions ascending. May be called on a thread."""


class LastRow:
    """Keeps the last row."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self._row: FloatArray | None = None

    def add(self, rows: FloatArray) -> None:
        """Takes rows [n, W]."""
        self._row = rows[-1:].copy()

    @property
    def row(self) -> FloatArray:
        """[1, W].

        Raises:
            NonFinite: a number in it is not finite.
        """
        if self._row is None:
            raise Defect("the engine did not deliver the last row of a prompt")
        if not np.isfinite(self._row).all():
            raise NonFinite("the stream behind the last layer is not finite")
        return self._row


class Probe(NamedTuple):
    """Reads a number of each row; see `Readout`."""

    direction: Numbers
    """[W], normalised if the probe wants it so."""
    settings: Readout
    pool: gate_pb2.Pool.ValueType

    def read(self, rows: FloatArray) -> Numbers:
        """[n] of rows [n, W]."""
        wide = rows.astype(np.float64)
        return read_numbers(self.settings, wide @ self.direction, np.linalg.norm(wide, axis=1))


class PooledReading:
    """What a probe makes of the rows of a prompt."""

    def __init__(self, probe: Probe) -> None:
        """Nothing has come yet."""
        self._probe = probe
        self._count = 0
        self._sum = 0.0
        self._largest = -np.inf
        self._last = 0.0

    def add(self, rows: FloatArray) -> None:
        """Takes rows [n, W]."""
        values = self._probe.read(rows)
        self._count += len(values)
        self._sum += float(values.sum())
        self._largest = max(self._largest, float(values.max()))
        self._last = float(values[-1])

    @property
    def value(self) -> float:
        """The number that counts.

        Raises:
            NonFinite: it is not finite.
        """
        if not self._count:
            raise Defect("the engine did not deliver the rows that a probe reads")
        match self._probe.pool:
            case gate_pb2.POOL_MEAN:
                value = self._sum / self._count
            case gate_pb2.POOL_MAX:
                value = self._largest
            case _:
                value = self._last
        if not np.isfinite(value) or not np.isfinite(self._sum):
            raise NonFinite("what a probe reads is not finite")
        return value


class Grade(NamedTuple):
    """A number that cells are graded by."""

    metric: sweep_pb2.Metric.ValueType | None
    """None: the probe."""
    recovered: bool
    """Whether it is given as a part of the difference between the clean and the corrupt prompt."""
    path: str
    """Its field."""
    probe: Probe | None = None
    capture: capture_pb2.CaptureSpec | None = None
    """The rows that it needs of each prompt, of one site, as float32."""

    @property
    def name(self) -> str:
        """Its name, for errors."""
        if self.metric is None:
            return f"the probe of {self.path}"
        return sweep_pb2.Metric.Name(self.metric)

    def row_reader(self) -> RowReader | None:
        """A reader of the rows of one prompt."""
        if self.probe is not None:
            return PooledReading(self.probe)
        return LastRow() if self.capture is not None else None


async def resolve_grades(
    grades: Sequence[sweep_pb2.Grade], manager: RequestManager
) -> tuple[Grade, ...]:
    """The grades of a sweep.

    Raises:
        RheostatError: there are none or too many, or one is malformed or not served.
    """
    if not grades:
        raise MissingField("at least one grade is required", field="grades")
    validation.check_count(len(grades), GRADES, "grades", "grades")
    return tuple(
        [await _grade(grade, f"grades[{index}]", manager) for index, grade in enumerate(grades)]
    )


async def _grade(grade: sweep_pb2.Grade, path: str, manager: RequestManager) -> Grade:
    kind = validation.required(grade.WhichOneof("kind"), path, "token and probe")
    if kind == "probe":

        async def attempt() -> Grade:
            return _probe_grade(grade, path, manager)

        return await with_directions(manager.store.directions, grade.probe, attempt)
    metric, field = grade.token.metric, field_path(path, "token.metric")
    validation.known_enum(metric, sweep_pb2.Metric.values(), field)
    if grade.recovered and metric == sweep_pb2.METRIC_RANK:
        raise InvalidValue(
            "a rank is not on a scale of which a part could be recovered",
            field=field_path(path, "recovered"),
        )
    if metric != sweep_pb2.METRIC_KL:
        return Grade(metric, grade.recovered, path)
    try:
        refuse_without_lens(manager)
    except RheostatError as error:
        error.field = field
        raise
    last = types_pb2.Site(point=types_pb2.POINT_RESID_POST, layer=manager.sites.num_layers - 1)
    return Grade(metric, grade.recovered, path, capture=_capture(last, LAST_TOKEN))


def _probe_grade(grade: sweep_pb2.Grade, path: str, manager: RequestManager) -> Grade:
    path = field_path(path, "probe")
    message, pool = grade.probe.probe, gate_pb2.POOL_LAST
    if grade.probe.HasField("pool"):
        pool = grade.probe.pool
        validation.known_enum(pool, gate_pb2.Pool.values(), field_path(path, "pool"))
    path = field_path(path, "probe")
    for name in ("sites", "read"):
        if not message.HasField(name):
            raise MissingField("is required", field=field_path(path, name))
    if message.HasField("rows") and message.rows != gate_pb2.PROBE_ROWS_EACH:
        raise NotSupported(
            "a grade reads each row; POOL_MEAN is the mean of what it reads",
            field=field_path(path, "rows"),
        )
    selection = resolve_sites(message.sites, manager.sites, field_path(path, "sites"))
    if len(selection.sites) != 1:
        raise InvalidValue(
            f"the probe of a grade reads one site, not {len(selection.sites)}: give each site a "
            "grade",
            field=field_path(path, "sites"),
        )
    (site,) = selection.sites
    where = LAST_TOKEN if pool == gate_pb2.POOL_LAST else EVERY_TOKEN
    if message.HasField("where"):
        try:
            where = check_prompt_selector(message.where)
        except RheostatError as error:
            error.field = field_path(path, error.field)
            raise
    probe = Probe(*_direction(message.read, site.layer, manager, field_path(path, "read")), pool)
    return Grade(None, grade.recovered, path, probe, _capture(to_wire(site), where))


def _direction(
    readout: vector_pb2.Readout, layer: int, manager: RequestManager, path: str
) -> tuple[Numbers, Readout]:
    """The direction that a readout reads with, and its settings."""
    settings = resolve_product(readout, path)
    field = field_path(path, "vector")
    ref = readout.vector if readout.HasField("vector") else None
    found = find_vector(ref, manager.store.view(), manager.sites, field)
    row, vector = rows_by_layer(found, [layer])[layer], found.vector
    direction: Numbers = vector.row(row).astype(np.float64)
    if settings.normalise is not Normalise.NONE:
        norm = float(np.linalg.norm(direction))
        if not norm:
            raise ZeroVector("a zero vector has no direction", field=field)
        direction = direction / norm
    return direction, settings


def _capture(site: types_pb2.Site, where: selector_pb2.Selector) -> capture_pb2.CaptureSpec:
    return capture_pb2.CaptureSpec(
        sites=types_pb2.SiteSet(points=[site.point], list=types_pb2.LayerList(layers=[site.layer])),
        where=where,
        inline=capture_pb2.InlineTarget(),
        dtype=tensor_pb2.DTYPE_FLOAT32,
    )
