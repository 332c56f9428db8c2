"""A request's rows on their way to one reader.

Invariants: the model never waits for a reader. A feed's end comes once, after all of its rows.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from rheostat_engine import OPEN_END, Released, Rows
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.delivery.delivery_buffer import DeliveryBuffer
from rheostat_server.delivery.items import Chunk, DeliveryItem, End, ItemSource, Loss, SequenceKey
from rheostat_server.delivery.sequence_rows import SequenceRows
from rheostat_server.selectors.spans import length
from rheostat_server.tensors import FloatType
from rheostat_wire.v1 import capture_pb2, types_pb2

_ENDED_BYTES = 2048
"""Approximate memory of a feed whose items have all left."""
_FEED_BYTES = 4096
_TOKEN_BYTES = 40
"""Approximate memory of any other feed, and of each of its tokens."""


class RowFeed(ItemSource):
    """One request's rows for one reader."""

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        captures: Mapping[int, ResolvedCapture],
        row_type: FloatType,
        policy: capture_pb2.Overload.ValueType,
        buffer: DeliveryBuffer,
        on_closed: Callable[["RowFeed"], None] = lambda _: None,
    ) -> None:
        """No rows have come.

        Args:
            request_id: the request.
            prompt: its tokens.
            captures: the reader's captures of the request, by number.
            row_type: element type of the rows from the engine.
            policy: the overload policy.
            buffer: stores waiting rows.
            on_closed: called once when the feed takes no more rows.
        """
        super().__init__(request_id, policy)
        self.captures = captures
        self.closed = False
        """Whether nothing more enters."""
        self.discarded = False
        """Whether nothing leaves any more either."""
        self._prompt = prompt
        self._row_type = row_type
        self._buffer = buffer
        self._on_closed = on_closed
        self._rows_by_sequence: dict[SequenceKey, SequenceRows] = {}
        self._ended = False
        self._counts: Mapping[int, tuple[int, int]] | None = None
        """The final result of `counts`; None until all items have left."""
        self._refused: frozenset[int] = frozenset()

    @property
    def weight(self) -> int:
        """Approximate bytes of memory beside the rows."""
        if self._counts is not None:
            return _ENDED_BYTES
        tokens = sum(len(sequence_rows.tokens) for sequence_rows in self._rows_by_sequence.values())
        return _FEED_BYTES + _TOKEN_BYTES * (len(self._prompt) + tokens)

    def attach(self, sequence_key: SequenceKey, token_ids: Sequence[int]) -> None:
        """Attaches a sequence that has generated some tokens. Its rows wait until `begin`."""
        self._sequence_rows(sequence_key).attach(token_ids)
        self.first_positions[sequence_key] = None

    def begin(self, sequence_key: SequenceKey, first: int) -> None:
        """Captures an attached sequence from position `first` on; `OPEN_END`: not at all."""
        early = self._sequence_rows(sequence_key).begin(first)
        self.first_positions[sequence_key] = None if first == OPEN_END else first
        for rows in early:
            self.add(sequence_key, rows)

    def extend(self, sequence_key: SequenceKey, token_ids: Sequence[int]) -> None:
        """Adds generated tokens. Rows at positions before them may leave."""
        sequence_rows = self._rows_by_sequence.get(sequence_key)
        if sequence_rows is None:
            if not token_ids or not self._takes(sequence_key):
                return
            sequence_rows = self._sequence_rows(sequence_key)
        sequence_rows.tokens += token_ids
        if sequence_rows.token_lets_leave and not self.closed:
            self._buffer.touch(self)

    def reach(self, sequence_key: SequenceKey, end: int) -> None:
        """Takes note that the rows before a position were computed, whatever token comes next."""
        if self._takes(sequence_key):
            self._sequence_rows(sequence_key).reach(end)
            if not self.closed:
                self._buffer.touch(self)

    def add(self, sequence_key: SequenceKey, rows: Rows) -> None:
        """Adds rows, or counts them as lost if there is no room."""
        if self.closed:
            return
        sequence_rows = self._rows_by_sequence.get(sequence_key)
        if sequence_rows is None:
            if not self._takes(sequence_key):
                return
            sequence_rows = self._sequence_rows(sequence_key)
        batches = sequence_rows.add(rows)
        self._buffer.admit(self, sequence_rows, batches, rows.positions)
        if sequence_rows.leave_before_token(batches):
            self._buffer.touch(self)

    def release(self, sequence_key: SequenceKey, released: Released) -> None:
        """Handles the engine's last report about a sequence."""
        if not self._takes(sequence_key):
            return
        self._sequence_rows(sequence_key).release(released)
        if not self.closed:
            self._buffer.touch(self)

    def refuse(self, numbers: Collection[int]) -> None:
        """Counts all rows of these captures as lost, because the engine has no room for them.

        It must be called before the first rows come.
        """
        self._refused = frozenset(numbers)
        for sequence_rows in self._rows_by_sequence.values():
            sequence_rows.refuse(self._refused)

    def close(self, reasons: Sequence[types_pb2.FinishReason.ValueType] = ()) -> None:
        """Takes no more rows. Waiting rows leave, then the end."""
        if not self.closed:
            self.closed = True
            self.finish_reasons = reasons
            for sequence_rows in self._rows_by_sequence.values():
                sequence_rows.close()
            self._buffer.touch(self)
            self._report_closed()

    def discard(self) -> None:
        """Drops all waiting rows. Nothing leaves any more, not even the end."""
        was_closed = self.closed
        self.closed = self.discarded = self._ended = True
        self._buffer.remove(self)
        for sequence_rows in self._rows_by_sequence.values():
            sequence_rows.discard()
        if not was_closed:
            self._report_closed()

    def _report_closed(self) -> None:
        self._on_closed(self)
        self._on_closed = lambda _: None  # it refers to the reader, which may refer to this feed

    def counts(self) -> Mapping[int, tuple[int, int]]:
        """Positions of the request's samples, without baselines: delivered and lost, by capture."""
        if self._counts is not None:
            return self._counts
        own = [
            sequence_rows
            for sequence_key, sequence_rows in self._rows_by_sequence.items()
            if not sequence_key.baseline
        ]
        counts = {}
        for number in self.captures:
            each = [sequence_rows.counts(number) for sequence_rows in own]
            counts[number] = (sum(kept for kept, _ in each), sum(lost for _, lost in each))
        return counts

    def pull(self) -> Iterator[DeliveryItem]:
        """Removes and yields the items that can leave."""
        last = self.closed  # it may be closed while what leaves is pulled; then more is pulled
        for sequence_key, sequence_rows in list(self._rows_by_sequence.items()):
            for block, token_ids in sequence_rows.blocks(self._buffer.chunk_bytes, last=last):
                yield Chunk(self, sequence_key, block, token_ids)
            for number, positions in sequence_rows.losses(last=last):
                rows = length(positions) * len(self.captures[number].sites)
                yield Loss(self, sequence_key, number, positions, rows)
            sequence_rows.note_pulled()
        if last and not self._ended:
            self._ended = True
            for sequence_rows in self._rows_by_sequence.values():
                sequence_rows.discard()  # rows of steps that ran on after the last token
            if self.finish_reasons:
                self._free_memory()
            yield End(self)

    def _free_memory(self) -> None:
        """Frees the memory of a request whose items have all left."""
        self._counts = self.counts()
        self._rows_by_sequence.clear()
        self._prompt = ()

    def _takes(self, sequence_key: SequenceKey) -> bool:
        """Whether the reader gets rows of a sequence: of all, or of attached ones alone."""
        return not self.first_positions or sequence_key in self.first_positions

    def _sequence_rows(self, sequence_key: SequenceKey) -> SequenceRows:
        sequence_rows = self._rows_by_sequence.get(sequence_key)
        if sequence_rows is None:
            sequence_rows = self._rows_by_sequence[sequence_key] = SequenceRows(
                self._prompt,
                self.captures,
                self._refused,
                self._row_type,
                self._buffer.byte_counter,
            )
            if self.closed:
                sequence_rows.close()
        return sequence_rows
