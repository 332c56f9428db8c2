"""The waiting rows of one capture of a sequence: joined over sites, cut into chunks.

Invariants
    Each position enters once per site, ascending. All sites of a chunk have the same positions.
    Rows of a site come raw or encoded by the device, and a chunk holds one or the other. A batch is
    taken or dropped for all its sites together. A position that is lost at one site is lost at all
    sites, also at those whose rows are still to come, because chunks are rectangular.
Why rows wait for tokens
    The last sampled token has no row, so a row leaves only when the token after it is known.
Selection by token id
    The engine copies rows by position alone. Rows of other generated tokens are removed here.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine import OPEN_END, Rows, Spans
from rheostat_server.capture.row_tensors import SiteRows, only_copied
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.delivery.block import Block
from rheostat_server.delivery.byte_budget import ByteCounter
from rheostat_server.delivery.row_batch import Positions, RowBatch, common, concatenated
from rheostat_server.limits import CHUNK_BYTES
from rheostat_server.selectors.spans import clipped, edges, joined, runs, subtracted, united
from rheostat_server.tensors import FloatType
from rheostat_wire.dtypes import StoredArray
from rheostat_wire.v1 import tensor_pb2

CHUNK_POSITIONS = 8192
"""The most positions of a chunk, however small their rows: each has labels too."""

_EMPTY = np.empty(0, dtype=np.int32)


class SiteColumn(NamedTuple):
    """Rows that were taken of a site."""

    positions: Positions
    """Ascending, [n]."""
    data: StoredArray
    """[n, width]."""
    encoded: bool
    """Whether the device has encoded the rows."""

    def at(self, positions: Positions) -> "SiteColumn":
        """The rows at some of its positions."""
        if len(positions) == len(self.positions):
            return self
        return SiteColumn(positions, self.data[np.isin(self.positions, positions)], self.encoded)


class _SiteMatch(NamedTuple):
    """The sites of an event that the capture takes."""

    event_sites: tuple[int, ...]
    """The event's sites."""
    encoding: bytes
    """The key of the event's encoding."""
    sites: tuple[int, ...]
    """The sites that are taken."""
    at: tuple[int, ...]
    """Their indices in the event."""


