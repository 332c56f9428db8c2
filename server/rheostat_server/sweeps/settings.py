"""The settings of a sweep: everything of its request, checked."""

from collections.abc import Sequence
from typing import NamedTuple

from rheostat_server import validation
from rheostat_server.errors import InvalidValue
from rheostat_server.limits import BASELINES, REPLACED_ROWS, VECTOR_BYTES
from rheostat_server.requests.manager import RequestManager
from rheostat_server.runs.targets import lease_seconds
from rheostat_server.selectors.selection import EVERYTHING, typical_context
from rheostat_server.selectors.sites import SiteSelection
from rheostat_server.steering.replacements import OpContext, resolve_mask
from rheostat_server.sweeps.cells import Blend
from rheostat_server.sweeps.grades import Grade, resolve_grades
from rheostat_server.sweeps.grid import (
    Done,
    Grid,
    ZoomPlan,
    check_size,
    resolve_done,
    resolve_rows,
    resolve_zoom,
)
from rheostat_server.sweeps.pairs import Pair, changing_columns, column_labels, resolve_pairs
from rheostat_server.tasks.offload import offload
from rheostat_server.tensors import FloatType
from rheostat_server.validation import field_path
from rheostat_wire.v1 import replace_pb2, sweep_pb2, sweep_service_pb2

_DEFAULT_CONCURRENCY = 64
_DEFAULT_BASELINES = 8

_DONE_BYTES = 64
"""Bytes that `offload` counts for a run of cells that are done, and for a value of one."""


class Settings(NamedTuple):
    """Everything of a request."""

    pairs: tuple[Pair, ...]
    labels: Sequence[str]
    """The names of the columns."""
    grid: Grid
    grades: tuple[Grade, ...]
    blend: Blend
    zoom: ZoomPlan | None
    done: Done
    baselines: int
    """Repeats of each unchanged prompt."""
    concurrency: int
    background: bool
    pair_values: bool
    lease: float | None
    """Seconds for which the sweep's runs are kept; None: not at all."""

    @property
    def late_baselines(self) -> int:
        """How many of `baselines` run among later cells. No cell waits for them."""
        return self.baselines // 2


async def resolve(request: sweep_service_pb2.SweepRequest, manager: RequestManager) -> Settings:
    """The settings of a request.

    Raises:
        RheostatError: something is invalid.
    """
    grades = await resolve_grades(request.grades, manager)
    if request.lora_name in manager.info.head_loras:
        _refuse_divergence(grades, request.lora_name)
    rows = resolve_rows(request, manager.sites)
    baselines = _number(request, "baseline_count", _DEFAULT_BASELINES, BASELINES)
    running = manager.info.running_samples
    concurrency = _number(
        request, "max_concurrent_cells", min(_DEFAULT_CONCURRENCY, running), running
    )
    background = True
    if request.HasField("priority"):
        validation.known_enum(request.priority, sweep_pb2.SweepPriority.values(), "priority")
        background = request.priority == sweep_pb2.SWEEP_PRIORITY_BACKGROUND
    lease = None
    if request.HasField("keep_runs"):
        lease = lease_seconds(request.keep_runs, "keep_runs")
    blend = _blend(request, manager)
    pairs = await resolve_pairs(request, grades, manager, background=background)
    for index, pair in enumerate(pairs):
        if not pair.corrupt and any(grade.recovered for grade in grades):
            raise InvalidValue(
                "nothing can be recovered without a corrupt prompt: leave `recovered` out, or name "
                "a corrupt prompt",
                field=f"pairs[{index}]",
            )
    labels = column_labels(request, pairs)
    grid = Grid(rows, len(labels))
    each = sum(len(pair.bases) * len(pair.answers.questions) for pair in pairs)
    check_size(grid.cells, len(grades), each)
    _check_rows(grid, pairs, manager)
    zoom = None
    if request.HasField("zoom"):
        zoom = resolve_zoom(request.zoom, *changing_columns(pairs))
    size = _DONE_BYTES * (len(request.done) + len(request.done_values))
    return Settings(
        pairs,
        labels,
        grid,
        grades,
        blend,
        zoom,
        await offload(size, resolve_done, request, grid.cells),
        baselines,
        concurrency,
        background,
        request.pair_values,
        lease,
    )


def _refuse_divergence(grades: Sequence[Grade], lora: str) -> None:
    """Refuses KL, which is computed with the base model's unembedding.

    Raises:
        InvalidValue: a grade is a divergence.
    """
    for index, grade in enumerate(grades):
        if grade.metric == sweep_pb2.METRIC_KL:
            raise InvalidValue(
                f"the adapter {lora} changes the unembedding, and a divergence is computed with "
                "the base model's: choose another grade",
                field=f"grades[{index}].metric",
            )


def _check_rows(grid: Grid, pairs: Sequence[Pair], manager: RequestManager) -> None:
    """Checks how much is replaced at once.

    Raises:
        InvalidValue: a cell replaces too many rows, or the rows of a site are too large.
    """
    window = max(len(row.window) for row in grid.rows)
    row_bytes = manager.sites.width * FloatType.FLOAT32.itemsize
    for pair in pairs:
        largest = max(map(len, pair.columns))
        validation.check_count(
            largest * window, REPLACED_ROWS, field_path(pair.path, "groups"), "rows in a cell"
        )
        size = len({position for column in pair.columns for position in column}) * row_bytes
        if size > VECTOR_BYTES:
            raise InvalidValue(
                f"the rows of a site take {size} bytes; at most {VECTOR_BYTES} are allowed: choose "
                "fewer positions",
                field=pair.path,
            )


def _number(request: sweep_service_pb2.SweepRequest, name: str, default: int, most: int) -> int:
    if not request.HasField(name):  # type: ignore[arg-type]  # the callers' names are fields
        return default
    value = int(getattr(request, name))
    if not 1 <= value <= most:
        raise InvalidValue(f"must be 1 to {most}, not {value}", field=name)
    return value


def _blend(request: sweep_service_pb2.SweepRequest, manager: RequestManager) -> Blend:
    alpha = 1.0
    if request.HasField("alpha"):
        alpha = validation.finite(request.alpha, "alpha")
        if not 0 <= alpha <= 1:
            raise InvalidValue("must be 0 to 1", field="alpha")
    if not request.HasField("mask"):
        return Blend(alpha, None)
    # A mask does not depend on sites or tokens.
    context = OpContext(
        SiteSelection((), ()),
        EVERYTHING,
        typical_context(manager.info),
        manager.sites,
        manager.store.view(),
        None,
    )
    return Blend(alpha, resolve_mask(replace_pb2.Replace(mask=request.mask), context, ""))
