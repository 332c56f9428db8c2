"""Batches the rows of successive decode steps by request, before the event loop receives them.

Why batch
    An event costs the event loop and all later stages about the same with one row or ten. With
    hundreds of requests, an event for each row would cost more than the tokens. So a request's row
    waits for the request's next rows. The delay grows with the number of requests in a step; with
    few requests it is zero.
Exceptions
    Rows of several positions, such as prompts, and rows of many sites don't wait, because they are
    large already. The last rows of a request are emitted before `Released`.
Order
    For each request and site, rows keep their order.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine.channel.events import RowArray, RowBlocks, Rows
from rheostat_engine.channel.frame_copies import FrameCopies

_LOG = logging.getLogger(__name__)

REQUESTS_AT_ONCE = 8
"""The most requests in a step whose rows are emitted at once."""

_EVENTS_PER_SECOND = 640
"""Approximate events of rows per second, for all requests together."""

_LONGEST_DELAY = 0.4
"""Seconds."""

_LARGE_BLOCK = 64 << 10
"""Bytes of a block that is emitted at once, because batching it would save little."""

_MERGED_BYTES = 4 << 20
"""Approximate bytes of rows that share memory. The allocator reuses blocks of this size."""

_NEWEST_SHARE = 4
"""Steps of the last quarter of the delay stay for the next event. The server sends a row only with
the next token, which arrives later than the row, so the newest row would be sent alone."""

_TAKEN = -1
"""Replaces a request's number in a step once its row was emitted."""

_Numbers = npt.NDArray[np.int64]


