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
"""Cells that one request may have, changes of it included."""


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

    def acquire(self, pieces: Sequence[Piece], held: Sequence[CellRun] = ()) -> CellRun | None:
        """Cells for the variants of a request's pieces that have none among those that it holds.

        None where they don't fit.
        """
        places: dict[Members, int] = {}
        count = 0
        for piece in pieces:
            for variant in piece.variants:
                members = variant.members
                known = members in places or any(members in run.places for run in held)
                if variant.combination and not known:
                    places[members] = count
                    count += variant.cells
        if count == 0:
            return CellRun(0, 0, {})
        fits = count + sum(run.count for run in held) <= _MOST
        start = self._runs.take(count) if fits else None
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


def cell_of(runs: Sequence[CellRun], variant: Variant) -> int:
    """Where a variant's measurements begin; the cells of nobody if it has none among these."""
    if not variant.combination:
        return 0
    return next((run.places[variant.members] for run in runs if variant.members in run.places), 0)


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
            for site, groups in attribution(acts, members).items():
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