class CaptureRows:
    """Waiting rows of one capture, in a queue for each set of sites that arrive together.

    Usually all sites of the capture arrive together. A site arrives alone if its rows are many, or
    if they come from another worker or in another encoding.
    """

    def __init__(
        self,
        number: int,
        capture: ResolvedCapture,
        row_type: FloatType,
        prompt_len: int,
        byte_counter: ByteCounter,
    ) -> None:
        """No rows wait.

        Args:
            number: the capture's number.
            capture: the capture.
            row_type: element type of raw rows.
            prompt_len: P.
            byte_counter: counts waiting rows.
        """
        self._number = number
        self._capture = capture
        self._row_type = row_type
        self._prompt_len = prompt_len
        self._byte_counter = byte_counter
        self._starts, self._ends = capture.selection.edges
        whole = len(self._starts) == 1 and self._ends[0] >= OPEN_END
        self._whole = int(self._starts[0]) if whole else None
        """Position from which on every row is taken; None if the spans decide."""
        self._keys = {
            index: form.key
            for index, forms in (capture.forms.items() if capture.row_encodings else ())
            for form in forms
            if form is not None and len(forms) == 1
        }
        self._site_match: _SiteMatch | None = None
        """The match of the last event, because the next event mostly has the same sites."""
        self._payload = capture.form.row_bytes(capture.numbers, capture.kind)
        """The most bytes of a row in a message."""
        self._queues: dict[tuple[int, ...], deque[RowBatch]] = {}
        self._indices = capture.indices
        self._joins = only_copied(capture) and capture.site_forms.index_of_each == self._indices
        """Whether rows of all sites that arrive together leave in one array."""
        self._frontier: int | None = 0
        """One past the last position that has come, if it is the same at all sites."""
        self._next: dict[int, int] = {}
        """The same for each site, if sites differ."""
        self._tail: RowBatch | None = None
        """The last batch."""
        self._lost: Spans = ()
        """Lost positions whose rows may still come at some sites."""
        self._delivered: Spans = ()

    @property
    def frontier(self) -> int:
        """One past the last position that has come at all sites."""
        return min(self._next.values()) if self._frontier is None else self._frontier

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

    def lost(self, selected: Spans) -> Spans:
        """The `selected` positions that neither left nor wait at all sites."""
        if not selected:
            return ()
        delivered = clipped(self._delivered, selected[0][0], selected[-1][1])
        if delivered == selected:
            return ()
        waiting = runs(common(self.positions())) if self.row_bytes else ()
        return subtracted(selected, united((*delivered, *waiting)))

    def add(self, rows: Rows) -> list[RowBatch]:
        """Adds the rows that the capture selects; returns the batches that hold them."""
        match = self._site_match
        if match is None or rows.sites != match.event_sites or rows.encoding != match.encoding:
            match = self._site_match = self._match(rows)
        positions, data = rows.positions, rows.data
        if not match.sites or not len(self._starts) or not len(positions):
            return []
        if self._whole is None or self._whole > positions[0]:
            span = int(self._starts.searchsorted(positions[0], "right")) - 1
            if span < 0 or positions[-1] >= self._ends[span]:
                spans = self._starts.searchsorted(positions, "right") - 1
                chosen = (spans >= 0) & (positions < self._ends[spans])
                if not chosen.any():
                    return []
                positions, data = positions[chosen], data[:, chosen]
        return self.put(match.sites, match.at, positions, data, encoded=bool(rows.encoding))

    def _match(self, rows: Rows) -> _SiteMatch:
        if not rows.encoding and rows.sites == self._indices:  # mostly
            return _SiteMatch(rows.sites, b"", self._indices, tuple(range(len(rows.sites))))
        taken = [
            (index, site)
            for index, site in enumerate(rows.sites)
            if site in self._indices
            # Rows may be encoded for other captures, which were there before this one.
            and (not rows.encoding or rows.encoding == self._keys.get(site))
        ]
        sites, at = tuple(site for _, site in taken), tuple(index for index, _ in taken)
        return _SiteMatch(rows.sites, rows.encoding, sites, at)

    def put(
        self,
        sites: tuple[int, ...],
        at: tuple[int, ...],
        positions: Positions,
        data: StoredArray,
        *,
        encoded: bool,
    ) -> list[RowBatch]:
        """Adds the rows that have not come before; returns the batches that hold them.

        Args:
            sites: indices of the sites.
            at: their indices in `data`.
            positions: ascending, [n], at least one.
            data: [some sites, n, width]. A batch of fewer sites gets memory of its own.
            encoded: whether the device has encoded the rows.
        """
        end = int(positions[-1]) + 1
        if self._lost:
            positions, data = self._without_lost(positions, data)
        if not len(positions):
            batches = []
        elif self._latest(sites) <= positions[0]:
            rows = data if len(at) == len(data) else data[list(at)]
            batches = [self._wait(sites, positions, rows, encoded)]
        else:
            by_start: dict[int, list[tuple[int, int]]] = {}
            for site, index in zip(sites, at, strict=True):
                start = int(positions.searchsorted(self._latest((site,))))
                by_start.setdefault(start, []).append((site, index))
            batches = [
                self._wait(
                    tuple(site for site, _ in some),
                    positions[start:],
                    data[[index for _, index in some], start:],
                    encoded,
                )
                for start, some in by_start.items()
                if start < len(positions)
            ]
        self._advance(sites, end)
        return batches

    def _latest(self, sites: tuple[int, ...]) -> int:
        """One past the last position that has come at any of some sites."""
        if self._frontier is not None:
            return self._frontier
        return max([self._next[site] for site in sites])

    def _advance(self, sites: tuple[int, ...], end: int) -> None:
        """Notes that the positions below `end` have come at some sites."""
        if self._frontier is not None:
            if sites == self._indices:
                self._frontier = max(self._frontier, end)
                return
            self._next = dict.fromkeys(self._indices, self._frontier)
            self._frontier = None
        for site in sites:
            self._next[site] = max(self._next[site], end)

    def _without_lost(
        self, positions: Positions, data: StoredArray
    ) -> tuple[Positions, StoredArray]:
        """The rows without those at lost positions."""
        self._lost = clipped(self._lost, self.frontier, OPEN_END)
        kept = ~_within(positions, self._lost)
        return (positions, data) if kept.all() else (positions[kept], data[:, kept])

    def _wait(
        self, sites: tuple[int, ...], positions: Positions, data: StoredArray, encoded: bool
    ) -> RowBatch:
        first, last = int(positions[0]), int(positions[-1])
        batch = self._tail
        if (
            batch is not None
            and batch.sites == sites
            and batch.encoded == encoded
            and batch.takes(first, last, len(positions), data.nbytes)
        ):
            batch.add(data)
            return batch
        batch = self._tail = RowBatch(
            sites, positions, data, self._byte_counter, self, encoded=encoded
        )
        batches = self._queues.setdefault(sites, deque())
        _strip(batches)
        batches.append(batch)
        return batch

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
        outer = [batches[-1 if newest else 0] for batches in self._queues.values()]
        if newest:
            edge = max(batch.last for batch in outer)
            there = [batch for batch in outer if batch.last == edge]
            others = [batch.last + 1 for batch in outer if batch.last < edge]
            # Between these positions all of the same sites have rows.
            bound = max([*others, *(batch.first for batch in there)])
        else:
            edge = min(batch.first for batch in outer)
            there = [batch for batch in outer if batch.first == edge]
            others = [batch.first for batch in outer if batch.first > edge]
            bound = min([*others, *(batch.last + 1 for batch in there)])
        most = -(-size // sum(batch.position_bytes for batch in there))
        positions = there[0].positions
        if newest:
            at = max(int(positions.searchsorted(bound)), len(positions) - most)
            start, end = int(positions[at]), edge + 1
        else:
            at = min(int(positions.searchsorted(bound)), most)
            start, end = edge, int(positions[at - 1]) + 1
        rows = sum(batch.lose(start, end) for batch in there)
        if end > self.frontier:
            self._lost = united((*self._lost, (start, end)))
        return start, rows

    def discard(self) -> None:
        """Drops all waiting rows."""
        for batches in self._queues.values():
            for batch in batches:
                batch.give_up()
        self._queues.clear()
        self._tail = None  # it refers to these rows

    def positions(self) -> list[Positions]:
        """The waiting positions of each site, ascending."""
        waiting: dict[int, list[Positions]] = {site: [_EMPTY] for site in self._indices}
        for sites, batches in self._queues.items():
            for site in sites:
                waiting[site] += [batch.positions for batch in batches]
        return [np.sort(np.concatenate(parts)) for parts in waiting.values()]

    def ready(
        self,
        generated: Sequence[int],
        end: int,
        *,
        last: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Iterator[Block]:
        """Removes and yields the rows below position `end` that all sites have.

        Args:
            generated: the sequence's generated tokens, at least those below `end`.
            end: one past the last position before a known token.
            last: whether no more rows come, so that rows that a site lost are not awaited.
            chunk_bytes: the largest block, approximately.
        """
        frontier = end if last else min(end, self.frontier)
        if self._capture.form.encoding != tensor_pb2.ENCODING_RAW:  # may be larger than its rows
            chunk_bytes = min(chunk_bytes, CHUNK_BYTES)
        while row_bytes := self.row_bytes:
            per_site = max(self._capture.decoded_bytes, self._payload, row_bytes)
            site_count = max(1, min(len(self._capture.sites), chunk_bytes // per_site))
            most = min(max(1, chunk_bytes // (per_site * site_count)), CHUNK_POSITIONS)
            if site_count == len(self._indices) and self._in_one_array:
                column = self._take(self._indices, self.cut(frontier, most))
                if column is None:
                    return
                yield from self._joined_block(column, generated)
                continue
            taken = self.take(self.cut(frontier, most))
            if not taken:
                return
            distinct = {id(column.positions): column.positions for column in taken.values()}
            positions = self._selected(common(distinct.values()), generated)
            if not len(positions):
                continue
            if any(len(some) > len(positions) for some in distinct.values()):
                taken = {site: column.at(positions) for site, column in taken.items()}
            in_order = map(taken.__getitem__, self._capture.site_forms.index_of_each)
            parts = [
                SiteRows(site, data, encoded)
                for site, (_, data, encoded) in zip(self._capture.sites, in_order, strict=True)
            ]
            self._delivered = joined(self._delivered, runs(positions))
            for lowest in range(0, len(parts), site_count):
                some = tuple(parts[lowest : lowest + site_count])
                yield Block(self._number, positions, some, self._row_type, self._capture)

    @property
    def _in_one_array(self) -> bool:
        """Whether all waiting rows came for all sites together, and are only copied."""
        if not self._joins or len(self._queues) > 1:
            return False
        batches = self._queues.get(self._indices)
        return batches is not None and not any(batch.encoded for batch in batches)

    def _joined_block(self, column: SiteColumn, generated: Sequence[int]) -> Iterator[Block]:
        """The block of rows [sites, n, width] of all sites in order, if any is selected."""
        positions, rows, _ = column
        selected = self._selected(positions, generated)
        if not len(selected):
            return
        if len(selected) < len(positions):
            rows = rows[:, np.isin(positions, selected)]
        self._delivered = joined(self._delivered, runs(selected))
        yield Block(self._number, selected, rows, self._row_type, self._capture)

    def _selected(self, positions: Positions, generated: Sequence[int]) -> Positions:
        """The positions whose tokens are selected."""
        if not self._capture.selection.conditions or not len(positions):
            return positions
        first, past = int(positions[0]), int(positions[-1]) + 1
        spans = self._capture.selection.selected(self._prompt_len, generated, first, past)
        return positions[_within(positions, spans)]

    def cut(self, frontier: int, most: int) -> int:
        """A position up to `frontier`, to take the rows below it.

        Of each site at most `most` waiting positions lie below it. Their rows are all raw, or all
        encoded.
        """
        several = len(self._queues) > 1  # all sites of one queue have the same positions
        if not several and self._fits(frontier, most):
            return frontier
        room_at: dict[int, int] = {}
        encoded: dict[int, bool] = {}
        for batch in self._ascending():
            first = batch.first
            if first >= frontier:
                break
            sites = batch.sites if several else batch.sites[:1]
            if any(encoded.setdefault(site, batch.encoded) != batch.encoded for site in sites):
                return first
            room = min([room_at.get(site, most) for site in sites])
            if batch.below(frontier) > room:
                frontier = int(batch.positions[room - 1]) + 1 if room else first
            count = batch.below(frontier)
            for site in sites:
                room_at[site] = room_at.get(site, most) - count
        return frontier

    def _fits(self, frontier: int, most: int) -> bool:
        """Whether all rows of the only queue can be taken at once, as nearly always."""
        for batches in self._queues.values():
            encoded = batches[0].encoded
            for batch in batches:
                most -= batch.count
                if most < 0 or batch.encoded != encoded or batch.below(frontier) < batch.count:
                    return False
        return True

    def _ascending(self) -> Iterator[RowBatch]:
        """All batches with waiting rows, by their first position."""
        queues = [(batch for batch in queue if batch.count) for queue in self._queues.values()]
        return heapq.merge(*queues, key=attrgetter("first")) if len(queues) > 1 else chain(*queues)

    def take(self, frontier: int) -> dict[int, SiteColumn]:
        """Removes and returns all rows below a position, by site; empty if there are none."""
        parts = [
            (sites, column)
            for sites in list(self._queues)
            if (column := self._take(sites, frontier)) is not None
        ]
        if len(parts) == 1 and len(parts[0][0]) == len(self._indices):
            ((sites, (positions, data, encoded)),) = parts
            return {site: SiteColumn(positions, data[i], encoded) for i, site in enumerate(sites)}
        columns: dict[int, list[SiteColumn]] = {}
        for sites, (positions, data, encoded) in parts:
            for i, site in enumerate(sites):
                columns.setdefault(site, []).append(SiteColumn(positions, data[i], encoded))
        nothing = SiteColumn(_EMPTY, np.empty((0, 0), np.float32), encoded=False)
        return {site: _joined(columns.get(site, [nothing])) for site in self._indices if columns}

    def _take(self, sites: tuple[int, ...], frontier: int) -> SiteColumn | None:
        """The rows of a queue below a position; the data are [sites, n, width]."""
        batches = self._queues[sites]
        if len(batches) == 1 and batches[0].count and batches[0].last < frontier:  # mostly
            (batch,) = batches
            del self._queues[sites]
            positions, some = batch.take(frontier)
            return SiteColumn(positions, concatenated(some), batch.encoded)
        encoded = False
        taken: list[Positions] = []
        parts: list[StoredArray] = []
        while batches:
            batch = batches[0]
            if batch.below(frontier):
                encoded = batch.encoded
                positions, some = batch.take(frontier)
                taken.append(positions)
                parts += some
            if batch.count:  # later batches lie higher
                break
            batches.popleft()
        if not batches:
            del self._queues[sites]
        if not taken:
            return None
        positions = taken[0] if len(taken) == 1 else np.concatenate(taken)
        return SiteColumn(positions, concatenated(parts), encoded)


def _within(positions: Positions, spans: Spans) -> npt.NDArray[np.bool_]:
    """Which of some positions lie in spans."""
    starts, ends = edges(spans)
    return np.searchsorted(starts, positions, side="right") > np.searchsorted(
        ends, positions, side="right"
    )


def _strip(batches: deque[RowBatch]) -> None:
    """Removes batches without rows at the ends of a queue."""
    while batches and not batches[0].count:
        batches.popleft()
    while batches and not batches[-1].count:
        batches.pop()


def _joined(columns: list[SiteColumn]) -> SiteColumn:
    """The rows of one site from several queues."""
    if len(columns) == 1:
        return columns[0]
    positions = np.concatenate([column.positions for column in columns])
    data = np.concatenate([column.data for column in columns])
    order = np.argsort(positions)
    return SiteColumn(positions[order], data[order], columns[0].encoded)
