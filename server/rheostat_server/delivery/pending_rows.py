"""The waiting rows of one capture, in the batches in which they came.

Invariants: each position enters once per site, ascending. A batch is taken or dropped for all its
sites together. `take` removes all rows below a position, and those of a site are either all raw or
all encoded. A position that is lost at one site is lost at all sites, also at those whose rows are
still to come, because chunks are rectangular.
"""

import heapq
from collections import deque
from collections.abc import Collection, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np

from rheostat_engine import OPEN_END, Spans
from rheostat_server.delivery.byte_budget import ByteCounter
from rheostat_server.delivery.row_batch import Positions, RowBatch, concatenated
from rheostat_server.selectors.spans import clipped, edges, united
from rheostat_wire.dtypes import StoredArray

_EMPTY = np.empty(0, dtype=np.int32)


class SiteColumn(NamedTuple):
    """Rows that were taken of a site."""

    positions: Positions
    """Ascending, [n]."""
    data: StoredArray
    """[n, width]."""
    made: bool
    """Whether the device has encoded the rows."""

    def at(self, positions: Positions) -> "SiteColumn":
        """The rows at some of its positions."""
        if len(positions) == len(self.positions):
            return self
        return SiteColumn(positions, self.data[np.isin(self.positions, positions)], self.made)


