"""The device's ring of captured rows, and the layout of a step's rows in it.

Invariants: a step's rows are in one contiguous region, ordered by encoding, request and site. So
the rows of an encoding are copied together, and their labels are ranges. A region is written again
only after its rows were copied off the device, or by work that the device runs after their copy.
Rows that do not fit are counted as lost.
"""

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine.worker.capture.site_sets import SiteSetTable
from rheostat_engine.worker.state.position_functions import Int32, Int64
from rheostat_engine.worker.transport.event_sender import Fence


class Region(NamedTuple):
    """[start, end) rows of the ring."""

    start: int
    end: int


class Ring:
    """Reserves consecutive regions of a ring of `rows` rows. Row 0 is never used."""

    def __init__(self, rows: int) -> None:
        self._end = rows
        self._next = 1
        # Regions whose rows may still be on the device, ascending: from `_next` on, and before it.
        self._ahead: deque[tuple[Region, Fence]] = deque()
        self._behind: deque[tuple[Region, Fence]] = deque()

    @property
    def capacity(self) -> int:
        """The most rows of a region."""
        return self._end - 1

    def reserve(self, rows: int) -> Region:
        """Reserves a region; waits for the fences of its earlier rows."""
        if not 0 < rows <= self.capacity:
            raise ValueError(f"{rows} rows do not fit into a ring of {self.capacity}")
        if self._next + rows > self._end:
            self._next = 1
            self._ahead = self._behind + self._ahead
            self._behind = deque()
        region = Region(self._next, self._next + rows)
        while self._ahead and self._ahead[0][0].start < region.end:
            _, fence = self._ahead.popleft()
            fence.synchronize()
        self._next = region.end
        return region

    def set_fence(self, region: Region, fence: Fence) -> None:
        """Sets the fence after which the last reserved region may be written again."""
        self._behind.append((region, fence))


class RowBlocks(NamedTuple):
    """A step's captured tokens, in blocks of consecutive tokens of one request and site set."""

    token_block: Int32
    """[n]: number of the token's block, from 1; 0: not captured."""
    token_order: Int32
    """[n]: index of the token within its block."""
    request: Int64
    """[b]: request number of each block."""
    site_set: Int32
    """[b]: site set of each block."""
    start: Int64
    """[b]: position of the block's first token."""
    count: Int64  # type: ignore[assignment]  # blocks are no sequence to count in
    """[b]: tokens in the block."""


def cut_row_blocks(numbers: Int64, site_sets: Int32, positions: Int64) -> RowBlocks:
    """Cuts a batch's tokens into blocks.

    Args:
        numbers: request number of each token, [n]; a request's tokens are consecutive.
        site_sets: site set of each token, [n]; 0: not captured.
        positions: absolute position of each token, [n], rising within a request.
    """
    n = len(numbers)
    begins = np.empty(n, np.bool_)
    begins[:1] = True
    begins[1:] = (
        (numbers[1:] != numbers[:-1])
        | (site_sets[1:] != site_sets[:-1])
        | (positions[1:] != positions[:-1] + 1)
    )
    if begins.all():  # a decode step, or requests without captures
        captured = site_sets > 0
        return RowBlocks(
            token_block=np.where(captured, captured.cumsum(dtype=np.int32), np.int32(0)),
            token_order=np.zeros(n, np.int32),
            request=numbers[captured],
            site_set=site_sets[captured],
            start=positions[captured],
            count=np.ones(np.count_nonzero(captured), np.int64),
        )
    first = np.flatnonzero(begins)
    group = np.cumsum(begins) - 1
    captured = site_sets[first] > 0
    block_of_group = np.where(captured, np.cumsum(captured), 0)
    lengths = np.diff(np.append(first, n))
    first, lengths = first[captured], lengths[captured]
    order = np.arange(n) - np.flatnonzero(begins)[group]
    return RowBlocks(
        token_block=block_of_group[group].astype(np.int32),
        token_order=order.astype(np.int32),
        request=numbers[first],
        site_set=site_sets[first],
        start=positions[first],
        count=lengths.astype(np.int64),
    )


class RingLayout(NamedTuple):
    """The offsets of a step's rows from the start of its region."""

    base: Int32
    """[b, sites]: offset of the block's first row at a site; -1 if the site is not captured or the
    block doesn't fit."""
    rows: Int64
    """[b]: rows of each block."""
    fits: npt.NDArray[np.bool_]
    """[b]: whether the block fits."""
    part_block: Int64
    """[p]: the block of each part, in row order. A part has a block's rows in one encoding."""
    part_encoding: Int64
    """[p]: ascending."""
    part_rows: Int64

    @property
    def total(self) -> int:
        """The number of rows that fit."""
        return int(self.part_rows.sum())


def lay_out(blocks: RowBlocks, site_sets: SiteSetTable, capacity: int) -> RingLayout:
    """Lays out the rows of blocks. Of more than `capacity` rows, the largest blocks are lost.

    So a request that captures little loses nothing because of one that captures much.
    """
    ranks = site_sets.ranks[blocks.site_set]
    parts = site_sets.counts[blocks.site_set] * blocks.count[:, None]
    rows = parts.sum(axis=1)
    fits = np.ones(len(rows), np.bool_)
    ends = rows.cumsum()
    if len(rows) and ends[-1] > capacity:
        order = rows.argsort(kind="stable")
        fits[order] = np.cumsum(rows[order]) <= capacity
    elif parts.shape[1] == 1:  # all rows are raw, so a block's rows lie together
        base = (ends - rows)[:, None] + ranks * blocks.count[:, None]
        base[ranks < 0] = -1
        block = np.arange(len(rows))
        return RingLayout(base.astype(np.int32), rows, fits, block, np.zeros_like(block), rows)
    encoding, block = np.nonzero(parts.T * fits)
    part_rows = parts[block, encoding]
    first = np.zeros_like(parts)
    first[block, encoding] = np.cumsum(part_rows) - part_rows
    if parts.shape[1] > 1:
        first = np.take_along_axis(first, site_sets.encodings[blocks.site_set], axis=1)
    base = first + ranks * blocks.count[:, None]
    base = np.where((ranks >= 0) & fits[:, None], base, -1)
    return RingLayout(base.astype(np.int32), rows, fits, block, encoding, part_rows)
