"""Joins the rows of successive decode steps by request, before they go to the event loop.

Why rows wait
    An event costs the event loop and every later stage about the same, whether it holds one row or
    ten. With hundreds of requests, an event for each row would cost more than the tokens. So the
    rows of a request wait for the request's next rows. The delay grows with the number of requests
    in a step. With few requests each row leaves at once.
What does not wait
    Rows of several positions, such as those of prompts, and rows of many sites: they are large
    already. The last rows of a request, which leave before `Released`.
Order
    Of each request and site, rows leave in the order in which they came.
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
"""Requests in a step up to which rows leave at once."""

_EVENTS_PER_SECOND = 640
"""Events of rows that all requests together make in a second, approximately."""

_LONGEST_DELAY = 0.4
"""The longest delay of a row, in seconds."""

_LARGE_BLOCK = 64 << 10
"""Bytes of a block of rows that leaves at once, because a larger event would save little."""

_JOINED_BYTES = 4 << 20
"""Bytes of rows that share memory, approximately. The allocator reuses blocks of this size."""

_NEWEST_SHARE = 4
"""Steps of the last quarter of the delay stay for the next event. A row leaves the server only with
the token after it, which comes later than the row, so the newest row would leave alone."""

_TAKEN = -1
"""Replaces a request's number in a step once its row has left."""

_Numbers = npt.NDArray[np.int64]


