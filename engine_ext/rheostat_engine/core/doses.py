"""Measurements: how far each act moved the rows that it touched, summed up on the device.

A cell holds one measurement at one site, for one variant of one request: the number of rows, the
sum of |change|, and sum and maximum of |change| / |x|. An addition changes every row equally. The
kernel then sums 1 / |x| instead, and the sums are multiplied here.

Invariant: cells are zero when a request gets them. The first `MAX_STEPS` cells belong to no
request. If no cells are free for a request, the kernel writes its measurements there.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.acts import Act, Kind
from rheostat_engine.composition import MAX_STEPS, attribution
from rheostat_engine.core.segments import Int64
from rheostat_engine.core.shared import Runs

_CELLS = 8192
_MOST = 512
"""The most cells of one request, with all updates of its acts."""

Norms = Mapping[bytes, npt.NDArray[np.float32]]
"""L2 norm of each row, by digest."""

HeadDose = tuple[int, int, int, float, float, float]
"""The fields of a `Dose`."""


class CellRun(NamedTuple):
    """Consecutive cells of a request."""

    start: int
    count: int  # type: ignore[assignment]  # a run is no sequence to count in


class Doses:
    """Cells in device memory."""

    def __init__(self, sites: int, device: torch.device) -> None:
        """Allocates the cells of every site."""
        self.cells = torch.zeros(sites, _CELLS + MAX_STEPS, 4, device=device)
        """[sites, cells, 4] float32: rows, sum of |change|, sum and maximum of |change| / |x|."""
        self._runs = Runs(MAX_STEPS, _CELLS + MAX_STEPS)

    def acquire(self, count: int, held: Sequence[CellRun] = ()) -> CellRun | None:
        """Cells for a request that holds some already; None where they don't fit."""
        if count == 0:
            return CellRun(0, 0)
        fits = count + sum(run.count for run in held) <= _MOST
        start = self._runs.take(count) if fits else None
        return None if start is None else CellRun(start, count)

    def take_out(self, runs: Sequence[CellRun]) -> torch.Tensor | None:
        """[sites, cells, 4] of some requests, one after the other; the cells are free again."""
        numbers = [n for run in runs for n in range(run.start, run.start + run.count)]
        if not numbers:
            return None
        where = torch.tensor(numbers)
        if self.cells.device.type == "cuda":
            where = where.pin_memory().to(self.cells.device, non_blocking=True)
        measured = self.cells.index_select(1, where)
        self.cells.index_fill_(1, where, 0.0)
        for run in runs:
            if run.count:
                self._runs.give(run.start, run.count)
        return measured


class Measures:
    """The meaning of the cells of a table of acts, shared by all requests with the table.

    A cell belongs to a measurement of a variant; additions that stand side by side are measured
    together.
    """

    def __init__(self, acts: Sequence[Act], norms: Norms) -> None:
        """Nothing is measured yet.

        Args:
            acts: the table's.
            norms: of the vectors that are added.
        """
        self.cells = 0
        """Cells that a request needs."""
        self._acts = acts
        self._norms = norms
        self._places: dict[tuple[int, ...], int] = {}
        self._entries: list[tuple[int, int, int, float]] = []
        """Act, site, cell and factor of everything that is measured."""

    def knows(self, members: tuple[int, ...]) -> int | None:
        """The first cell of a variant that was added, counted from 0; None: it was not."""
        return self._places.get(members)

    def measure(self, members: tuple[int, ...], sites: range | None = None) -> None:
        """Notes the measurements of a variant at some sites, before the variant is added.

        Args:
            members: the acts that apply, by index.
            sites: the sites; None: all.
        """
        acts = self._acts
        rows = {
            index: dict(acts[index].rows if sites is None else acts[index].site_rows.within(sites))
            for index in members
            if acts[index].strong
        }
        for site, groups in attribution(acts, members, sites).items():
            for cell, group in enumerate(groups, self.cells):
                for index in group:
                    factor = self._factor(acts[index], rows[index][site][0])
                    self._entries.append((index, site, cell, factor))

    def add(self, members: tuple[int, ...], cells: int) -> int:
        """Adds a variant whose measurements were noted; its first cell, counted from 0.

        Args:
            members: the acts that apply, by index.
            cells: measurements that the variant's longest program makes.
        """
        first = self._places[members] = self.cells
        self.cells += cells
        return first

    def read(self, measured: npt.NDArray[np.float32], first_act: int) -> list[HeadDose]:
        """Reads a request's cells, by act, then site.

        Args:
            measured: [sites, cells, 4]: the request's cells.
            first_act: index of the table's first act in the request's plan.
        """
        acts, sites, cells, factors = self._columns
        values = measured[sites, cells].astype(np.float64)
        keep = values[:, 0] > 0
        values, factors = values[keep], factors[keep]
        count = measured.shape[0]
        names, which = np.unique(acts[keep] * count + sites[keep], return_inverse=True)
        added = factors >= 0
        factor = np.where(added, factors, 1.0)
        rows, share = values[:, 0], values[:, 2] * factor
        change = np.where(added, rows * factor, values[:, 1])
        largest = np.zeros(len(names))
        np.maximum.at(largest, which, values[:, 3] * factor)
        totals = [np.bincount(which, of, len(names)).tolist() for of in (rows, change, share)]
        acts_of, sites_of = (first_act + names // count).tolist(), (names % count).tolist()
        counts = [round(total) for total in totals[0]]
        columns = (acts_of, sites_of, counts, *totals[1:], largest.tolist())
        return list(zip(*columns, strict=True))

    @cached_property
    def _columns(self) -> tuple[Int64, Int64, Int64, npt.NDArray[np.float64]]:
        """The entries as columns, once all of them were noted."""
        columns = np.array(self._entries, np.float64).reshape(-1, 4).T
        acts, sites, cells = columns[:3].astype(np.int64)
        self._entries.clear()
        return acts, sites, cells, columns[3]

    def _factor(self, act: Act, row: int) -> float:
        """The factor for the sums of an addition; negative for any other act."""
        if act.kind is not Kind.ADD:
            return -1.0
        return abs(act.scale) * float(self._norms[act.vectors[0]][row])
