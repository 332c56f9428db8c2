"""Where the captured rows of a step go: a ring on the device, blocks within it, labels beside it.

Invariant: a step's rows lie in one contiguous region, form by form, in a form request by request
and site by site, so that rows of a form leave the device together and their labels are ranges. A
region is written again only after its rows have left. What does not fit is counted as lost, never
silently missing.
"""

from collections import deque
from typing import NamedTuple, Protocol

import numpy as np

from rheostat_engine.core.classes import ClassTable
from rheostat_engine.core.segments import Int32, Int64


class Fence(Protocol):
    """Something on the device that will have happened."""

    def synchronize(self) -> None:
        """Waits until it has."""


class Region(NamedTuple):
    """[start, end) rows of the ring."""

    start: int
    end: int


class Ring:
    """Hands out regions of `rows` rows, first to last and around; row 0 belongs to nobody."""

    def __init__(self, rows: int) -> None:
        """All of it is free."""
        self._end = rows
        self._next = 1
        # Regions under way, ascending: from `_next` on, and before it.
        self._ahead: deque[tuple[Region, Fence]] = deque()
        self._behind: deque[tuple[Region, Fence]] = deque()

    @property
    def capacity(self) -> int:
        """The most rows that one region can have."""
        return self._end - 1

    def reserve(self, rows: int) -> Region:
        """A region that nobody reads any more. Waits for copies off the device if it must."""
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

    def leaves(self, region: Region, fence: Fence) -> None:
        """The rows of the region reserved last have left once `fence` has happened."""
        self._behind.append((region, fence))


class Blocks(NamedTuple):
    """A step's captured tokens, cut into blocks: consecutive tokens of one request and class."""

    token_block: Int32
    """[n]: number of the token's block, from 1; 0: not captured."""
    token_order: Int32
    """[n]: place of the token within its block."""
    request: Int64
    """[b]: request number of each block."""
    sites_class: Int32
    """[b]: capture class of each block."""
    start: Int64
    """[b]: position of the block's first token."""
    count: Int64  # type: ignore[assignment]  # blocks are no sequence to count in
    """[b]: tokens in the block."""


def cut_blocks(numbers: Int64, classes: Int32, positions: Int64) -> Blocks:
    """Cuts a batch's tokens into blocks.

    Args:
        numbers: request number of each token, [n]; a request's tokens are consecutive.
        classes: capture class of each token, [n]; 0: not captured.
        positions: absolute position of each token, [n], rising within a request.
    """
    n = len(numbers)
    begins = np.empty(n, np.bool_)
    begins[:1] = True
    begins[1:] = (
        (numbers[1:] != numbers[:-1])
        | (classes[1:] != classes[:-1])
        | (positions[1:] != positions[:-1] + 1)
    )
    first = np.flatnonzero(begins)
    runs = np.cumsum(begins) - 1
    captured = classes[first] > 0
    block_of_run = np.where(captured, np.cumsum(captured), 0)
    lengths = np.diff(np.append(first, n))
    first, lengths = first[captured], lengths[captured]
    order = np.arange(n) - np.flatnonzero(begins)[runs]
    return Blocks(
        token_block=block_of_run[runs].astype(np.int32),
        token_order=order.astype(np.int32),
        request=numbers[first],
        sites_class=classes[first],
        start=positions[first],
        count=lengths.astype(np.int64),
    )


class Placed(NamedTuple):
    """Where a step's rows go, counted from the start of its region."""

    base: Int32
    """[b, sites]: offset of the block's first row at a site; -1 where nothing is captured or the
    block doesn't fit."""
    rows: Int64
    """[b]: rows of each block."""
    part_block: Int64
    """[p]: the block of each part; a part is what of a block has one form. In their order."""
    part_form: Int64
    """[p]: its form, ascending."""
    part_rows: Int64
    """[p]: its rows."""

    @property
    def total(self) -> int:
        """Rows that fit."""
        return int(self.part_rows.sum())


def place(blocks: Blocks, classes: ClassTable, capacity: int) -> Placed:
    """Where each block's rows go.

    Args:
        blocks: the step's blocks.
        classes: what each class captures.
        capacity: rows that fit; blocks are taken in order while they do.
    """
    ranks = classes.ranks[blocks.sites_class]
    parts = classes.counts[blocks.sites_class] * blocks.count[:, None]
    rows = parts.sum(axis=1)
    fits = np.cumsum(rows) <= capacity
    form, block = np.nonzero(parts.T * fits)
    part_rows = parts[block, form]
    first = np.zeros_like(parts)
    first[block, form] = np.cumsum(part_rows) - part_rows
    if parts.shape[1] > 1:
        first = np.take_along_axis(first, classes.forms[blocks.sites_class], axis=1)
    base = first + ranks * blocks.count[:, None]
    base = np.where((ranks >= 0) & fits[:, None], base, -1)
    return Placed(base.astype(np.int32), rows, block, form, part_rows)
