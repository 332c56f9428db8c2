"""Rows of one sample on their way to the client: joined over sites, labelled, cut into chunks.

Invariants: per capture and site each position comes once, ascending; a row leaves only when the
token after it is known, since the last sampled token has no row; all sites of a chunk have the same
positions. A position that one site has and another skipped is lost. Which generated tokens are
selected by id is known here: the engine copies rows by position alone, and rows of others end here.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat._proto.v1 import capture_pb2, types_pb2
from rheostat_engine import Rows, Site, Spans
from rheostat_server.capture_specs import ResolvedCapture
from rheostat_server.limits import CHUNK_BYTES
from rheostat_server.sites import to_wire
from rheostat_server.spans import edges, runs, subtracted, united
from rheostat_server.tensors import FloatType, RawArray, encode_rows, stack_rows

Positions = npt.NDArray[np.int32]


class Block(NamedTuple):
    """Rows of one capture, ready to be sent."""

    spec: int
    """Index of the capture."""
    sites: tuple[Site, ...]
    """Names of the sites."""
    positions: Positions
    """Positions, ascending."""
    rows: tuple[RawArray, ...]
    """Per site, [positions, width]."""
    held: FloatType
    """Element type of the rows."""
    wanted: FloatType
    """Element type to send."""

    @property
    def size(self) -> int:
        """Bytes of the rows."""
        return sum(part.nbytes for part in self.rows)


class CaptureStream:
    """Joins the rows of one sample's captures."""

    def __init__(
        self, captures: Sequence[ResolvedCapture], held: FloatType, prompt_len: int
    ) -> None:
        """Captures of a request of `prompt_len` prompt tokens, whose rows come as `held`."""
        self._specs = [
            _SpecRows(index, capture, held, prompt_len) for index, capture in enumerate(captures)
        ]

    def feed(self, rows: Rows) -> None:
        """Takes rows of one site."""
        for spec in self._specs:
            spec.feed(rows)

    def ready(self, generated: Sequence[int], end: int) -> list[Block]:
        """The rows below position `end` that all sites of their capture have, about 1 MiB each.

        `generated` are the sample's tokens, at least those below `end`.
        """
        return [block for spec in self._specs for block in spec.ready(generated, end)]

    def delivered(self, spec: int) -> Spans:
        """Positions of a capture that `ready` has given out."""
        return self._specs[spec].delivered

    def missing(self, spec: int, selected: Spans) -> Spans:
        """Of `selected` positions of a capture, those that `ready` has not given out."""
        return subtracted(selected, self.delivered(spec))


class _SpecRows:
    """Rows of one capture."""

    def __init__(
        self, index: int, capture: ResolvedCapture, held: FloatType, prompt_len: int
    ) -> None:
        self.delivered: Spans = ()
        self._index = index
        self._capture = capture
        self._held = held
        self._prompt_len = prompt_len
        self._starts, self._ends = capture.selection.edges
        self._waiting: dict[int, list[tuple[Positions, RawArray]]] = {
            site: [] for site in capture.indices
        }
        self._next = dict.fromkeys(capture.indices, 0)

    def feed(self, rows: Rows) -> None:
        if rows.site not in self._waiting or not len(self._starts):
            return
        span = np.searchsorted(self._starts, rows.positions, side="right") - 1
        chosen = (
            (span >= 0)
            & (rows.positions < self._ends[span])
            & (rows.positions >= self._next[rows.site])
        )
        if not chosen.any():
            return
        positions = rows.positions[chosen]
        data = rows.data if chosen.all() else rows.data[chosen]
        self._waiting[rows.site].append((positions, data))
        self._next[rows.site] = int(positions[-1]) + 1

    def ready(self, generated: Sequence[int], end: int) -> Iterator[Block]:
        frontier = min(end, *self._next.values())
        taken = {site: self._take(site, frontier) for site in self._waiting}
        positions = _common([held for held, _ in taken.values()])
        if self._capture.selection.conditions and len(positions):
            first, past = int(positions[0]), int(positions[-1]) + 1
            held = self._capture.selection.held(self._prompt_len, generated, first, past)
            positions = positions[_within(positions, held)]
        if not len(positions):
            return
        rows = {
            site: data if len(held) == len(positions) else data[np.isin(held, positions)]
            for site, (held, data) in taken.items()
        }
        self.delivered = united((*self.delivered, *runs(positions)))
        yield from self._cut(positions, rows)

    def _take(self, site: int, frontier: int) -> tuple[Positions, RawArray]:
        """The site's rows below the frontier, which leave the buffer."""
        waiting = self._waiting[site]
        taken, kept = [], []
        for positions, data in waiting:
            cut = int(np.searchsorted(positions, frontier))
            if cut:
                taken.append((positions[:cut], data[:cut]))
            if cut < len(positions):
                kept.append((positions[cut:], data[cut:]))
        self._waiting[site] = kept
        if not taken:
            return np.empty(0, dtype=np.int32), np.empty((0, 0), dtype=np.float32)
        if len(taken) == 1:
            return taken[0]
        return (
            np.concatenate([positions for positions, _ in taken]),
            np.concatenate([data for _, data in taken]),
        )

    def _cut(self, positions: Positions, rows: dict[int, RawArray]) -> Iterator[Block]:
        wanted = self._capture.kind
        width = next(iter(rows.values())).shape[1]
        per_site = width * wanted.itemsize
        site_count = max(1, min(len(self._capture.sites), CHUNK_BYTES // per_site))
        length = max(1, CHUNK_BYTES // (per_site * site_count))
        for first in range(0, len(positions), length):
            part = slice(first, first + length)
            for lowest in range(0, len(self._capture.sites), site_count):
                sites = self._capture.sites[lowest : lowest + site_count]
                yield Block(
                    self._index,
                    sites,
                    positions[part],
                    tuple(rows[site.index][part] for site in sites),
                    self._held,
                    wanted,
                )


def _within(positions: Positions, spans: Spans) -> npt.NDArray[np.bool_]:
    """Which of some positions lie in spans."""
    starts, ends = edges(spans)
    return np.searchsorted(starts, positions, side="right") > np.searchsorted(
        ends, positions, side="right"
    )


def _common(parts: Sequence[Positions]) -> Positions:
    """The positions that all have; usually all have the same."""
    if all(np.array_equal(part, parts[0]) for part in parts[1:]):
        return parts[0]
    return reduce(np.intersect1d, parts)


def wire_runs(spans: Spans) -> list[types_pb2.PositionRun]:
    """Spans as messages."""
    return [types_pb2.PositionRun(start=start, count=end - start) for start, end in spans]


def add_runs(add: Callable[[], types_pb2.PositionRun], spans: Spans) -> None:
    """Adds spans to a message's field, in which `add` makes one: five times quicker than a list."""
    for start, end in spans:
        run = add()
        run.start, run.count = start, end - start


def to_captured(
    block: Block, sample: int, token_ids: Sequence[int], *, baseline: bool = False
) -> capture_pb2.Captured:
    """The message of a block; `token_ids` are those at its positions."""
    return capture_pb2.Captured(
        spec=block.spec,
        sample=sample,
        baseline=baseline,
        sites=[to_wire(site) for site in block.sites],
        positions=wire_runs(runs(block.positions)),
        token_ids=token_ids,
        tensor=encode_rows(stack_rows(block.rows), held=block.held, wanted=block.wanted),
    )
