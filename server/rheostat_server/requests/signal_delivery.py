"""Delivers the signals of a step to requests and watches.

Why the signals of a step are delivered together
    A step of hundreds of requests has one row for each; the rows of one request are a block.
    Consecutive steps mostly have the same requests. So the readers of the rows are looked up once
    for many steps, and a watch costs a step a few numpy calls for all its requests.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from rheostat_engine import SignalRows
from rheostat_server.monitors.signal_buffer import WatchedRequest
from rheostat_server.monitors.watch import Watch, WatchedSamples
from rheostat_server.requests.active_request import ActiveRequest
from rheostat_server.requests.sequence import EngineSequence, SequenceKind

Int64: TypeAlias = npt.NDArray[np.int64]

Routes: TypeAlias = Mapping[str, tuple[ActiveRequest, EngineSequence]]
"""Requests and sequences, by the ids of their plans."""


class _Blocks(NamedTuple):
    """Where the rows of each block of a step are. All are [blocks]."""

    firsts: Int64
    """First positions."""
    counts: Int64
    """Numbers of rows."""
    begins: Int64
    """Indices of the first rows."""

    def take(self, indices: npt.NDArray[np.intp]) -> "_Blocks":
        """Some of the blocks."""
        return _Blocks(self.firsts[indices], self.counts[indices], self.begins[indices])

    def rows(self) -> Int64:
        """The indices of all rows."""
        before = np.cumsum(self.counts) - self.counts
        rows: Int64 = np.repeat(self.begins - before, self.counts)
        rows += np.arange(len(rows))
        return rows


class _WatchedBlock(NamedTuple):
    """A block that a watch reads."""

    block: int
    """Its index in the step."""
    watched: WatchedRequest
    sequence: EngineSequence
    prompt_len: int

    @property
    def end(self) -> int:
        """One past the last position that counts. The engine may compute more positions."""
        end = self.prompt_len + len(self.sequence.tokens) - 1
        return max(end, self.sequence.fired_row + 1)


class _Reader:
    """The blocks of a batch that a watch reads from a column on, with the gates of its rules."""

    def __init__(
        self, watch: Watch, column: int, gates: npt.NDArray[np.intp], blocks: list[_WatchedBlock]
    ) -> None:
        self._watch = watch
        self._column = column
        self._gates = gates
        self._blocks = blocks
        self._find()

    def _find(self) -> None:
        """Keeps the blocks of requests that the watch still reads."""
        watch = self._watch
        self._removals = watch.removals
        self._blocks = [block for block in self._blocks if watch.watches(block.watched)]
        self._sequences = [block.sequence for block in self._blocks]
        self._indices = np.array([block.block for block in self._blocks], np.intp)
        self._samples = WatchedSamples.of(
            [(block.watched, block.sequence.sample) for block in self._blocks]
        )

    def add(self, values: npt.NDArray[np.float32], readings: int, blocks: _Blocks) -> None:
        """Gives the watch its rows of a step."""
        if self._removals != self._watch.removals:
            self._find()
        samples, whole = self._samples, len(self._indices) == len(blocks.counts)
        if not whole:
            blocks = blocks.take(self._indices)
        if True in [sequence.ended for sequence in self._sequences]:
            whole = False
            samples, blocks = self._cut(blocks)
        if not len(blocks.counts):
            return
        read = values[:, self._column : self._column + self._watch.settings.readings.columns]
        fired = _fired(values, readings, self._gates)
        if not whole:
            rows = blocks.rows()
            read, fired = read[rows], None if fired is None else fired[rows]
        self._watch.add(samples, blocks.firsts, blocks.counts, read, fired)

    def _cut(self, blocks: _Blocks) -> tuple[WatchedSamples, _Blocks]:
        """The samples and blocks without rows behind the ends of samples."""
        counts = blocks.counts.copy()
        for index, block in enumerate(self._blocks):
            if block.sequence.ended:
                counts[index] = min(counts[index], block.end - blocks.firsts[index])
        kept = np.flatnonzero(counts > 0)
        return self._samples.take(kept), blocks._replace(counts=counts).take(kept)


class _Batch:
    """The requests and watches that read the signals of some requests."""

    def __init__(self, request_ids: Sequence[str], routes: Routes) -> None:
        self.request_ids = request_ids
        self.requests: list[tuple[int, ActiveRequest, EngineSequence]] = []
        """Requests that take signals themselves, with the indices of their blocks."""
        found: dict[tuple[Watch, int, bytes], list[_WatchedBlock]] = {}
        for index, request_id in enumerate(request_ids):
            route = routes.get(request_id)
            if route is None or route[1].kind is not SequenceKind.OWN:
                continue
            active, sequence = route
            if active.signals is not None:
                self.requests.append((index, active, sequence))
            for part, watched in active.watched:
                block = _WatchedBlock(index, watched, sequence, active.admitted.prompt_len)
                key = part.watch, part.first_column, part.gates.tobytes()
                found.setdefault(key, []).append(block)
        self.watches = [
            _Reader(watch, column, np.frombuffer(gates, np.intp), blocks)
            for (watch, column, gates), blocks in found.items()
        ]
        self._counts: Sequence[int] = ()
        """Numbers of rows in the last step, which are mostly the same in the next."""
        self._blocks = _Blocks(*[np.zeros(0, np.int64)] * 3)

    def blocks(self, event: SignalRows) -> _Blocks:
        """The blocks of a step of this batch."""
        firsts = np.array(event.starts, np.int64)
        if event.counts == self._counts:
            self._blocks = self._blocks._replace(firsts=firsts)
        else:
            counts = np.array(event.counts, np.int64)
            self._blocks = _Blocks(firsts, counts, np.cumsum(counts) - counts)
            self._counts = event.counts
        return self._blocks


class SignalDelivery:
    """Delivers signals to requests and their watches. Used on the event loop alone."""

    def __init__(self, routes: Routes) -> None:
        """`routes` is a live view; call `forget` when it has changed."""
        self._routes = routes
        self._batch: _Batch | None = None
        """The readers of the signals of the last step."""

    def forget(self) -> None:
        """Drops all references to requests, because the routes have changed."""
        self._batch = None

    def deliver(self, event: SignalRows) -> None:
        """Delivers the signals of a step."""
        if event.values is None:
            self._lose(event)
            return
        batch = self._batch
        if batch is None or batch.request_ids != event.request_ids:
            batch = self._batch = _Batch(event.request_ids, self._routes)
        blocks = batch.blocks(event)
        if batch.requests:
            _give(batch.requests, event.values, event.readings, blocks)
        for reader in batch.watches:
            reader.add(event.values, event.readings, blocks)

    def _lose(self, event: SignalRows) -> None:
        """Notes that the signals of a step are lost."""
        for request_id, first, count in zip(
            event.request_ids, event.starts, event.counts, strict=True
        ):
            route = self._routes.get(request_id)
            if route is None or route[1].kind is not SequenceKind.OWN:
                continue
            active, sequence = route
            active.add_signals(sequence, first, count, None, event.readings, opened=False)
            for part, watched in active.watched:
                block = _WatchedBlock(0, watched, sequence, active.admitted.prompt_len)
                lost = min(count, block.end - first) if sequence.ended else count
                if lost > 0:
                    part.watch.lose(watched, lost)


def _give(
    requests: Sequence[tuple[int, ActiveRequest, EngineSequence]],
    values: npt.NDArray[np.float32],
    readings: int,
    blocks: _Blocks,
) -> None:
    """Gives requests their rows of a step."""
    opened = [False] * len(blocks.counts)
    if values.shape[1] > readings:
        largest = np.fmax.reduce(values[:, readings:], axis=1)
        opened = (np.fmax.reduceat(largest, blocks.begins) > 0).tolist()
    firsts, counts, begins = (part.tolist() for part in blocks)
    for index, active, sequence in requests:
        first, count, begin = firsts[index], counts[index], begins[index]
        part = values[begin : begin + count]
        active.add_signals(sequence, first, count, part, readings, opened=opened[index])


def _fired(
    values: npt.NDArray[np.float32], readings: int, gates: npt.NDArray[np.intp]
) -> npt.NDArray[np.bool_] | None:
    """[rows, rules]: where rules fired; None if there are no rules."""
    if not len(gates):
        return None
    fired = np.zeros((len(values), len(gates)), np.bool_)
    acting = gates >= 0
    fired[:, acting] = values[:, readings + gates[acting]] > 0
    return fired
