"""A request's rows on their way to one reader.

Invariants: the model never waits for a reader. A tap's end comes after all of its rows, and exactly
once.
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
_TAP_BYTES = 4096
_TOKEN_BYTES = 40
"""What a tap weighs of which everything has left, another one, and each token that this knows."""


class RowFeed(ItemSource):
    """One request's rows for one reader."""

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        captures: Mapping[int, ResolvedCapture],
        held: FloatType,
        policy: capture_pb2.Overload.ValueType,
        buffer: DeliveryBuffer,
        on_closed: Callable[["RowFeed"], None] = lambda _: None,
    ) -> None:
        """A tap through which nothing has come.

        Args:
            request_id: the request.
            prompt: its tokens.
            captures: what the reader wants of it, by number.
            held: element type in which rows come.
            policy: what happens where there is no room.
            buffer: where rows wait.
            on_closed: hears once when nothing more enters.
        """
        super().__init__(request_id, policy)
        self.captures = captures
        self.closed = False
        """Whether nothing more enters."""
        self.discarded = False
        """Whether nothing leaves any more either."""
        self._prompt = prompt
        self._held = held
        self._buffer = buffer
        self._on_closed = on_closed
        self._rows_by_sequence: dict[SequenceKey, SequenceRows] = {}
        self._ended = False
        self._counts: Mapping[int, tuple[int, int]] | None = None
        """What `counts` says, once nothing changes it any more."""
        self._refused: frozenset[int] = frozenset()

    @property
    def weight(self) -> int:
        """Bytes that it takes beside its rows, about."""
        if self._counts is not None:
            return _ENDED_BYTES
        tokens = sum(len(sequence_rows.tokens) for sequence_rows in self._rows_by_sequence.values())
        return _TAP_BYTES + _TOKEN_BYTES * (len(self._prompt) + tokens)

    def join(self, track: SequenceKey, token_ids: Sequence[int]) -> None:
        """Takes up a track that has generated some tokens. Its rows wait until `begin`."""
        self._sequence_rows(track).join(token_ids)
        self.first_positions[track] = None

    def begin(self, track: SequenceKey, first: int) -> None:
        """Of a track that has joined, positions from `first` on are wanted; `OPEN_END`: none."""
        early = self._sequence_rows(track).begin(first)
        self.first_positions[track] = None if first == OPEN_END else first
        for rows in early:
            self.add(track, rows)

    def extend(self, track: SequenceKey, token_ids: Sequence[int]) -> None:
        """Takes tokens that were generated; rows before them may leave."""
        sequence_rows = self._rows_by_sequence.get(track)
        if sequence_rows is None:
            if not token_ids or not self._takes(track):
                return
            sequence_rows = self._sequence_rows(track)
        sequence_rows.tokens += token_ids
        if sequence_rows.waits and not self.closed:
            self._buffer.touch(self)

    def add(self, track: SequenceKey, rows: Rows) -> None:
        """Takes rows, or loses them."""
        if self.closed:
            return
        sequence_rows = self._rows_by_sequence.get(track)
        if sequence_rows is None:
            if not self._takes(track):
                return
            sequence_rows = self._sequence_rows(track)
        pieces = sequence_rows.add(rows)
        self._buffer.admit(self, sequence_rows, pieces, rows.positions)
        if sequence_rows.leave_before_token(pieces):
            self._buffer.touch(self)

    def release(self, track: SequenceKey, released: Released) -> None:
        """Takes what the engine says of a track that has ended."""
        if not self._takes(track):
            return
        self._sequence_rows(track).release(released)
        if not self.closed:
            self._buffer.touch(self)

    def refuse(self, numbers: Collection[int]) -> None:
        """Nothing of these captures comes, since the engine has no room: all of it is lost.

        To be said before anything comes.
        """
        self._refused = frozenset(numbers)
        for sequence_rows in self._rows_by_sequence.values():
            sequence_rows.refuse(self._refused)

    def close(self, reasons: Sequence[types_pb2.FinishReason.ValueType] = ()) -> None:
        """Nothing more enters; what waits leaves, then the end."""
        if not self.closed:
            self.closed = True
            self.finish_reasons = reasons
            for sequence_rows in self._rows_by_sequence.values():
                sequence_rows.close()
            self._buffer.touch(self)
            self._on_closed(self)

    def discard(self) -> None:
        """Loses all that waits; nothing leaves any more, not even the end."""
        was_closed = self.closed
        self.closed = self.discarded = self._ended = True
        self._buffer.forget(self)
        for sequence_rows in self._rows_by_sequence.values():
            sequence_rows.discard()
        if not was_closed:
            self._on_closed(self)

    def counts(self) -> Mapping[int, tuple[int, int]]:
        """Of the request's own samples: positions handed over and lost, by capture."""
        if self._counts is not None:
            return self._counts
        own = [
            sequence_rows
            for track, sequence_rows in self._rows_by_sequence.items()
            if not track.baseline
        ]
        found = {}
        for number in self.captures:
            each = [sequence_rows.counts(number) for sequence_rows in own]
            found[number] = (sum(kept for kept, _ in each), sum(lost for _, lost in each))
        return found

    def pull(self) -> Iterator[DeliveryItem]:
        """What can leave."""
        last = self.closed  # it may be closed while what leaves is pulled; then more is pulled
        for track, sequence_rows in list(self._rows_by_sequence.items()):
            for block, token_ids in sequence_rows.blocks(self._buffer.chunk_bytes, last=last):
                yield Chunk(self, track, block, token_ids)
            for number, positions in sequence_rows.losses(last=last):
                rows = length(positions) * len(self.captures[number].sites)
                yield Loss(self, track, number, positions, rows)
            sequence_rows.note_pulled()
        if last and not self._ended:
            self._ended = True
            for sequence_rows in self._rows_by_sequence.values():
                sequence_rows.discard()  # rows of steps that ran on after the last token
            if self.finish_reasons:
                self._forget()
            yield End(self)

    def _forget(self) -> None:
        """The request has ended, and everything of it has left."""
        self._counts = self.counts()
        self._rows_by_sequence.clear()
        self._prompt = ()

    def _takes(self, track: SequenceKey) -> bool:
        """Whether a track is wanted: of a request that ran before, only those that were joined."""
        return not self.first_positions or track in self.first_positions

    def _sequence_rows(self, track: SequenceKey) -> SequenceRows:
        sequence_rows = self._rows_by_sequence.get(track)
        if sequence_rows is None:
            sequence_rows = self._rows_by_sequence[track] = SequenceRows(
                self._prompt, self.captures, self._refused, self._held, self._buffer.byte_counter
            )
            if self.closed:
                sequence_rows.close()
        return sequence_rows
