"""The grid of a sweep: a row for each site, a column for each position or group of positions.

The index of a cell is `row * columns + column`. It depends on the request alone, so a client that
calls again can name the cells that it has.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine import ModelSites, Site
from rheostat_server import validation
from rheostat_server.derivation.prompt_rows import sites_of_call
from rheostat_server.errors import InvalidValue, NonFinite
from rheostat_server.limits import DONE_RUNS, SWEEP_CELLS, SWEEP_REQUESTS, SWEEP_VALUES, ZOOM_PEAKS
from rheostat_server.selectors.spans import runs
from rheostat_wire.v1 import sweep_pb2, sweep_service_pb2

_DEFAULT_RADIUS = 3


class Row(NamedTuple):
    """A row of the grid."""

    site: Site
    """Its own site."""
    window: tuple[Site, ...]
    """All sites that its cells replace, by layer."""


class Grid(NamedTuple):
    """A grid of cells."""

    rows: tuple[Row, ...]
    """By point, then layer."""
    columns: int

    @property
    def cells(self) -> int:
        """Number of cells."""
        return len(self.rows) * self.columns

    def place(self, index: int) -> tuple[int, int]:
        """Row and column of a cell."""
        return divmod(index, self.columns)


def resolve_rows(request: sweep_service_pb2.SweepRequest, model: ModelSites) -> tuple[Row, ...]:
    """The rows of a sweep's grid.

    Raises:
        InvalidArgument: the sites or the window are malformed.
        SiteNotServed, NotSupported: a site cannot be replaced.
    """
    selection = sites_of_call(request, model)
    width = request.layer_window if request.HasField("layer_window") else 1
    if not 1 <= width <= model.num_layers:
        raise InvalidValue(
            f"a window has 1 to {model.num_layers} layers, not {width}", field="layer_window"
        )
    points = [*dict.fromkeys(site.point for site in selection.sites)]
    sites = sorted(selection.sites, key=lambda site: points.index(site.point))
    return tuple(Row(site, _window(site, width, model)) for site in sites)


def _window(site: Site, width: int, model: ModelSites) -> tuple[Site, ...]:
    """The sites of a window around a site, as far as the model has them."""
    first = site.layer - (width - 1) // 2
    layers = range(max(0, first), min(model.num_layers, first + width))
    around = (Site(site.point, layer) for layer in layers)
    return tuple(site for site in around if model.supports(site) is None)


def check_size(cells: int, grades: int, requests_per_cell: int) -> None:
    """Checks the size of a grid.

    Raises:
        InvalidValue: it has too many cells or values, or they need too many requests.
    """
    validation.check_count(cells, SWEEP_CELLS, "sites", "cells")
    if cells * grades > SWEEP_VALUES:
        raise InvalidValue(
            f"{cells} cells of {grades} grades each; at most {SWEEP_VALUES} values are allowed: "
            "sweep fewer sites or positions in a call, or give fewer grades",
            field="grades",
        )
    if cells * requests_per_cell > SWEEP_REQUESTS:
        raise InvalidValue(
            f"{cells} cells of {requests_per_cell} requests each; at most {SWEEP_REQUESTS} "
            "requests are allowed: sweep fewer sites, positions or pairs in a call",
            field="sites",
        )


class Done(NamedTuple):
    """The cells that the client has already."""

    cells: npt.NDArray[np.bool_]
    """[cells]: whether the client has each."""
    known: npt.NDArray[np.bool_]
    """[cells]: whether the client says what it found there. Such a cell never runs again."""
    values: npt.NDArray[np.float64]
    """[cells]: the first grade of a known cell; NaN for a cell that failed, and for all others."""


def resolve_done(request: sweep_service_pb2.SweepRequest, cells: int) -> Done:
    """The cells of an earlier call.

    Raises:
        InvalidValue: a run of cells is empty or beyond the grid, or the values do not match them.
    """
    validation.check_count(len(request.done), DONE_RUNS, "done", "runs of cells")
    done = np.zeros(cells, np.bool_)
    order: list[range] = []
    for index, run in enumerate(request.done):
        if not run.count or run.start + run.count > cells:
            raise InvalidValue(
                f"cells {run.start} to {run.start + run.count} are not in a grid of {cells} cells",
                field=f"done[{index}]",
            )
        done[run.start : run.start + run.count] = True
        order.append(range(run.start, run.start + run.count))
    values = np.full(cells, np.nan)
    validation.check_count(len(request.done_values), SWEEP_CELLS, "done_values", "values")
    if not request.done_values:
        return Done(done, np.zeros(cells, np.bool_), values)
    listed = sum(map(len, order))
    if len(request.done_values) != listed or listed != done.sum():
        raise InvalidValue(
            f"{len(request.done_values)} values for {listed} cells, {done.sum()} of which differ: "
            "give each cell of `done` one value, once",
            field="done_values",
        )
    given = np.array(request.done_values, np.float64)
    if np.isinf(given).any():
        raise NonFinite("must be finite, or NaN for a cell that failed", field="done_values")
    values[[cell for run in order for cell in run]] = given
    return Done(done, done, values)


def cell_runs(cells: npt.NDArray[np.intp]) -> list[sweep_pb2.CellRun]:
    """Ascending indices as runs of consecutive cells."""
    return [sweep_pb2.CellRun(start=start, count=end - start) for start, end in runs(cells)]


class ZoomPlan(NamedTuple):
    """How a grid is refined; see `Zoom` in sweep.proto."""

    layer_stride: int
    column_stride: int
    layer_radius: int
    column_radius: int
    peaks: int
    columns: Sequence[int]
    """The columns in which cells may have an effect, ascending. Others are left out."""
    changed: int
    """The number of them at which the prompts begin to differ."""

    def coarse(self, grid: Grid) -> list[int]:
        """The cells of the coarse grid. It has the first and the last layer, and the last column.

        Its first column is the last at which the prompts begin to differ, such as the last token of
        a subject, where the stream holds the whole subject. It is no further from the first column
        than half a stride, as all others are from their neighbours in the coarse grid.
        """
        first = max(0, min(self.changed - 1, self.column_stride // 2))
        columns = _strided(self.columns[first:], self.column_stride)
        by_point = groupby(range(len(grid.rows)), lambda row: grid.rows[row].site.point)
        return [
            row * grid.columns + column
            for _, rows in by_point
            for row in _strided([*rows], self.layer_stride)
            for column in columns
        ]

    def peaks_of(self, effects: npt.NDArray[np.float64], grid: Grid) -> list[int]:
        """The cells with the largest effects, none of which lies within the radii of another.

        Args:
            effects: [cells]; NaN where there is none.
            grid: the grid.
        """
        left = np.nan_to_num(effects, nan=-np.inf).reshape(len(grid.rows), grid.columns)
        found: list[int] = []
        while len(found) < self.peaks and np.isfinite(left).any():
            found.append(int(left.argmax()))
            left[self._near(found[-1], grid)] = -np.inf
        return found

    def fine(self, peaks: Iterable[int], grid: Grid) -> list[int]:
        """The cells around peaks, ascending."""
        near = np.zeros((len(grid.rows), grid.columns), np.bool_)
        for peak in peaks:
            near |= self._near(peak, grid)
        changing = np.isin(np.arange(grid.columns), self.columns)
        return [int(cell) for cell in np.flatnonzero(near & changing)]

    def _near(self, cell: int, grid: Grid) -> npt.NDArray[np.bool_]:
        """[rows, columns]: whether each cell lies within the radii of a cell."""
        row, column = grid.place(cell)
        site = grid.rows[row].site
        rows = [
            other.site.point is site.point
            and abs(other.site.layer - site.layer) <= self.layer_radius
            for other in grid.rows
        ]
        columns = np.abs(np.arange(grid.columns) - column) <= self.column_radius
        near: npt.NDArray[np.bool_] = np.logical_and.outer(rows, columns)
        return near


def resolve_zoom(zoom: sweep_pb2.Zoom, columns: Sequence[int], changed: int) -> ZoomPlan:
    """How a sweep's grid is refined.

    Args:
        zoom: the message.
        columns: see `ZoomPlan`.
        changed: likewise.

    Raises:
        InvalidValue: a number is outside its limits.
    """
    plan = ZoomPlan(
        zoom.layer_stride,
        zoom.column_stride,
        zoom.layer_radius if zoom.HasField("layer_radius") else _DEFAULT_RADIUS,
        zoom.column_radius if zoom.HasField("column_radius") else _DEFAULT_RADIUS,
        zoom.peak_count if zoom.HasField("peak_count") else 1,
        columns,
        changed,
    )
    for name in ("layer_stride", "column_stride"):
        if not getattr(plan, name):
            raise InvalidValue("must be at least 1", field=f"zoom.{name}")
    if not 1 <= plan.peaks <= ZOOM_PEAKS:
        raise InvalidValue(f"must be 1 to {ZOOM_PEAKS}", field="zoom.peak_count")
    return plan


def _strided(numbers: Sequence[int], stride: int) -> list[int]:
    """Every `stride`-th number, and the last one."""
    kept = list(numbers[::stride])
    return kept if kept[-1] == numbers[-1] else [*kept, numbers[-1]]
