"""Selects the rows of the current step to copy to the ring, and sends them.

Invariants: the row of a position is sent once, even if it is recomputed after a preemption. Rows
that do not fit into the ring are counted as lost.
"""

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.channel.events import RowsHead
from rheostat_engine.plan.plan import EncodedTable
from rheostat_engine.plan.row_encodings import RAW_KEY
from rheostat_engine.worker.capture.capture_sets import CaptureSets, RequestCaptures
from rheostat_engine.worker.capture.request_progress import RequestProgress
from rheostat_engine.worker.capture.ring import (
    Region,
    Ring,
    RingLayout,
    RowBlocks,
    cut_row_blocks,
    lay_out,
)
from rheostat_engine.worker.capture.site_sets import SiteSets
from rheostat_engine.worker.state.position_functions import Int64, Requests, int64_bytes
from rheostat_engine.worker.state.site_slots import SiteSlots
from rheostat_engine.worker.transport.row_encodings import REFUSED, RowEncodings
from rheostat_engine.worker.transport.row_sender import Group, RowSender

_LOG = logging.getLogger(__name__)

_LOG_INTERVAL = 60.0
"""Seconds between two warnings about lost rows."""


class StepCopies(NamedTuple):
    """The rows to copy in a step."""

    blocks: RowBlocks
    base: npt.NDArray[np.int32]
    """[B, sites]: see `Instructions`."""
    first_row: int
    """The ring row at which the rows of the step begin."""
    sites: npt.NDArray[np.bool_]
    """[sites]: whether rows are copied at a site."""


class CapturesUpdate(NamedTuple):
    """New captures of a request from its next step on."""

    number: int
    """The server's number of the update. It replaces a pending update of the request."""
    wire: object
    """`Plan.to_wire` of a plan with the captures."""
    not_before: int = 0
    """The first position that may change."""


class _StepRows(NamedTuple):
    """The rows of a step, and their labels. `copies.first_row` is not set yet."""

    copies: StepCopies
    head: RowsHead
    starts: Int64
    """[p]: the position of each part's first row, as in `head`."""
    groups: Sequence[Group]
    total: int
    """The number of rows."""
    plain: int
    """The number of rows sent raw although an encoding was requested."""
    complete: bool
    """Whether all selected rows fit."""

    def one_later(self) -> "_StepRows":
        """The rows of a step in which each position is one higher."""
        starts = self.starts + 1
        head = msgspec.structs.replace(self.head, start=int64_bytes(starts))
        return self._replace(head=head, starts=starts)


class _CachedRows(NamedTuple):
    """The rows of the last step, cached for the steps that repeat it."""

    rows: _StepRows | None
    """None: no row is selected."""
    steps: int
    """The number of further steps for which they are valid."""
    changes: int
    """`Requests.changes` at the lookup. The rows are invalid once it differs."""