class _Key(NamedTuple):
    """Rows of one key are joined."""

    rank: int
    sites: tuple[int, ...]
    encoding: bytes
    dtype: str
    """NumPy's name of the elements."""
    row_bytes: int

    @property
    def position_bytes(self) -> int:
        """Bytes of the rows at a position."""
        return len(self.sites) * self.row_bytes

    def rows_of(self, memory: npt.NDArray[np.uint8]) -> RowArray:
        """The rows that bytes hold, [n, sites, width]."""
        elements = memory if self.encoding else memory.view(self.dtype)
        return elements.reshape(len(memory) // self.position_bytes, len(self.sites), -1)

    def events(self, name: str, positions: npt.NDArray[np.int32], rows: RowArray) -> list[Rows]:
        """The events of the rows of one request, [n, sites, width].

        Usually it is one event. Its positions ascend, but a preempted request may compute a
        position again.
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
    """The decode rows of one step, one of each request."""

    arrived: float
    numbers: _Numbers
    """The worker's number of each request, [n]."""
    index_of: dict[int, int]
    """Index of each request that still has its row here."""
    positions: _Numbers
    """[n]."""
    frame: npt.NDArray[np.uint8]
    """[m, bytes of the rows at a position]."""
    places: npt.NDArray[np.int64] | None
    """Where the rows are in the frame, [n]; None: they are all of it."""

    def rows_at(self, indices: npt.NDArray[np.intp]) -> npt.NDArray[np.uint8]:
        """The rows of some requests, [m, bytes of the rows at a position].

        Args:
            indices: the indices of the requests, [m].
        """
        return self.frame[_as_slice(indices if self.places is None else self.places[indices])]


class _Group:
    """The steps of one key, in the order in which they came."""

    def __init__(self, key: _Key) -> None:
        self.key = key
        self.steps: list[_Step] = []
        self.numbers: set[int] = set()
        """Requests that have rows in these steps."""
        self.delay = 0.0

    @property
    def due(self) -> float:
        """The time at which rows leave."""
        return self.steps[0].arrived + self.delay

    def take_old(self, before: float) -> list[_Step]:
        """Removes and returns the steps that came by a time."""
        count = sum(step.arrived <= before for step in self.steps)
        old, self.steps = self.steps[:count], self.steps[count:]
        self.numbers = set().union(*(step.index_of for step in self.steps))
        return old

    def take_request(self, number: int, name: str) -> list[Rows]:
        """The events of the rows of one request, which are removed."""
        self.numbers.discard(number)
        positions: list[int] = []
        rows: list[npt.NDArray[np.uint8]] = []
        for step in self.steps:
            index = step.index_of.pop(number, None)
            if index is not None:
                step.numbers[index] = _TAKEN
                positions.append(int(step.positions[index]))
                rows.append(step.frame[index if step.places is None else step.places[index]])
        if not rows:
            return []
        data = self.key.rows_of(np.concatenate(rows))
        return self.key.events(name, np.array(positions, np.int32), data)


class RowBatcher:
    """The decode rows that wait. Used on the channel thread alone."""

    def __init__(self, frames: FrameCopies, clock: Callable[[], float] = time.monotonic) -> None:
        """No rows wait.

        Args:
            frames: counts the memory of rows.
            clock: seconds.
        """
        self._frames = frames
        self._clock = clock
        self._groups: dict[_Key, _Group] = {}

    @property
    def due(self) -> float | None:
        """Seconds until rows leave; None if none wait."""
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
        """Takes the decode rows of a frame.

        Args:
            rank: the worker that sent them.
            blocks: the frame's labels.
            payload: the frame's rows, which are kept.
            names: request ids by the worker's numbers.

        Returns:
            Events that leave now, and the indices of the blocks that were not taken.
        """
        ready: list[Rows] = []
        left = np.ones(len(blocks.number), bool)
        # Several blocks of a request may concern the same site, so that they leave in their order.
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
            left &= ~chosen
            key = _Key(rank, sites, encoding, blocks.dtype, row_bytes)
            for other in list(self._groups):
                if other != key and other.rank == rank and not set(other.sites).isdisjoint(sites):
                    ready += self._take(other, index_of, names)
            places, frame = None, payload
            if len(at) * key.position_bytes == len(payload):
                frame = payload.reshape(-1, key.position_bytes)
            else:
                places = blocks.offset[at]
                frame = np.lib.stride_tricks.sliding_window_view(payload, key.position_bytes)
            group = self._groups.setdefault(key, _Group(key))
            group.numbers.update(index_of)
            group.delay = min(len(at) / _EVENTS_PER_SECOND, _LONGEST_DELAY)
            group.steps.append(
                _Step(self._clock(), numbers, index_of, blocks.start[at], frame, places)
            )
        (others,) = np.nonzero(left)
        if len(others):
            ready += self.take(rank, blocks.number[others].tolist(), names)
        return ready, others

    def take(self, rank: int, numbers: Iterable[int], names: Mapping[int, str]) -> list[Rows]:
        """The events of all rows of some requests that wait."""
        if not self._groups:
            return []
        asked = set(numbers)
        keys = [key for key in self._groups if key.rank == rank]
        return [rows for key in keys for rows in self._take(key, asked, names)]

    def _take(self, key: _Key, numbers: Iterable[int], names: Mapping[int, str]) -> list[Rows]:
        """The events of the rows of some requests in one group."""
        group = self._groups[key]
        waiting = group.numbers.intersection(numbers)
        ready = [rows for number in waiting for rows in group.take_request(number, names[number])]
        if not group.numbers:
            del self._groups[key]  # and its frames
        return ready

    def take_due(
        self, names: Mapping[int, Mapping[int, str]]
    ) -> tuple[list[Rows], list[tuple[int, int, tuple[int, ...]]]]:
        """Removes the rows that have waited long enough; `names` by rank, then by number.

        Returns:
            Their events, and the rows that are lost because there was no memory to join them: the
            worker's rank, its number of the request, and the sites.
        """
        ready: list[Rows] = []
        lost: list[tuple[int, int, tuple[int, ...]]] = []
        now = self._clock()
        for key, group in list(self._groups.items()):
            if group.due <= now:
                old = group.take_old(now - group.delay / _NEWEST_SHARE)
                try:
                    ready += self._joined(key, old, names[key.rank])
                except MemoryError:
                    _LOG.exception("there is no memory for captured rows, which are lost")
                    lost += [
                        (key.rank, number, key.sites) for step in old for number in step.index_of
                    ]
                if not group.steps:
                    del self._groups[key]
        return ready, lost

    def _joined(self, key: _Key, steps: Sequence[_Step], names: Mapping[int, str]) -> list[Rows]:
        """The events of the rows of some steps, one or a few for each request."""
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
        # Each part of some requests' rows gets memory of its own.
        at_once = max(1, _JOINED_BYTES // (key.position_bytes * len(steps)))
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
        """Some of the rows of steps, and whether they may keep their memory.

        Args:
            key: the rows' key.
            steps: the steps.
            order: the indices of the rows, of all steps one after the other.
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
    """The same indices as a slice, if their steps are equal, as in a batch that has not changed.

    NumPy copies slices without the GIL and without another copy.
    """
    if len(indices) < 2:
        return indices
    steps = np.diff(indices)
    step = int(steps[0])
    if step < 1 or (steps != step).any():
        return indices
    return slice(int(indices[0]), int(indices[-1]) + 1, step)


def _single(numbers: _Numbers) -> npt.NDArray[np.bool_]:
    """Which of some numbers occur once."""
    _, inverse, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    single: npt.NDArray[np.bool_] = counts[inverse] == 1
    return single
