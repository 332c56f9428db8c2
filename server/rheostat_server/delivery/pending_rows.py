"""The rows of one capture that wait, in the pieces in which they came.

Invariants: of each site a position enters once, ascending; a piece is taken or given up for all of
its sites together. What is taken below a position is everything below it, and of each site either
as it is or in its form. A position that is lost at one site is lost at all of them, those included
whose rows are still to come: none of them could be handed over.
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
    """What was taken of a site."""

    positions: Positions
    """Ascending, [n]."""
    data: StoredArray
    """[n, width]."""
    made: bool
    """Whether the rows are in their form."""

    def at(self, positions: Positions) -> "SiteColumn":
        """The part of it at some of its positions."""
        if len(positions) == len(self.positions):
            return self
        return SiteColumn(positions, self.data[np.isin(self.positions, positions)], self.made)


class PendingRows:
    """Pieces, in a queue for each set of sites that they are of.

    Mostly that is all of the capture's. Sites come by themselves where their rows are many, from
    another worker, or in another form.
    """

    def __init__(self, sites: Collection[int], byte_counter: ByteCounter) -> None:
        """Nothing waits of these sites, by index; the meter counts what does."""
        self._sites = sites
        self._byte_counter = byte_counter
        self._queues: dict[tuple[int, ...], deque[RowBatch]] = {}
        self._next = dict.fromkeys(sites, 0)
        self._tail: RowBatch | None = None
        """The piece that came last."""
        self._lost: Spans = ()
        """Positions that are lost and whose rows may still come at some sites."""

    @property
    def frontier(self) -> int:
        """One past the last position that has come at all sites."""
        return min(self._next.values())

    @property
    def waits(self) -> bool:
        """Whether rows wait, or pieces of which all rows were given up."""
        return bool(self._queues)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that waits; 0: none does."""
        for pieces in self._queues.values():
            for piece in pieces:
                if piece.count:
                    return piece.row_bytes
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
        """Lets those rows wait that have not come before.

        Args:
            sites: indices of the sites.
            at: where they stand in `data`.
            positions: ascending, [n], at least one.
            data: [some sites, n, width]; a piece of fewer holds memory of its own.
            made: whether the rows are in their form.
        """
        if not self._lost:
            return self._put(sites, at, positions, data, made)
        end = int(positions[-1]) + 1
        positions, data = self._unlost(positions, data)
        pieces = self._put(sites, at, positions, data, made) if len(positions) else []
        for site in sites:
            self._next[site] = max(self._next[site], end)
        return pieces

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
        """Rows that have come, without those at positions that are lost."""
        self._lost = clipped(self._lost, self.frontier, OPEN_END)
        starts, ends = edges(self._lost)
        kept = starts.searchsorted(positions, "right") == ends.searchsorted(positions, "right")
        return (positions, data) if kept.all() else (positions[kept], data[:, kept])

    def drop(self, size: int, *, newest: bool) -> tuple[int, int]:
        """Loses the highest positions that wait, or the lowest, at all sites. Something waits.

        Args:
            size: bytes that are too many; fewer may be freed, then more is to be dropped.
            newest: whether the highest go.

        Returns:
            The first position that is lost, and how many rows waited there.
        """
        for pieces in self._queues.values():
            _strip(pieces)
        self._queues = {sites: pieces for sites, pieces in self._queues.items() if pieces}
        ends = [pieces[-1 if newest else 0] for pieces in self._queues.values()]
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
        piece = self._tail
        if (
            piece is not None
            and piece.sites == sites
            and piece.made == made
            and piece.takes(first, last, len(positions), data.nbytes)
        ):
            piece.add(data)
            return piece
        piece = self._tail = RowBatch(sites, positions, data, self._byte_counter, self, made=made)
        self._queue(sites).append(piece)
        return piece

    def discard(self) -> None:
        """Loses everything."""
        for pieces in self._queues.values():
            for piece in pieces:
                piece.give_up()
        self._queues.clear()

    def positions(self) -> list[Positions]:
        """Of each site, those that wait, ascending."""
        return [
            np.sort(np.concatenate([_EMPTY, *(piece.positions for piece in self._of(site))]))
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
        for piece in self._ascending():
            first = piece.first
            if first >= frontier:
                break
            sites = piece.sites if several else piece.sites[:1]
            if any(made.setdefault(site, piece.made) != piece.made for site in sites):
                return first
            room = min([rooms.get(site, most) for site in sites])
            if piece.below(frontier) > room:
                frontier = int(piece.positions[room - 1]) + 1 if room else first
            count = piece.below(frontier)
            for site in sites:
                rooms[site] = rooms.get(site, most) - count
        return frontier

    def _fits(self, frontier: int, most: int) -> bool:
        """Whether the only queue has nothing at or above a position, and at most so many below.

        This holds nearly always, and saves going over sites and positions.
        """
        for pieces in self._queues.values():
            made = pieces[0].made
            for piece in pieces:
                most -= piece.count
                if most < 0 or piece.made != made or not piece.ends_by(frontier):
                    return False
        return True

    def _ascending(self) -> Iterator[RowBatch]:
        """All pieces of which something waits, by their first position."""
        queues = [(piece for piece in queue if piece.count) for queue in self._queues.values()]
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
        pieces = self._queues[sites]
        made = False
        taken: list[Positions] = []
        parts: list[StoredArray] = []
        counted = 0
        while pieces and pieces[0].ends_by(frontier):
            piece = pieces.popleft()
            made = piece.made
            counted += piece.counted
            positions, some = piece.take_all()
            taken.append(positions)
            parts += some
        if taken:
            count = sum(map(len, taken))
            size = sum([data.nbytes for data in parts])
            self._byte_counter.add(-size, -count * len(sites), -counted)
        while pieces:
            piece = pieces[0]
            if piece.below(frontier):
                made = piece.made
                positions, data = piece.take(frontier)
                taken.append(positions)
                parts.append(data)
            if piece.count:  # those behind it lie higher
                break
            pieces.popleft()
        if not pieces:
            del self._queues[sites]
        if not taken:
            return None
        positions = taken[0] if len(taken) == 1 else np.concatenate(taken)
        return SiteColumn(positions, concatenated(parts), made)

    def _of(self, site: int) -> Iterator[RowBatch]:
        for sites, pieces in self._queues.items():
            if site in sites:
                yield from pieces

    def _queue(self, sites: tuple[int, ...]) -> deque[RowBatch]:
        """The queue of some sites, without what was given up at its ends."""
        pieces = self._queues.get(sites)
        if pieces is None:
            pieces = self._queues[sites] = deque()
        _strip(pieces)
        return pieces


def _strip(pieces: deque[RowBatch]) -> None:
    """Removes what was given up at the ends of a queue."""
    while pieces and not pieces[0].count:
        pieces.popleft()
    while pieces and not pieces[-1].count:
        pieces.pop()


def _first(piece: RowBatch) -> int:
    return piece.first


def _joined(columns: list[SiteColumn]) -> SiteColumn:
    """What several queues had of a site."""
    if len(columns) == 1:
        return columns[0]
    positions = np.concatenate([column.positions for column in columns])
    data = np.concatenate([column.data for column in columns])
    order = np.argsort(positions)
    return SiteColumn(positions[order], data[order], columns[0].made)
