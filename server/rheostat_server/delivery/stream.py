"""Rows of one sample on their way to a reader: joined over sites, labelled, cut into chunks.

Invariants: per capture and site each position comes once, ascending; a row leaves only when the
token after it is known, since the last sampled token has no row; all sites of a chunk have the same
positions. A position that one site has and another lost is lost. Which generated tokens are
selected by id is known here: the engine copies rows by position alone, and rows of others end here.
Rows of a site come as they are or in the capture's form, and a block holds one or the other.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_engine import OPEN_END, Rows, Site, Spans
from rheostat_server.capture.row_tensors import SiteRows, encoding_work, tensor_of
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.delivery.byte_budget import ByteCounter
from rheostat_server.delivery.pending_rows import PendingRows
from rheostat_server.delivery.row_batch import Positions, RowBatch, common
from rheostat_server.limits import CHUNK_BYTES
from rheostat_server.selectors.sites import write_site
from rheostat_server.selectors.spans import clipped, edges, joined, runs, subtracted, united
from rheostat_server.tensors import FloatType
from rheostat_wire.dtypes import StoredArray
from rheostat_wire.v1 import capture_pb2, tensor_pb2, types_pb2

_CHUNK_POSITIONS = 8192
"""The most positions of a chunk, however small their rows: each has labels too."""


class Block(NamedTuple):
    """Rows of one capture, ready to be sent."""

    capture_index: int
    """Number of the capture."""
    sites: tuple[Site, ...]
    """Names of the sites."""
    positions: Positions
    """Positions, ascending."""
    parts: tuple[SiteRows, ...]
    """Their rows."""
    held: FloatType
    """Element type of rows as they are."""
    capture: ResolvedCapture
    """What is to become of them."""

    @property
    def rows(self) -> tuple[StoredArray, ...]:
        """Per site, [positions, width]."""
        return tuple(part.data for part in self.parts)

    @property
    def size(self) -> int:
        """Bytes of the rows."""
        return sum(part.data.nbytes for part in self.parts)

    @property
    def work(self) -> int:
        """Bytes that encoding them goes over; see `offload`."""
        return encoding_work(self.parts, self.capture)

    def encoded(self) -> tensor_pb2.Tensor:
        """The rows as they travel, [sites, positions, width]."""
        return tensor_of(self.parts, self.capture, self.held)


class CaptureStream:
    """Joins the rows of one sample's captures."""

    def __init__(
        self,
        captures: Mapping[int, ResolvedCapture],
        held: FloatType,
        prompt_len: int,
        byte_counter: ByteCounter | None = None,
    ) -> None:
        """Captures of a request, by number.

        Args:
            captures: what is wanted.
            held: element type in which rows come.
            prompt_len: P.
            byte_counter: counts what waits.
        """
        byte_counter = byte_counter or ByteCounter()
        self._specs = {
            number: _SpecRows(number, capture, held, prompt_len, byte_counter)
            for number, capture in captures.items()
        }

    def add(self, rows: Rows) -> list[RowBatch]:
        """Takes rows; what of them waits."""
        if len(self._specs) == 1:
            (only,) = self._specs.values()
            return only.add(rows)
        return [piece for spec in self._specs.values() for piece in spec.add(rows)]

    def drop(self, numbers: Collection[int]) -> None:
        """Takes no rows of these captures any more, and loses what waits of them."""
        for number in numbers:
            spec = self._specs.pop(number, None)
            if spec is not None:
                spec.discard()

    def discard(self) -> None:
        """Loses what waits."""
        for spec in self._specs.values():
            spec.discard()

    def ready(
        self,
        generated: Sequence[int],
        end: int,
        *,
        last: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> Iterator[Block]:
        """The rows below position `end` that all sites of their capture have.

        Args:
            generated: the sample's tokens, at least those below `end`.
            end: one past the last position whose row is known to be one.
            last: whether nothing more comes, so that nobody waits for what a site lost.
            chunk_bytes: about how large each block is at most.
        """
        for spec in self._specs.values():
            yield from spec.ready(generated, end, last=last, chunk_bytes=chunk_bytes)

    @property
    def waits(self) -> bool:
        """Whether rows wait."""
        return any(spec.waits for spec in self._specs.values())

    def lost(self, spec: int, selected: Spans) -> Spans:
        """Of `selected` positions, those that were neither given out nor wait at all sites."""
        if not selected:
            return ()
        one = self._specs[spec]
        given = clipped(one.delivered, selected[0][0], selected[-1][1])
        if given == selected:
            return ()
        return subtracted(selected, united((*given, *one.waiting)))

    def frontier(self, spec: int) -> int:
        """One past the last position that all sites of a capture have been fed."""
        return self._specs[spec].frontier


class _Mine(NamedTuple):
    """Which sites of an event a capture takes."""

    of: tuple[int, ...]
    """The event's sites."""
    encoding: bytes
    """The key of the event's encoding."""
    sites: tuple[int, ...]
    """Those that are taken."""
    at: tuple[int, ...]
    """Where they stand in the event."""


class _SpecRows:
    """Rows of one capture."""

    def __init__(
        self,
        number: int,
        capture: ResolvedCapture,
        held: FloatType,
        prompt_len: int,
        byte_counter: ByteCounter,
    ) -> None:
        self.delivered: Spans = ()
        self._number = number
        self._capture = capture
        self._held = held
        self._prompt_len = prompt_len
        self._starts, self._ends = capture.selection.edges
        whole = len(self._starts) == 1 and self._ends[0] >= OPEN_END
        self._whole = int(self._starts[0]) if whole else None
        """Position from which on every row is taken; None: see the spans."""
        self._keys = {
            index: form.key
            for index, forms in (capture.forms.items() if capture.row_encodings else ())
            for form in forms
            if form is not None and len(forms) == 1
        }
        self._indices = frozenset(capture.indices)
        self._site_indices = [site.index for site in capture.sites]
        self._mine: _Mine | None = None
        """What the last event had of this, since the next one mostly has the same."""
        self._payload = capture.form.row_bytes(capture.numbers, capture.kind)
        """Bytes that a row travels as, at most."""
        self._rows = PendingRows(capture.indices, byte_counter)

    def discard(self) -> None:
        self._rows.discard()

    @property
    def frontier(self) -> int:
        return self._rows.frontier

    @property
    def waits(self) -> bool:
        return self._rows.waits

    @property
    def waiting(self) -> Spans:
        return runs(common(self._rows.positions())) if self._rows.row_bytes else ()

    def add(self, rows: Rows) -> list[RowBatch]:
        mine = self._mine
        if mine is None or rows.sites != mine.of or rows.encoding != mine.encoding:
            mine = self._mine = self._mine_of(rows)
        positions, data = rows.positions, rows.data
        if not mine.sites or not len(self._starts) or not len(positions):
            return []
        if self._whole is not None and self._whole <= positions[0]:
            return self._rows.put(mine.sites, mine.at, positions, data, made=bool(rows.encoding))
        span = int(self._starts.searchsorted(positions[0], "right")) - 1
        if span < 0 or positions[-1] >= self._ends[span]:
            spans = self._starts.searchsorted(positions, "right") - 1
            chosen = (spans >= 0) & (positions < self._ends[spans])
            if not chosen.any():
                return []
            positions, data = positions[chosen], data[:, chosen]
        return self._rows.put(mine.sites, mine.at, positions, data, made=bool(rows.encoding))

    def _mine_of(self, rows: Rows) -> "_Mine":
        """Which of an event's sites this takes."""
        mine = [
            (index, site)
            for index, site in enumerate(rows.sites)
            if site in self._indices
            # Others may want them in a form, and did before this capture was there.
            and (not rows.encoding or rows.encoding == self._keys.get(site))
        ]
        sites, at = tuple(site for _, site in mine), tuple(index for index, _ in mine)
        return _Mine(rows.sites, rows.encoding, sites, at)

    def ready(
        self, generated: Sequence[int], end: int, *, last: bool, chunk_bytes: int
    ) -> Iterator[Block]:
        frontier = end if last else min(end, self.frontier)
        if self._capture.form.encoding != tensor_pb2.ENCODING_RAW:  # may be larger than its rows
            chunk_bytes = min(chunk_bytes, CHUNK_BYTES)
        while row_bytes := self._rows.row_bytes:
            per_site = max(self._capture.decoded_bytes, self._payload, row_bytes)
            site_count = max(1, min(len(self._capture.sites), chunk_bytes // per_site))
            most = max(1, chunk_bytes // (per_site * site_count))
            taken = self._rows.take(self._rows.cut(frontier, min(most, _CHUNK_POSITIONS)))
            if not taken:
                return
            held = common({id(one.positions): one.positions for one in taken.values()}.values())
            positions = self._selected(held, generated)
            if not len(positions):
                continue
            columns = [taken[index] for index in self._site_indices]
            if any(len(one.positions) != len(positions) for one in taken.values()):
                columns = [one.at(positions) for one in columns]
            parts = [
                SiteRows(site, column.data, column.made)
                for site, column in zip(self._capture.sites, columns, strict=True)
            ]
            self.delivered = joined(self.delivered, runs(positions))
            for lowest in range(0, len(parts), site_count):
                some = parts[lowest : lowest + site_count]
                yield Block(
                    self._number,
                    tuple(part.site for part in some),
                    positions,
                    tuple(some),
                    self._held,
                    self._capture,
                )

    def _selected(self, positions: Positions, generated: Sequence[int]) -> Positions:
        """Those of some positions whose token is selected."""
        if not self._capture.selection.conditions or not len(positions):
            return positions
        first, past = int(positions[0]), int(positions[-1]) + 1
        held = self._capture.selection.held(self._prompt_len, generated, first, past)
        return positions[_within(positions, held)]


def _within(positions: Positions, spans: Spans) -> npt.NDArray[np.bool_]:
    """Which of some positions lie in spans."""
    starts, ends = edges(spans)
    return np.searchsorted(starts, positions, side="right") > np.searchsorted(
        ends, positions, side="right"
    )


def wire_runs(spans: Spans) -> list[types_pb2.PositionRun]:
    """Spans as messages."""
    return [types_pb2.PositionRun(start=start, count=end - start) for start, end in spans]


def add_runs(add: Callable[[], types_pb2.PositionRun], spans: Spans) -> None:
    """Adds spans to a message's field, in which `add` makes one: five times quicker than a list."""
    for start, end in spans:
        run = add()
        run.start, run.count = start, end - start


def write_labels(
    message: capture_pb2.Captured,
    block: Block,
    sample: int,
    token_ids: Sequence[int],
    *,
    baseline: bool = False,
) -> None:
    """Says in an empty message which rows a block holds.

    Args:
        message: the message, without its tensor.
        block: the rows.
        sample: which sample they are of.
        token_ids: the input tokens at its positions.
        baseline: whether they are of its baseline.
    """
    if block.capture_index:
        message.capture_index = block.capture_index
    if sample:
        message.sample = sample
    if baseline:
        message.baseline = True
    for site in block.sites:
        write_site(message.sites.add(), site)
    add_runs(message.positions.add, runs(block.positions))
    message.token_ids.extend(token_ids)


def to_captured(
    block: Block, sample: int, token_ids: Sequence[int], *, baseline: bool = False
) -> capture_pb2.Captured:
    """The message of a block; see `write_labels`."""
    message = capture_pb2.Captured()
    write_labels(message, block, sample, token_ids, baseline=baseline)
    message.tensor.CopyFrom(block.encoded())
    return message
