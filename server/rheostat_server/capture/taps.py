"""A request's rows on their way to one reader.

Invariants: the model never waits for a reader. A tap's end comes after all of its rows, and exactly
once.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from rheostat_engine import OPEN_END, Released, Rows
from rheostat_server.capture.lanes import Lane
from rheostat_server.capture.leaving import Chunk, End, Item, Loss, Track
from rheostat_server.capture.reservoir import Reservoir
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.spans import length
from rheostat_server.tensors import FloatType
from rheostat_wire.v1 import capture_pb2, types_pb2

_ENDED_BYTES = 2048
_TAP_BYTES = 4096
_TOKEN_BYTES = 40
"""What a tap weighs of which everything has left, another one, and each token that this knows."""


class Tap:
    """One request's rows for one reader."""

    def __init__(
        self,
        request_id: str,
        prompt: Sequence[int],
        captures: Mapping[int, ResolvedCapture],
        held: FloatType,
        policy: capture_pb2.Overload.ValueType,
        reservoir: Reservoir,
        on_closed: Callable[["Tap"], None] = lambda _: None,
    ) -> None:
        """A tap through which nothing has come.

        Args:
            request_id: the request.
            prompt: its tokens.
            captures: what the reader wants of it, by number.
            held: element type in which rows come.
            policy: what happens where there is no room.
            reservoir: where rows wait.
            on_closed: hears once when nothing more enters.
        """
        self.request_id = request_id
        self.policy = policy
        self.captures = captures
        self.finish_reasons: Sequence[types_pb2.FinishReason.ValueType] = ()
        self.closed = False
        """Whether nothing more enters."""
        self.discarded = False
        """Whether nothing leaves any more either."""
        self.missed = ""
        """Why the reader gets nothing of what it observes; empty: it gets that."""
        self.given_up = 0
        """Rows that found no room, and of which the reader was not told yet."""
        self._prompt = prompt
        self._held = held
        self._reservoir = reservoir
        self._on_closed = on_closed
        self._lanes: dict[Track, Lane] = {}
        self.joined: dict[Track, int | None] = {}
        """Tracks that ran before, and the first position of each that is wanted, once known."""
        self._ended = False
        self._counts: Mapping[int, tuple[int, int]] | None = None
        """What `counts` says, once nothing changes it any more."""
        self._refused: frozenset[int] = frozenset()
        reservoir.deliveries.feeds += 1

    @property
    def weight(self) -> int:
        """Bytes that it takes beside its rows, about."""
        if self._counts is not None:
            return _ENDED_BYTES
        tokens = sum(len(lane.tokens) for lane in self._lanes.values())
        return _TAP_BYTES + _TOKEN_BYTES * (len(self._prompt) + tokens)

    def join(self, track: Track, token_ids: Sequence[int]) -> None:
        """Takes up a track that has generated some tokens. Its rows wait until `begin`."""
        self._lane(track).join(token_ids)
        self.joined[track] = None

    def begin(self, track: Track, first: int) -> None:
        """Of a track that has joined, positions from `first` on are wanted; `OPEN_END`: none."""
        early = self._lane(track).begin(first)
        self.joined[track] = None if first == OPEN_END else first
        for rows in early:
            self.feed(track, rows)

    def extend(self, track: Track, token_ids: Sequence[int]) -> None:
        """Takes tokens that were generated; rows before them may leave."""
        if token_ids and self._takes(track):
            self._lane(track).tokens += token_ids
            if not self.closed:
                self._reservoir.touch_later(self)

    def feed(self, track: Track, rows: Rows) -> None:
        """Takes rows, or loses them."""
        if self.closed:
            return
        lane = self._lanes.get(track)
        if lane is None:
            if not self._takes(track):
                return
            lane = self._lane(track)
        pieces = lane.feed(rows)
        self._reservoir.admit(self, lane, pieces, rows.positions)
        if lane.leave_soon(pieces):
            self._reservoir.touch_later(self)

    def release(self, track: Track, released: Released) -> None:
        """Takes what the engine says of a track that has ended."""
        if not self._takes(track):
            return
        self._lane(track).release(released)
        if not self.closed:
            self._reservoir.touch(self)

    def refuse(self, numbers: Collection[int]) -> None:
        """Nothing of these captures comes, since the engine has no room: all of it is lost.

        To be said before anything comes.
        """
        self._refused = frozenset(numbers)
        for lane in self._lanes.values():
            lane.refuse(self._refused)

    def close(self, reasons: Sequence[types_pb2.FinishReason.ValueType] = ()) -> None:
        """Nothing more enters; what waits leaves, then the end."""
        if not self.closed:
            self.closed = True
            self._reservoir.deliveries.feeds -= 1
            self.finish_reasons = reasons
            for lane in self._lanes.values():
                lane.close()
            self._reservoir.touch(self)
            self._on_closed(self)

    def discard(self) -> None:
        """Loses all that waits; nothing leaves any more, not even the end."""
        told = self.closed
        if not told:
            self._reservoir.deliveries.feeds -= 1
        self.closed = self.discarded = self._ended = True
        self._reservoir.forget(self)
        for lane in self._lanes.values():
            lane.discard()
        if not told:
            self._on_closed(self)

    def counts(self) -> Mapping[int, tuple[int, int]]:
        """Of the request's own samples: positions handed over and lost, by capture."""
        if self._counts is not None:
            return self._counts
        own = [lane for track, lane in self._lanes.items() if not track.baseline]
        found = {}
        for number in self.captures:
            each = [lane.counts(number) for lane in own]
            found[number] = (sum(kept for kept, _ in each), sum(lost for _, lost in each))
        return found

    def pull(self) -> Iterator[Item]:
        """What can leave."""
        last = self.closed  # it may be closed while what leaves is pulled; then more is pulled
        for track, lane in list(self._lanes.items()):
            for block, token_ids in lane.blocks(self._reservoir.chunk_bytes, last=last):
                yield Chunk(self, track, block, token_ids)
            for number, positions in lane.losses(last=last):
                rows = length(positions) * len(self.captures[number].sites)
                yield Loss(self, track, number, positions, rows)
        if last and not self._ended:
            self._ended = True
            for lane in self._lanes.values():
                lane.discard()  # rows of steps that ran on after the last token
            if self.finish_reasons:
                self._forget()
            yield End(self)

    def _forget(self) -> None:
        """The request has ended, and everything of it has left."""
        self._counts = self.counts()
        self._lanes.clear()
        self._prompt = ()

    def _takes(self, track: Track) -> bool:
        """Whether a track is wanted: of a request that ran before, only those that were joined."""
        return not self.joined or track in self.joined

    def _lane(self, track: Track) -> Lane:
        lane = self._lanes.get(track)
        if lane is None:
            lane = self._lanes[track] = Lane(
                self._prompt, self.captures, self._refused, self._held, self._reservoir.meter
            )
            if self.closed:
                lane.close()
        return lane
