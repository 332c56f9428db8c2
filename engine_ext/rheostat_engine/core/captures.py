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

from rheostat_engine.core.classes import CaptureClasses, Sites
from rheostat_engine.core.forms import REFUSED, Forms
from rheostat_engine.core.outlet import Group, Outlet
from rheostat_engine.core.places import Places
from rheostat_engine.core.ring import Blocks, Placed, Region, Ring, cut_blocks, place
from rheostat_engine.core.segments import Int64, PositionTable
from rheostat_engine.core.tallies import Tallies
from rheostat_engine.events import RowsHead
from rheostat_engine.pieces import segment
from rheostat_engine.plan import Capture, Plan
from rheostat_engine.row_forms import RAW_KEY


@dataclass(frozen=True)
class _Captured:
    region: Region
    head: RowsHead
    groups: list[Group]


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
        forms: Forms,
        *,
        places: Places,
        present: frozenset[int],
        rank: int,
    ) -> None:
        """Nothing is in force.

        Args:
            ring: [ring rows, W].
            outlet: where rows go.
            forms: those in which they leave.
            places: where the model's sites are kept.
            present: the places of those that lie in this rank's part of the model.
            rank: this worker's.
        """
        self.captured_rows = 0
        self.lost_rows = 0
        self.plain_rows = 0
        """Rows that left as they are though they were wanted in a form."""
        self.forms = forms
        self._rows = ring
        self.outlet = outlet
        self.rank = rank
        self._present = present
        self._ring = Ring(ring.shape[0])
        self._table = PositionTable()
        self._places = places
        self._classes = CaptureClasses(places.count, forms)
        self._pending: _Captured | None = None

    @property
    def ring_bytes(self) -> int:
        """Device memory of the ring."""
        return self._rows.nbytes

    def put(self, number: int, plan: Plan) -> tuple[int, ...]:
        """Puts a plan's captures in force; the classes that they hold."""
        if not plan.captures:
            self._table.drop(number)
            return ()
        cuts = segment([capture.spans for capture in plan.captures])
        forms = [self.forms.acquire(capture.form) for capture in plan.captures]
        sets = [self._sites([(plan.captures[i], forms[i]) for i in members]) for _, members in cuts]
        classes = self._classes.acquire(sets)
        for form in forms:  # their classes hold them now
            self.forms.release(form)
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
        placed = place(blocks, self._classes.table, self._room())
        copied = placed.base >= 0
        fits: npt.NDArray[np.bool_] = np.logical_or.reduce(copied, axis=1)
        if not fits.all():
            tallies.lose(blocks, ~fits, self._classes.table.ranks)
            self.lost_rows += int(placed.rows[~fits].sum())
        total = placed.total
        self.captured_rows += total
        if not total:
            return None
        region = self._ring.reserve(total)
        self._pending = _Captured(region, *self._described(blocks, placed))
        base = np.where(copied, placed.base + region.start, 0).astype(np.int32)
        return Copying(blocks, base, np.logical_or.reduce(copied, axis=0))

    def end(self) -> None:
        """After the forward pass has been launched: its rows leave."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        rows = self._rows[pending.region.start : pending.region.end]
        fence = self.outlet.send_rows(pending.head, rows, pending.groups)
        if fence is not None:
            self._ring.leaves(pending.region, fence)

    def _sites(self, members: Sequence[tuple[Capture, int]]) -> Sites:
        """The sites of captures, each with its form: one for all, or rows leave as they are."""
        found: dict[int, int] = {}
        for capture, form in members:
            for site in self._present.intersection(capture.sites):
                found[site] = form if found.get(site, form) == form else 0
        return frozenset(found.items())

    def _room(self) -> int:
        row = self._rows.shape[1] * self._rows.dtype.itemsize
        return min(self._ring.capacity, self.outlet.free_bytes // row)

    def _described(self, blocks: Blocks, placed: Placed) -> tuple[RowsHead, list[Group]]:
        """The labels of a step's rows, and the forms that they are to get, as they lie."""
        table = self._classes.table
        block, form = placed.part_block, placed.part_form
        count = table.counts.shape[1]
        kinds, which = np.unique(
            blocks.sites_class[block].astype(np.int64) * count + form, return_inverse=True
        )
        used, of_part = np.unique(form, return_inverse=True)
        rows = np.bincount(of_part, placed.part_rows).astype(np.int64)
        groups = [
            Group(self.forms[number], size)
            for number, size in zip(used.tolist(), rows.tolist(), strict=True)
        ]
        row_bytes = self._rows.shape[1] * self._rows.dtype.itemsize
        self.plain_rows += int(placed.part_rows[form == REFUSED].sum())
        head = RowsHead(
            rank=self.rank,
            dtype=str(self._rows.dtype).removeprefix("torch."),
            width=self._rows.shape[1],
            classes=[
                self._places.numbers[
                    np.flatnonzero(
                        (table.ranks[kind // count] >= 0)
                        & (table.forms[kind // count] == kind % count)
                    )
                ].tolist()
                for kind in kinds.tolist()
            ],
            number=_int64(blocks.request[block]),
            which=_int64(which),
            start=_int64(blocks.start[block]),
            count=_int64(blocks.count[block]),
            forms=[
                (RAW_KEY, row_bytes)
                if group.form is None
                else (group.form.key, group.form.row_bytes)
                for group in groups
            ],
            form_of=np.searchsorted(used, kinds % count).tolist(),
        )
        return head, groups


def _int64(values: npt.NDArray[np.integer]) -> bytes:
    return values.astype("<i8").tobytes()
