"""Assembles the rows of one sample for a reader: joined over sites, labelled, cut into chunks.

Invariants
    Per capture and site each position comes once, ascending. All sites of a chunk have the same
    positions. A position that one site has lost is lost at all sites. Rows of a site come raw or
    encoded by the device, and a block holds one or the other.
Why rows wait for tokens
    The last sampled token has no row, so a row leaves only when the token after it is known.
Selection by token id
    The engine copies rows by position alone. Rows of other generated tokens are removed here.
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
    """Element type of raw rows."""
    capture: ResolvedCapture
    """Says how they are projected and encoded."""

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
        """Bytes that their encoding reads; see `offload`."""
        return encoding_work(self.parts, self.capture)

    def encoded(self) -> tensor_pb2.Tensor:
        """The rows as they travel, [sites, positions, width]."""
        return tensor_of(self.parts, self.capture, self.held)


class RowAssembler:
    """The waiting rows of one sample, by capture."""

    def __init__(
        self,
        captures: Mapping[int, ResolvedCapture],
        held: FloatType,
        prompt_len: int,
        byte_counter: ByteCounter | None = None,
    ) -> None:
        """No rows wait.

        Args:
            captures: the reader's captures, by number.
            held: element type of raw rows.
            prompt_len: P.
            byte_counter: counts waiting rows.
        """
        byte_counter = byte_counter or ByteCounter()
        self._specs = {
            number: _CaptureRows(number, capture, held, prompt_len, byte_counter)
            for number, capture in captures.items()
        }

    def add(self, rows: Rows) -> list[RowBatch]:
        """Adds rows; returns the batches that hold them."""
        if len(self._specs) == 1:
            (only,) = self._specs.values()
            return only.add(rows)
        return [batch for spec in self._specs.values() for batch in spec.add(rows)]

    def drop(self, numbers: Collection[int]) -> None:
        """Drops the waiting rows of these captures, and takes no more."""
        for number in numbers:
            spec = self._specs.pop(number, None)
            if spec is not None:
                spec.discard()

    def discard(self) -> None:
        """Drops all waiting rows."""
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
            end: one past the last position before a known token.
            last: whether no more rows come, so that rows that a site lost are not awaited.
            chunk_bytes: the largest block, approximately.
        """
        for spec in self._specs.values():
            yield from spec.ready(generated, end, last=last, chunk_bytes=chunk_bytes)

    @property
    def waits(self) -> bool:
        """Whether rows wait."""
        return any(spec.waits for spec in self._specs.values())

    def lost(self, spec: int, selected: Spans) -> Spans:
        """The `selected` positions that neither left nor wait at all sites."""
        if not selected:
            return ()
        one = self._specs[spec]
        given = clipped(one.delivered, selected[0][0], selected[-1][1])
        if given == selected:
            return ()
        return subtracted(selected, united((*given, *one.waiting)))

    def frontier(self, spec: int) -> int:
        """One past the last position that has come at all sites of a capture."""
        return self._specs[spec].frontier


class _SiteMatch(NamedTuple):
    """The sites of an event that a capture takes."""

    of: tuple[int, ...]
    """The event's sites."""
    encoding: bytes
    """The key of the event's encoding."""
    sites: tuple[int, ...]
    """The sites that are taken."""
    at: tuple[int, ...]
    """Their indices in the event."""


class _CaptureRows:
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
        """Position from which on every row is taken; None if the spans decide."""
        self._keys = {
            index: form.key
            for index, forms in (capture.forms.items() if capture.row_encodings else ())
            for form in forms
            if form is not None and len(forms) == 1
        }
        self._indices = frozenset(capture.indices)
        self._site_indices = [site.index for site in capture.sites]
        self._site_match: _SiteMatch | None = None
        """The match of the last event, because the next event mostly has the same sites."""
        self._payload = capture.form.row_bytes(capture.numbers, capture.kind)
        """The most bytes of a row in a message."""
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
        mine = self._site_match
        if mine is None or rows.sites != mine.of or rows.encoding != mine.encoding:
            mine = self._site_match = self._match(rows)
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

    def _match(self, rows: Rows) -> _SiteMatch:
        """The sites of an event that this capture takes."""
        mine = [
            (index, site)
            for index, site in enumerate(rows.sites)
            if site in self._indices
            # Rows may be encoded for other captures, which were there before this one.
            and (not rows.encoding or rows.encoding == self._keys.get(site))
        ]
        sites, at = tuple(site for _, site in mine), tuple(index for index, _ in mine)
        return _SiteMatch(rows.sites, rows.encoding, sites, at)

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
        """The positions whose tokens are selected."""
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
    """Adds spans to a message's field with its `add`, five times quicker than from a list."""
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
    """Writes the labels of a block's rows into an empty message.

    Args:
        message: the message, without its tensor.
        block: the rows.
        sample: the sample.
        token_ids: the input tokens at its positions.
        baseline: whether the rows are of the sample's baseline.
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