class Captures:
    """The captures of all requests."""

    def __init__(
        self,
        ring: torch.Tensor,
        row_sender: RowSender,
        encodings: RowEncodings,
        *,
        site_slots: SiteSlots,
        present: frozenset[int],
        rank: int,
    ) -> None:
        """`ring` is [ring rows, W]; `present` the slots of the sites in this rank's part."""
        self.captured_rows = 0
        self.lost_rows = 0
        self._next_log = 0.0
        self.plain_rows = 0
        """Rows sent raw although an encoding was requested."""
        self.encodings = encodings
        self._rows = ring
        self.ring_bytes = ring.nbytes
        """Device memory of the ring."""
        self._row_bytes = ring.shape[1] * ring.dtype.itemsize
        self.row_sender = row_sender
        self.rank = rank
        self._ring = Ring(ring.shape[0])
        self._site_sets = SiteSets(site_slots.numbers, encodings)
        self.sets = CaptureSets(self._site_sets, encodings, site_slots, present)
        self._requests = Requests(self.sets.functions)
        self._pending: tuple[Region, _StepRows] | None = None
        """The rows of the current step, and their region of the ring."""
        self._cached: _CachedRows | None = None

    @property
    def idle(self) -> bool:
        """Whether no request captures anything."""
        return not len(self._requests)

    def put(
        self,
        number: int,
        captures: EncodedTable | None,
        current: RequestCaptures | None = None,
        *,
        first: int = 0,
        computed: tuple[int, int] = (0, 0),
    ) -> RequestCaptures:
        """Sets a request's captures from position `first` on.

        Args:
            number: the request's number.
            captures: the new table; None captures nothing.
            current: the current captures; None if the request has none.
            first: the first updated position.
            computed: [start, end) computed positions.

        Raises:
            ValueError: the bytes are no table, or name sites that the model cannot have. Nothing
                has changed then.
        """
        new = None if captures is None else self.sets.use(captures)
        selected = current or RequestCaptures()
        for dropped in selected.change(first, new, computed):
            self.sets.release(dropped)
        self._requests.put(number, selected.segments)
        return selected

    def begin(
        self,
        numbers: Int64,
        positions: Int64,
        progress: RequestProgress,
        *,
        repeated: bool = False,
    ) -> StepCopies | None:
        """Reserves ring rows for the current step; returns None if there are no rows to copy.

        If a step repeats the last one, `blocks`, `base` and `sites` may be the same objects.

        Args:
            numbers: [n]: the request number of each token.
            positions: [n]: its position.
            progress: the progress before this step.
            repeated: see `StepTokens`.
        """
        if not len(self._requests):
            return None
        cached, self._cached = self._cached, None
        if repeated and cached is not None and self._is_valid(cached):
            rows = None if cached.rows is None else cached.rows.one_later()
            self._cached = _CachedRows(rows, cached.steps - 1, cached.changes)
        else:
            rows = self._select(numbers, positions, progress)
            complete = rows is None or rows.complete
            if repeated and complete and not (positions < progress.computed_end[numbers]).any():
                steps = self._requests.steps_alike(numbers, positions)
                self._cached = _CachedRows(rows, steps, self._requests.changes)
        if rows is None or not rows.total:
            return None
        self.captured_rows += rows.total
        self.plain_rows += rows.plain
        region = self._ring.reserve(rows.total)
        self._pending = region, rows
        return rows.copies._replace(first_row=region.start)

    def _is_valid(self, cached: _CachedRows) -> bool:
        """Whether a step that repeats the last one has the cached rows, and they fit."""
        if not cached.steps or cached.changes != self._requests.changes:
            return False
        return cached.rows is None or cached.rows.total <= self._free_rows()

    def _select(
        self, numbers: Int64, positions: Int64, progress: RequestProgress
    ) -> _StepRows | None:
        """The rows of the current step; None if none is selected."""
        site_sets = self._requests.lookup(numbers, positions)[0][:, 0]
        site_sets = np.where(positions >= progress.computed_end[numbers], site_sets, 0)
        if not site_sets.any():
            return None
        blocks = cut_row_blocks(numbers, site_sets, positions)
        layout = lay_out(blocks, self._site_sets.table, self._free_rows())
        complete = bool(layout.fits.all())
        if not complete:
            progress.count_lost(blocks, ~layout.fits, self._site_sets.table.ranks)
            self._report_lost(int(layout.rows[~layout.fits].sum()))
        sites: npt.NDArray[np.bool_] = layout.base.max(axis=0) >= 0
        copies = StepCopies(blocks, layout.base + np.int32(1), 0, sites)
        return self._label(copies, layout, complete=complete)

    def end(self) -> None:
        """Sends the rows of the forward pass, once the pass was launched."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        region, rows = pending
        contents = self._rows[region.start : region.end]
        fence = self.row_sender.send_rows(rows.head, contents, rows.groups)
        self._ring.set_fence(region, fence)

    def _report_lost(self, rows: int) -> None:
        """Counts rows that are lost, and logs why, but not in every step while memory is full."""
        self.lost_rows += rows
        if time.monotonic() < self._next_log:
            return
        self._next_log = time.monotonic() + _LOG_INTERVAL
        _LOG.warning(
            "%d captured rows of a step are lost: the ring has %d rows, and the staging area has "
            "%d bytes free. Further losses within %.0f s are not logged",
            rows,
            self._ring.capacity,
            self.row_sender.free_bytes,
            _LOG_INTERVAL,
        )

    def _free_rows(self) -> int:
        return min(self._ring.capacity, self.row_sender.free_bytes // self._row_bytes)

    def _label(self, copies: StepCopies, layout: RingLayout, *, complete: bool) -> _StepRows:
        """Adds the labels of a step's rows, and their encodings in row order."""
        table, blocks = self._site_sets.table, copies.blocks
        block, encoding = layout.part_block, layout.part_encoding
        count = table.counts.shape[1]
        kinds, which = _distinct(blocks.site_set[block].astype(np.int64) * count + encoding)
        used, of_part = _distinct(encoding)
        rows = np.bincount(of_part, layout.part_rows).astype(np.int64)
        groups = [
            Group(self.encodings[number], size)
            for number, size in zip(used.tolist(), rows.tolist(), strict=True)
        ]
        starts = blocks.start[block]
        head = RowsHead(
            rank=self.rank,
            dtype=str(self._rows.dtype).removeprefix("torch."),
            width=self._rows.shape[1],
            site_sets=[self._site_sets.sites_of(*divmod(kind, count)) for kind in kinds.tolist()],
            number=int64_bytes(blocks.request[block]),
            which=int64_bytes(which),
            start=int64_bytes(starts),
            count=int64_bytes(blocks.count[block]),
            encodings=[
                (RAW_KEY, self._row_bytes)
                if group.encoding is None
                else (group.encoding.key, group.encoding.row_bytes)
                for group in groups
            ],
            encoding_of=np.searchsorted(used, kinds % count).tolist(),
        )
        plain = int(layout.part_rows[encoding == REFUSED].sum())
        return _StepRows(copies, head, starts, groups, layout.total, plain, complete)


def _distinct(values: Int64) -> tuple[Int64, Int64]:
    """As `np.unique` with the inverse, but fast if all values are equal, as in most steps."""
    if len(values) and (values == values[0]).all():
        return values[:1], np.zeros(len(values), np.int64)
    distinct, inverse = np.unique(values, return_inverse=True)
    return distinct, inverse