class _Key(NamedTuple):
    """Rows with equal keys can be batched."""

    rank: int
    sites: tuple[int, ...]
    encoding: bytes
    dtype: str
    """NumPy dtype of the elements."""
    row_bytes: int

    @property
    def position_bytes(self) -> int:
        """Bytes of the rows at one position."""
        return len(self.sites) * self.row_bytes

    def rows_of(self, memory: npt.NDArray[np.uint8]) -> RowArray:
        """Views bytes as rows, [n, sites, width]."""
        elements = memory if self.encoding else memory.view(self.dtype)
        return elements.reshape(len(memory) // self.position_bytes, len(self.sites), -1)

    def events(self, name: str, positions: npt.NDArray[np.int32], rows: RowArray) -> list[Rows]:
        """The events of one request's rows, [n, sites, width].

        Positions must ascend within an event. So there is one event, unless a preempted request
        recomputed a position.
        """
        ends = [at + 1 for at in np.flatnonzero(np.diff(positions) <= 0).tolist()]
        return [
            Rows(
                name,
                self.sites,
                positions[start:end],
                np.ascontiguousarray(rows[start:end].swapaxes(0, 1)),
                self.encoding,
            )
            for start, end in pairwise([0, *ends, len(positions)])
        ]


class _Step(NamedTuple):
    """The decode rows of one step, one for each request."""

    arrived: float
    numbers: _Numbers
    """The worker's number of each request, [n]."""
    index_of: dict[int, int]
    """By number: the index of each request whose row is still here."""
    positions: _Numbers
    """[n]."""
    frame: npt.NDArray[np.uint8]
    """[m, bytes of the rows at a position]."""
    row_indices: npt.NDArray[np.int64] | None
    """[n]: indices of the rows in the frame; None: the rows are the whole frame."""

    def rows_at(self, indices: npt.NDArray[np.intp]) -> npt.NDArray[np.uint8]:
        """The rows of requests, [m, bytes of the rows at a position], by their indices, [m]."""
        return self.frame[
            _as_slice(indices if self.row_indices is None else self.row_indices[indices])
        ]


class _Group:
    """The steps with one key, in order of arrival."""

    def __init__(self, key: _Key) -> None:
        self.key = key
        self.steps: list[_Step] = []
        self.numbers: set[int] = set()
        """Numbers of the requests with rows in these steps."""
        self.delay = 0.0

    @property
    def due(self) -> float:
        """The time at which the rows are emitted."""
        return self.steps[0].arrived + self.delay

    def take_old(self, before: float) -> list[_Step]:
        """Removes and returns the steps that arrived by a time."""
        count = sum(step.arrived <= before for step in self.steps)
        old, self.steps = self.steps[:count], self.steps[count:]
        self.numbers = set().union(*(step.index_of for step in self.steps))
        return old

    def take_request(self, number: int, name: str) -> list[Rows]:
        """Removes the rows of one of `numbers`; returns their events."""
        self.numbers.discard(number)
        positions: list[int] = []
        rows: list[npt.NDArray[np.uint8]] = []
        for step in self.steps:
            index = step.index_of.pop(number, None)
            if index is not None:
                step.numbers[index] = _TAKEN
                positions.append(int(step.positions[index]))
                at = index if step.row_indices is None else step.row_indices[index]
                rows.append(step.frame[at])
        data = self.key.rows_of(np.concatenate(rows))
        return self.key.events(name, np.array(positions, np.int32), data)


class RowBatcher:
    """The waiting decode rows. Used only on the channel thread."""

    def __init__(self, frames: FrameCopies, clock: Callable[[], float] = time.monotonic) -> None:
        """`frames` counts the memory of rows; `clock` returns seconds."""
        self._frames = frames
        self._clock = clock
        self._groups: dict[_Key, _Group] = {}

    @property
    def due(self) -> float | None:
        """Seconds until rows are emitted; None if no rows wait."""
        if not self._groups:
            return None
        return max(0.0, min(group.due for group in self._groups.values()) - self._clock())

    def add(
        self,
        rank: int,
        blocks: RowBlocks,
        payload: npt.NDArray[np.uint8],
        names: Mapping[int, str],
    ) -> tuple[list[Rows], npt.NDArray[np.intp]]:
        """Adds the decode rows of a frame.

        Keeps `payload`. `names` are request ids by the worker's numbers.

        Returns:
            Events to emit now, and the indices of the blocks that were not added.
        """
        ready: list[Rows] = []
        if len(blocks.number) <= REQUESTS_AT_ONCE:  # too few to batch any
            earlier = self.take(rank, blocks.number.tolist(), names)
            return earlier, np.arange(len(blocks.number))
        not_added = np.ones(len(blocks.number), bool)
        # Several blocks of a request may have the same site, and must keep their order.
        single = _single(blocks.number) & (blocks.count == 1)
        for which, (sites, (encoding, row_bytes)) in enumerate(
            zip(blocks.site_sets, blocks.kinds, strict=True)
        ):
            chosen = single & (blocks.which == which)
            (at,) = np.nonzero(chosen)
            if len(at) <= REQUESTS_AT_ONCE or len(sites) * row_bytes > _LARGE_BLOCK:
                continue
            numbers = blocks.number[at]
            index_of = {number: index for index, number in enumerate(numbers.tolist())}
            not_added &= ~chosen
            key = _Key(rank, sites, encoding, blocks.dtype, row_bytes)
            for other in list(self._groups):
                if other != key and other.rank == rank and not set(other.sites).isdisjoint(sites):
                    ready += self._take(other, index_of, names)
            row_indices, frame = None, payload
            if len(at) * key.position_bytes == len(payload):
                frame = payload.reshape(-1, key.position_bytes)
            else:
                row_indices = blocks.offset[at]
                frame = np.lib.stride_tricks.sliding_window_view(payload, key.position_bytes)
            group = self._groups.setdefault(key, _Group(key))
            group.numbers.update(index_of)
            group.delay = min(len(at) / _EVENTS_PER_SECOND, _LONGEST_DELAY)
            group.steps.append(
                _Step(self._clock(), numbers, index_of, blocks.start[at], frame, row_indices)
            )
        (others,) = np.nonzero(not_added)
        if len(others):
            ready += self.take(rank, blocks.number[others].tolist(), names)
        return ready, others

    def take(self, rank: int, numbers: Iterable[int], names: Mapping[int, str]) -> list[Rows]:
        """Removes all waiting rows of some requests; returns their events."""
        if not self._groups:
            return []
        asked = set(numbers)
        keys = [key for key in self._groups if key.rank == rank]
        return [rows for key in keys for rows in self._take(key, asked, names)]

    def _take(self, key: _Key, numbers: Iterable[int], names: Mapping[int, str]) -> list[Rows]:
        """As `take`, for one group."""
        group = self._groups[key]
        waiting = group.numbers.intersection(numbers)
        ready = [rows for number in waiting for rows in group.take_request(number, names[number])]
        if not group.numbers:
            del self._groups[key]  # and its frames
        return ready

    def take_due(
        self, names: Mapping[int, Mapping[int, str]]
    ) -> tuple[list[Rows], list[tuple[int, int, tuple[int, ...]]]]:
        """Removes the rows whose delay is over; `names` by rank, then by number.

        Returns:
            Their events, and the rows that were lost for lack of memory: (rank, the worker's number
            of the request, sites).
        """
        ready: list[Rows] = []
        lost: list[tuple[int, int, tuple[int, ...]]] = []
        now = self._clock()
        for key, group in list(self._groups.items()):
            if group.due <= now:
                old = group.take_old(now - group.delay / _NEWEST_SHARE)
                try:
                    ready += self._merged(key, old, names[key.rank])
                except MemoryError:
                    _LOG.exception("captured rows are lost: out of memory")
                    lost += [
                        (key.rank, number, key.sites) for step in old for number in step.index_of
                    ]
                if not group.steps:
                    del self._groups[key]
        return ready, lost

    def _merged(self, key: _Key, steps: Sequence[_Step], names: Mapping[int, str]) -> list[Rows]:
        """The events of the steps' rows, one or a few for each request."""
        numbers = np.concatenate([step.numbers for step in steps])
        order = numbers.argsort(kind="stable")
        numbers = numbers[order]
        positions = np.concatenate([step.positions for step in steps])[order].astype(np.int32)
        events: list[Rows] = []
        bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(order)]
        requests = [
            (number, start, end)
            for start, end in pairwise(bounds)
            if (number := int(numbers[start])) != _TAKEN
        ]
        # The rows are split into parts with their own memory, so a slow reader keeps only a part.
        at_once = max(1, _MERGED_BYTES // (key.position_bytes * len(steps)))
        for first in range(0, len(requests), at_once):
            part = requests[first : first + at_once]
            begin, stop = part[0][1], part[-1][2]
            rows, shared = self._gathered(key, steps, order[begin:stop])
            for number, start, end in part:
                some_rows = rows[start - begin : end - begin]
                if not shared:
                    some_rows = some_rows.copy()
                events += key.events(names[number], positions[start:end], some_rows)
        return events

    def _gathered(
        self, key: _Key, steps: Sequence[_Step], order: npt.NDArray[np.intp]
    ) -> tuple[RowArray, bool]:
        """Copies rows of steps; returns them and whether events may share their memory.

        `order` has the indices of the rows in the concatenation of the steps.
        """
        size = len(order) * key.position_bytes
        shared = self._frames.empty(size)
        memory = np.empty(size, np.uint8) if shared is None else shared
        gathered = memory.reshape(len(order), -1)
        first = 0
        for step in steps:
            last = first + len(step.numbers)
            (target,) = np.nonzero((first <= order) & (order < last))
            gathered[_as_slice(target)] = step.rows_at(order[target] - first)
            first = last
        return key.rows_of(memory), shared is not None


def _as_slice(indices: npt.NDArray[np.integer]) -> "npt.NDArray[np.integer] | slice":
    """Indices as a slice if they are equally spaced, as in an unchanged batch.

    NumPy copies slices without the GIL and without a temporary.
    """
    if len(indices) < 2:
        return indices
    steps = np.diff(indices)
    step = int(steps[0])
    if step < 1 or (steps != step).any():
        return indices
    return slice(int(indices[0]), int(indices[-1]) + 1, step)


def _single(numbers: _Numbers) -> npt.NDArray[np.bool_]:
    """[n]: whether a number occurs once."""
    _, inverse, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    single: npt.NDArray[np.bool_] = counts[inverse] == 1
    return single
