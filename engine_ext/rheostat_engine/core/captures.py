"""Captures in force: selects the rows of the current step that are copied to the ring.

Invariant: the row of a position is delivered once, even if preemption makes it be computed again.
Rows without room are counted as lost.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.core.capture_sets import CaptureSets, Selected
from rheostat_engine.core.classes import CaptureClasses
from rheostat_engine.core.forms import REFUSED, Forms
from rheostat_engine.core.outlet import Group, Outlet
from rheostat_engine.core.places import Places
from rheostat_engine.core.ring import Blocks, Placed, Region, Ring, cut_blocks, place
from rheostat_engine.core.segments import Int64, Requests
from rheostat_engine.core.tallies import Tallies
from rheostat_engine.events import RowsHead
from rheostat_engine.plan import Sealed
from rheostat_engine.row_forms import RAW_KEY


@dataclass(frozen=True)
class _Captured:
    region: Region
    head: RowsHead
    groups: list[Group]


class Copying(NamedTuple):
    """The rows that a step copies."""

    blocks: Blocks
    base: npt.NDArray[np.int32]
    """[B, sites]: see `Compact`."""
    sites: npt.NDArray[np.bool_]
    """[sites]: where something is copied."""

    @property
    def columns(self) -> tuple[npt.NDArray[np.int32], ...]:
        """The columns of a `Compact`: block and order of each token, and the base."""
        return self.blocks.token_block, self.blocks.token_order, self.base


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
            present: the places of the sites in this rank's part of the model.
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
        self._ring = Ring(ring.shape[0])
        self._classes = CaptureClasses(places.numbers, forms)
        self.sets = CaptureSets(self._classes, forms, places, present)
        self._requests = Requests(self.sets.functions)
        self._pending: _Captured | None = None

    @property
    def ring_bytes(self) -> int:
        """Device memory of the ring."""
        return self._rows.nbytes

    def put(
        self,
        number: int,
        captures: Sealed | None,
        held: Selected | None = None,
        *,
        first: int = 0,
        computed: tuple[int, int] = (0, 0),
    ) -> Selected:
        """Puts a table of captures in force.

        Args:
            number: the request's number.
            captures: the table; None: nothing is captured.
            held: the request's present captures, which the table replaces; None if it has none.
            first: the position from which on the table replaces them.
            computed: [start, end) positions of the request that have been computed.

        Raises:
            ValueError: it is no table, or names sites that the model cannot have; nothing has
                changed then.
        """
        new = None if captures is None else self.sets.use(captures)
        selected = held or Selected()
        for one in selected.change(first, new, computed):
            self.sets.release(one)
        self._requests.put(number, selected.segments)
        return selected

    def drop(self, number: int, held: Selected, computed: tuple[int, int]) -> Int64 | None:
        """Takes a request's captures out of force.

        Args:
            number: the request's number.
            held: its captures.
            computed: [start, end) positions that have been computed.

        Returns:
            Rows that were selected of them, [sites], of this worker's; None: nothing ever was.
        """
        self._requests.drop(number)
        sets = list(held.sets)
        rows = held.rows(*computed)
        for one in sets:
            self.sets.release(one)
        return rows

    def begin(self, numbers: Int64, positions: Int64, tallies: Tallies) -> Copying | None:
        """Finds room for the rows of the step at hand; None where nothing is copied.

        Args:
            numbers: request number of each token, [n].
            positions: its position, [n].
            tallies: how far each request has come, before this step.
        """
        if not len(self._requests):
            return None
        classes = self._requests.lookup(numbers, positions)[0][:, 0]
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
            classes=[self._classes.sites_of(*divmod(kind, count)) for kind in kinds.tolist()],
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
