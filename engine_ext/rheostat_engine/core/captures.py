"""Captures in force: which rows of the step at hand are copied to the ring, and what they are.

Invariant: a position's row is delivered once, however often preemption makes it be computed; what
finds no place is counted as lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.core.classes import CaptureClasses
from rheostat_engine.core.outlet import Outlet
from rheostat_engine.core.places import Places
from rheostat_engine.core.ring import Blocks, Region, Ring, cut_blocks, place
from rheostat_engine.core.segments import Int64, PositionTable
from rheostat_engine.core.tallies import Tallies
from rheostat_engine.events import RowsHead
from rheostat_engine.pieces import segment
from rheostat_engine.plan import Plan


@dataclass(frozen=True)
class _Captured:
    region: Region
    head: RowsHead


class Copying(NamedTuple):
    """What a step copies."""

    blocks: Blocks
    base: npt.NDArray[np.int32]
    """[B, sites]: see `Compact`."""
    sites: npt.NDArray[np.bool_]
    """[sites]: where something is copied."""


class Captures:
    """The captures of all requests."""

    def __init__(
        self,
        ring: torch.Tensor,
        outlet: Outlet,
        *,
        places: Places,
        present: frozenset[int],
        rank: int,
    ) -> None:
        """Nothing is in force.

        Args:
            ring: [ring rows, W].
            outlet: where rows go.
            places: where the model's sites are kept.
            present: the places of those that lie in this rank's part of the model.
            rank: this worker's.
        """
        self.captured_rows = 0
        self.lost_rows = 0
        self._rows = ring
        self._outlet = outlet
        self._present = present
        self._rank = rank
        self._ring = Ring(ring.shape[0])
        self._table = PositionTable()
        self._places = places
        self._classes = CaptureClasses(places.count)
        self._pending: _Captured | None = None

    def put(self, number: int, plan: Plan) -> tuple[int, ...]:
        """Puts a plan's captures in force; the classes that they hold."""
        if not plan.captures:
            self._table.drop(number)
            return ()
        cuts = segment([capture.spans for capture in plan.captures])
        sets = [
            self._present.intersection(s for i in members for s in plan.captures[i].sites)
            for _, members in cuts
        ]
        classes = self._classes.acquire(sets)
        self._table.put(number, [start for start, _ in cuts], classes)
        return tuple(classes)

    def drop(self, number: int, classes: Sequence[int]) -> None:
        """Takes a request's captures out of force."""
        self._table.drop(number)
        self._classes.release(classes)

    def release(self, classes: Sequence[int]) -> None:
        """Lets go of classes that `put` gave, in whose place another call has put others."""
        self._classes.release(classes)

    def begin(self, numbers: Int64, positions: Int64, tallies: Tallies) -> Copying | None:
        """Finds room for the rows of the step at hand; None where nothing is copied.

        Args:
            numbers: request number of each token, [n].
            positions: its position, [n].
            tallies: how far each request has come, before this step.
        """
        if not len(self._table):
            return None
        classes = self._table.lookup(numbers, positions)[:, 0]
        classes = np.where(positions >= tallies.computed_end[numbers], classes, 0)
        if not classes.any():
            return None
        blocks = cut_blocks(numbers, classes, positions)
        offsets, rows, total = place(blocks, self._classes.ranks, self._room())
        copied = offsets >= 0
        fits: npt.NDArray[np.bool_] = np.logical_or.reduce(copied, axis=1)
        if not fits.all():
            tallies.lose(blocks, ~fits, self._classes.ranks)
            self.lost_rows += int(rows[~fits].sum())
        self.captured_rows += total
        if not total:
            return None
        region = self._ring.reserve(total)
        self._pending = _Captured(region, self._head(blocks, fits))
        base = np.where(copied, offsets + region.start, 0).astype(np.int32)
        return Copying(blocks, base, np.logical_or.reduce(copied, axis=0))

    def end(self) -> None:
        """After the forward pass has been launched: its rows leave."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        fence = self._outlet.send_rows(
            pending.head, self._rows[pending.region.start : pending.region.end]
        )
        if fence is not None:
            self._ring.leaves(pending.region, fence)

    def _room(self) -> int:
        row = self._rows.shape[1] * self._rows.dtype.itemsize
        return min(self._ring.capacity, self._outlet.free_bytes // row)

    def _head(self, blocks: Blocks, fits: npt.NDArray[np.bool_]) -> RowsHead:
        classes, which = np.unique(blocks.sites_class[fits], return_inverse=True)
        return RowsHead(
            rank=self._rank,
            dtype=str(self._rows.dtype).removeprefix("torch."),
            width=self._rows.shape[1],
            classes=[
                self._places.numbers[np.flatnonzero(self._classes.ranks[number] >= 0)].tolist()
                for number in classes.tolist()
            ],
            number=_int64(blocks.request[fits]),
            which=_int64(which),
            start=_int64(blocks.start[fits]),
            count=_int64(blocks.count[fits]),
        )


def _int64(values: npt.NDArray[np.integer]) -> bytes:
    return values.astype("<i8").tobytes()
