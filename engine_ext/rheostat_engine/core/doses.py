"""Measurements: how far each act moved the rows that it touched, summed up on the device.

A cell holds, for one site, what one measurement of one variant of one request amounts to: rows, sum
of |change|, sum and largest of |change| / |x|. For additions, whose change is the same for every
row, the kernel counts 1 / |x|, and the sums are multiplied here.

Invariant: cells are zero when they are handed out. The first `MAX_STEPS` cells are nobody's: what
can't be measured is written there.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.composition import MAX_STEPS, Piece, Variant, attribution
from rheostat_engine.core.shared import Runs
from rheostat_engine.plan import Act, Kind

Members = tuple[int, ...]
"""Acts that apply together, by index in the plan."""

_CELLS = 8192
_MOST = 512
"""Cells that one request may have."""


class CellRun(NamedTuple):
    """The cells of a request."""

    start: int
    count: int  # type: ignore[assignment]  # a run is no sequence to count in
    places: Mapping[Members, int]
    """Where the cells of tokens to which these acts apply begin."""


class Doses:
    """Cells in device memory."""

    def __init__(self, sites: int, device: torch.device) -> None:
        """Allocates the cells of every site."""
        self.cells = torch.zeros(sites, _CELLS + MAX_STEPS, 4, device=device)
        """[sites, cells, 4] float32: rows, sum of |change|, sum and maximum of |change| / |x|."""
        self._runs = Runs(MAX_STEPS, _CELLS + MAX_STEPS)

    def acquire(self, pieces: Sequence[Piece]) -> CellRun | None:
        """Cells for all variants of a request's pieces; None where they don't fit."""
        places: dict[Members, int] = {}
        count = 0
        for piece in pieces:
            for variant in piece.variants:
                if variant.combination and variant.members not in places:
                    places[variant.members] = count
                    count += variant.cells
        if count == 0:
            return CellRun(0, 0, {})
        start = self._runs.take(count) if count <= _MOST else None
        if start is None:
            return None
        return CellRun(start, count, {members: start + at for members, at in places.items()})

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


def cell_of(run: CellRun | None, variant: Variant) -> int:
    """Where a variant's measurements begin; the cells of nobody if there are none."""
    if run is None or not variant.combination:
        return 0
    return run.places[variant.members]


Norms = Mapping[bytes, npt.NDArray[np.float32]]
"""L2 norm of each row, by digest."""


def read_doses(
    acts: Sequence[Act], runs: Sequence[CellRun], measured: npt.NDArray[np.float32], norms: Norms
) -> list[tuple[int, int, int, float, float, float]]:
    """What a request's cells say, as `Dose`s: by act, then site.

    Args:
        acts: the plan's.
        runs: the request's cells.
        measured: [sites, cells, 4], the cells of one run after those of the other.
        norms: of the vectors that are added.
    """
    totals: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    added = {index: dict(act.rows) for index, act in enumerate(acts) if act.kind is Kind.ADD}
    begin = 0
    for run in runs:
        for members, place in run.places.items():
            first = begin + place - run.start
            for site in {site for member in members for site, _ in acts[member].rows}:
                groups = attribution(acts, members, site)
                cells = measured[site, first : first + len(groups)].tolist()
                for (rows, change, share, largest), group in zip(cells, groups, strict=True):
                    if rows == 0:
                        continue
                    for index in group:
                        factor = 1.0
                        if index in added:
                            (row,) = added[index][site]
                            norm = float(norms[acts[index].vectors[0]][row])
                            factor = abs(acts[index].scale) * norm
                            change = rows * factor
                        total = totals[index, site]
                        total[0] += rows
                        total[1] += change
                        total[2] += share * factor
                        total[3] = max(total[3], largest * factor)
        begin += run.count
    return [
        (index, site, round(rows), change, share, largest)
        for (index, site), (rows, change, share, largest) in sorted(totals.items())
    ]