class PendingRows:
    """Pieces, in a queue for each set of sites that they are of.

    Mostly that is all of the capture's. Sites come by themselves where their rows are many, from
    another worker, or in another form.
    """

    def __init__(self, sites: Collection[int], byte_counter: ByteCounter) -> None:
        """No rows of these sites, by index, wait; `byte_counter` counts those that will."""
        self._sites = sites
        self._byte_counter = byte_counter
        self._queues: dict[tuple[int, ...], deque[RowBatch]] = {}
        self._next = dict.fromkeys(sites, 0)
        self._tail: RowBatch | None = None
        """The last batch."""
        self._lost: Spans = ()
        """Lost positions whose rows may still come at some sites."""

    @property
    def frontier(self) -> int:
        """One past the last position that has come at all sites."""
        return min(self._next.values())

    @property
    def waits(self) -> bool:
        """Whether rows wait, or batches whose rows were all dropped."""
        return bool(self._queues)

    @property
    def row_bytes(self) -> int:
        """Bytes of a waiting row; 0 if none waits."""
        for batches in self._queues.values():
            for batch in batches:
                if batch.count:
                    return batch.row_bytes
        return 0

    def put(
        self,
        sites: tuple[int, ...],
        at: tuple[int, ...],
        positions: Positions,
        data: StoredArray,
        *,
        made: bool,
    ) -> list[RowBatch]:
        """Adds the rows that have not come before.

        Args:
            sites: indices of the sites.
            at: their indices in `data`.
            positions: ascending, [n], at least one.
            data: [some sites, n, width]. A batch of fewer sites gets memory of its own.
            made: whether the device has encoded the rows.
        """
        if not self._lost:
            return self._put(sites, at, positions, data, made)
        end = int(positions[-1]) + 1
        positions, data = self._unlost(positions, data)
        batches = self._put(sites, at, positions, data, made) if len(positions) else []
        for site in sites:
            self._next[site] = max(self._next[site], end)
        return batches

    def _put(
        self,
        sites: tuple[int, ...],
        at: tuple[int, ...],
        positions: Positions,
        data: StoredArray,
        made: bool,
    ) -> list[RowBatch]:
        first = int(positions[0])
        known = self._next
        if (known[sites[0]] if len(sites) == 1 else max([known[one] for one in sites])) <= first:
            rows = data if len(at) == len(data) else data[list(at)]
            return [self._wait(sites, positions, rows, made)]
        by_start: dict[int, list[tuple[int, int]]] = {}
        for site, index in zip(sites, at, strict=True):
            start = int(positions.searchsorted(self._next[site]))
            by_start.setdefault(start, []).append((site, index))
        return [
            self._wait(
                tuple(site for site, _ in some),
                positions[start:],
                data[[index for _, index in some], start:],
                made,
            )
            for start, some in by_start.items()
            if start < len(positions)
        ]

    def _unlost(self, positions: Positions, data: StoredArray) -> tuple[Positions, StoredArray]:
        """The rows without those at lost positions."""
        self._lost = clipped(self._lost, self.frontier, OPEN_END)
        starts, ends = edges(self._lost)
        kept = starts.searchsorted(positions, "right") == ends.searchsorted(positions, "right")
        return (positions, data) if kept.all() else (positions[kept], data[:, kept])

    def drop(self, size: int, *, newest: bool) -> tuple[int, int]:
        """Drops the highest waiting positions, or the lowest, at all sites. There must be some.

        Args:
            size: bytes to free. Fewer may be freed; then the caller must call again.
            newest: whether the highest positions are dropped.

        Returns:
            The first lost position, and the number of rows that were dropped.
        """
        for batches in self._queues.values():
            _strip(batches)
        self._queues = {sites: batches for sites, batches in self._queues.items() if batches}
        ends = [batches[-1 if newest else 0] for batches in self._queues.values()]
        if newest:
            edge = max(int(one.positions[-1]) for one in ends)
            there = [one for one in ends if one.positions[-1] == edge]
            others = [int(one.positions[-1]) + 1 for one in ends if one.positions[-1] < edge]
            # Between these positions all of the same sites have rows.
            bound = max([*others, *(int(one.positions[0]) for one in there)])
        else:
            edge = min(int(one.positions[0]) for one in ends)
            there = [one for one in ends if one.positions[0] == edge]
            others = [int(one.positions[0]) for one in ends if one.positions[0] > edge]
            bound = min([*others, *(int(one.positions[-1]) + 1 for one in there)])
        most = -(-size // sum(one.position_bytes for one in there))
        positions = there[0].positions
        if newest:
            at = max(int(positions.searchsorted(bound)), len(positions) - most)
            start, end = int(positions[at]), edge + 1
        else:
            at = min(int(positions.searchsorted(bound)), most)
            start, end = edge, int(positions[at - 1]) + 1
        rows = sum(one.lose(start, end) for one in there)
        if end > self.frontier:
            self._lost = united((*self._lost, (start, end)))
        return start, rows

    def _wait(
        self, sites: tuple[int, ...], positions: Positions, data: StoredArray, made: bool
    ) -> RowBatch:
        first, last = int(positions[0]), int(positions[-1])
        for site in sites:
            self._next[site] = last + 1
        batch = self._tail
        if (
            batch is not None
            and batch.sites == sites
            and batch.made == made
            and batch.takes(first, last, len(positions), data.nbytes)
        ):
            batch.add(data)
            return batch
        batch = self._tail = RowBatch(sites, positions, data, self._byte_counter, self, made=made)
        self._queue(sites).append(batch)
        return batch

    def discard(self) -> None:
        """Loses everything."""
        for batches in self._queues.values():
            for batch in batches:
                batch.give_up()
        self._queues.clear()

    def positions(self) -> list[Positions]:
        """Of each site, those that wait, ascending."""
        return [
            np.sort(np.concatenate([_EMPTY, *(batch.positions for batch in self._of(site))]))
            for site in self._sites
        ]

    def cut(self, frontier: int, most: int) -> int:
        """A position up to `frontier`, to take the rows below it.

        Of each site at most `most` positions that wait lie below it, and only rows as they are, or
        only rows in their form.
        """
        several = len(self._queues) > 1  # of one queue all sites have the same
        if not several and self._fits(frontier, most):
            return frontier
        rooms: dict[int, int] = {}
        made: dict[int, bool] = {}
        for batch in self._ascending():
            first = batch.first
            if first >= frontier:
                break
            sites = batch.sites if several else batch.sites[:1]
            if any(made.setdefault(site, batch.made) != batch.made for site in sites):
                return first
            room = min([rooms.get(site, most) for site in sites])
            if batch.below(frontier) > room:
                frontier = int(batch.positions[room - 1]) + 1 if room else first
            count = batch.below(frontier)
            for site in sites:
                rooms[site] = rooms.get(site, most) - count
        return frontier

    def _fits(self, frontier: int, most: int) -> bool:
        """Whether the only queue has nothing at or above a position, and at most so many below.

        This holds nearly always, and saves going over sites and positions.
        """
        for batches in self._queues.values():
            made = batches[0].made
            for batch in batches:
                most -= batch.count
                if most < 0 or batch.made != made or not batch.ends_by(frontier):
                    return False
        return True

    def _ascending(self) -> Iterator[RowBatch]:
        """All batches of which something waits, by their first position."""
        queues = [(batch for batch in queue if batch.count) for queue in self._queues.values()]
        return heapq.merge(*queues, key=_first) if len(queues) > 1 else chain(*queues)

    def take(self, frontier: int) -> dict[int, SiteColumn]:
        """Everything below a position, which waits no more; empty: there is nothing."""
        parts = [
            (sites, column)
            for sites in list(self._queues)
            if (column := self._take(sites, frontier)) is not None
        ]
        if len(parts) == 1 and len(parts[0][0]) == len(self._sites):
            ((sites, (positions, data, made)),) = parts
            return {site: SiteColumn(positions, data[i], made) for i, site in enumerate(sites)}
        found: dict[int, list[SiteColumn]] = {}
        for sites, (positions, data, made) in parts:
            for i, site in enumerate(sites):
                found.setdefault(site, []).append(SiteColumn(positions, data[i], made))
        nothing = SiteColumn(_EMPTY, np.empty((0, 0), np.float32), made=False)
        return {site: _joined(found.get(site, [nothing])) for site in self._sites if found}

    def _take(self, sites: tuple[int, ...], frontier: int) -> SiteColumn | None:
        """What a queue has below a position; its data are [sites, n, width]."""
        batches = self._queues[sites]
        made = False
        taken: list[Positions] = []
        parts: list[StoredArray] = []
        counted = 0
        while batches and batches[0].ends_by(frontier):
            batch = batches.popleft()
            made = batch.made
            counted += batch.counted
            positions, some = batch.take_all()
            taken.append(positions)
            parts += some
        if taken:
            count = sum(map(len, taken))
            size = sum([data.nbytes for data in parts])
            self._byte_counter.add(-size, -count * len(sites), -counted)
        while batches:
            batch = batches[0]
            if batch.below(frontier):
                made = batch.made
                positions, data = batch.take(frontier)
                taken.append(positions)
                parts.append(data)
            if batch.count:  # those behind it lie higher
                break
            batches.popleft()
        if not batches:
            del self._queues[sites]
        if not taken:
            return None
        positions = taken[0] if len(taken) == 1 else np.concatenate(taken)
        return SiteColumn(positions, concatenated(parts), made)

    def _of(self, site: int) -> Iterator[RowBatch]:
        for sites, batches in self._queues.items():
            if site in sites:
                yield from batches

    def _queue(self, sites: tuple[int, ...]) -> deque[RowBatch]:
        """The queue of some sites, without what was given up at its ends."""
        batches = self._queues.get(sites)
        if batches is None:
            batches = self._queues[sites] = deque()
        _strip(batches)
        return batches


def _strip(batches: deque[RowBatch]) -> None:
    """Removes what was given up at the ends of a queue."""
    while batches and not batches[0].count:
        batches.popleft()
    while batches and not batches[-1].count:
        batches.pop()


def _first(batch: RowBatch) -> int:
    return batch.first


def _joined(columns: list[SiteColumn]) -> SiteColumn:
    """What several queues had of a site."""
    if len(columns) == 1:
        return columns[0]
    positions = np.concatenate([column.positions for column in columns])
    data = np.concatenate([column.data for column in columns])
    order = np.argsort(positions)
    return SiteColumn(positions[order], data[order], columns[0].made)
