"""A request's rows on their way to one reader, and the room in which they wait for it.

Invariants: the model never waits for a reader. What waits, with what the reader may ask for again,
stays within the room; rows that find none are lost only under a policy that says so, counted, and
reported in their place. A tap's end comes after all of its rows, and exactly once.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rheostat._proto.v1 import capture_pb2, types_pb2
from rheostat_engine import OPEN_END, Released, Rows, Spans
from rheostat_server.capture_specs import ResolvedCapture
from rheostat_server.capture_stream import Block, CaptureStream, Meter, Piece
from rheostat_server.errors import CaptureOverflow
from rheostat_server.spans import length, subtracted, united
from rheostat_server.tensors import FloatType

_TIDY = 1024
"""Pieces that are remembered at least before those that have left are forgotten."""


class Track(NamedTuple):
    """One of a request's sequences of tokens."""

    sample: int
    """Which sample."""
    baseline: bool
    """Whether it is the sample's baseline."""


class Chunk(NamedTuple):
    """Rows that leave."""

    tap: "Tap"
    track: Track
    block: Block
    token_ids: Sequence[int]
    """Input tokens at the block's positions."""


class Loss(NamedTuple):
    """Rows that are lost."""

    tap: "Tap"
    track: Track
    spec: int
    """Number of the capture."""
    positions: Spans
    """Where."""
    rows: int
    """How many: positions times sites."""


class End(NamedTuple):
    """Everything of a request has left."""

    tap: "Tap"


Item = Chunk | Loss | End


class Reservoir:
    """Room for rows that wait for one reader."""

    def __init__(self, limit: int, on_full: Callable[["Tap", CaptureOverflow], None]) -> None:
        """An empty one.

        Args:
            limit: bytes that may wait or be kept.
            on_full: hears of rows that find no room where none may be lost.
        """
        self.limit = limit
        self.kept = 0
        """Bytes of what has left and may be asked for again."""
        self.news = asyncio.Event()
        """Set when there is something to pull."""
        self.meter = Meter()
        self._on_full = on_full
        self._pieces: deque[tuple[Piece, Tap, _Lane]] = deque()
        self._tidy_at = _TIDY
        self._taps: dict[Tap, None] = {}

    @property
    def used(self) -> int:
        """Bytes that wait or are kept."""
        return self.meter.bytes + self.kept

    def touch(self, tap: "Tap") -> None:
        """A tap has news."""
        self._taps[tap] = None
        self.news.set()

    def forget(self, tap: "Tap") -> None:
        """A tap's news are none any more."""
        self._taps.pop(tap, None)

    def pull(self) -> Iterator[Item]:
        """What can leave of the tap that has waited longest; nothing if none can."""
        while self._taps:
            tap = next(iter(self._taps))
            del self._taps[tap]
            found = False
            for item in tap.pull():
                found = True
                yield item
            if found:
                return
        self.news.clear()

    def admit(self, tap: "Tap", lane: "_Lane", pieces: Sequence[Piece]) -> None:
        """Lets rows wait, which count already, or loses them or older ones."""
        if tap.policy == capture_pb2.OVERLOAD_DROP_OLDEST:
            self._pieces.extend((piece, tap, lane) for piece in pieces)
            if len(self._pieces) > self._tidy_at:
                self._pieces = deque(one for one in self._pieces if len(one[0]))
                self._tidy_at = max(_TIDY, 2 * len(self._pieces))
            while self.used > self.limit and self._pieces:
                self._lose(*self._pieces.popleft())
        elif self.used > self.limit:
            error = CaptureOverflow(
                f"captured rows came faster than they were read: {self.limit} bytes wait or are "
                "not acknowledged. Read and acknowledge faster, capture less, or choose an "
                "overload policy that may lose rows",
                metadata={"rows": str(self.meter.rows)},
            )
            for piece in pieces:
                self._lose(piece, tap, lane)
            if tap.policy == capture_pb2.OVERLOAD_FAIL:
                self._on_full(tap, error)

    def _lose(self, piece: Piece, tap: "Tap", lane: "_Lane") -> None:
        if len(piece):
            lane.lose_from(int(piece.positions[0]))
            piece.give_up()
            self.touch(tap)


@dataclass
class _Lane:
    """The rows of one track."""

    stream: CaptureStream
    tokens: list[int] = field(default_factory=list)
    """Generated so far."""
    closed_at: int = 0
    """Tokens when the tap was closed, from which on nothing leaves any more."""
    released: Released | None = None
    lossy: int | None = None
    """First position from which rows may be missing that were not reported; None: none is."""
    reported: dict[int, Spans] = field(default_factory=dict)
    """Lost positions of each capture that were reported."""
    start: int = 0
    """First position that is wanted; `OPEN_END` while that is not known."""
    early: list[Rows] = field(default_factory=list)
    """Rows that came before that was known."""

    def lose_from(self, position: int) -> None:
        """Rows from a position on may be missing."""
        self.lossy = position if self.lossy is None else min(self.lossy, position)


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
    ) -> None:
        """A tap through which nothing has come.

        Args:
            request_id: the request.
            prompt: its tokens.
            captures: what the reader wants of it, by number.
            held: element type in which rows come.
            policy: what happens where there is no room.
            reservoir: where rows wait.
        """
        self.request_id = request_id
        self.policy = policy
        self.captures = captures
        self.finish_reasons: Sequence[types_pb2.FinishReason.ValueType] = ()
        self.closed = False
        """Whether nothing more enters."""
        self._prompt = prompt
        self._held = held
        self._reservoir = reservoir
        self._lanes: dict[Track, _Lane] = {}
        self.joined: dict[Track, int | None] = {}
        """Tracks that ran before, and the first position of each that is wanted, once known."""
        self._ended = False
        self._refused: frozenset[int] = frozenset()

    def join(self, track: Track, token_ids: Sequence[int]) -> None:
        """Takes up a track that has generated some tokens. Its rows wait until `begin`."""
        lane = self._lane(track)
        lane.start = OPEN_END
        lane.tokens += token_ids
        self.joined[track] = None

    def begin(self, track: Track, first: int) -> None:
        """Of a track that has joined, positions from `first` on are wanted; `OPEN_END`: none."""
        lane = self._lane(track)
        lane.start = first
        self.joined[track] = None if first == OPEN_END else first
        early, lane.early = lane.early, []
        for rows in early:
            self.feed(track, rows)

    def extend(self, track: Track, token_ids: Sequence[int]) -> None:
        """Takes tokens that were generated; rows before them may leave."""
        if token_ids:
            self._lane(track).tokens += token_ids
            if not self.closed:
                self._reservoir.touch(self)

    def feed(self, track: Track, rows: Rows) -> None:
        """Takes rows of one site, or loses them."""
        if self.closed:
            return
        lane = self._lane(track)
        if lane.start == OPEN_END:
            lane.early.append(rows)
            return
        if rows.positions[0] < lane.start:
            kept = rows.positions >= lane.start
            rows = replace(rows, positions=rows.positions[kept], data=rows.data[kept])
        pieces = lane.stream.feed(rows)
        self._reservoir.admit(self, lane, pieces)
        if any(
            len(piece) and piece.positions[0] < self._row_end(len(lane.tokens)) for piece in pieces
        ):
            self._reservoir.touch(self)

    def release(self, track: Track, released: Released) -> None:
        """Takes what the engine says of a track that has ended."""
        lane = self._lane(track)
        lane.released = released
        if released.lost_rows:
            lane.lose_from(0)
        if not self.closed:
            self._reservoir.touch(self)

    def refuse(self, numbers: Collection[int]) -> None:
        """Nothing of these captures comes, since the engine has no room: all of it is lost.

        To be said before anything comes.
        """
        self._refused = frozenset(numbers)

    def close(self, reasons: Sequence[types_pb2.FinishReason.ValueType] = ()) -> None:
        """Nothing more enters; what waits leaves, then the end."""
        if not self.closed:
            self.closed = True
            self.finish_reasons = reasons
            for lane in self._lanes.values():
                lane.closed_at = len(lane.tokens)
                lane.early.clear()
            self._reservoir.touch(self)

    def discard(self) -> None:
        """Loses all that waits; nothing leaves any more, not even the end."""
        self.closed = self._ended = True
        self._reservoir.forget(self)
        for lane in self._lanes.values():
            lane.stream.discard()

    def counts(self) -> Mapping[int, tuple[int, int]]:
        """Of the request's own samples: positions handed over and lost, by capture."""
        found = {}
        for number, capture in self.captures.items():
            kept = lost = 0
            for track, lane in self._lanes.items():
                if not track.baseline:
                    end = self._computed(lane, number, len(lane.tokens))
                    selected = self._selected(lane, capture, end)
                    gone = length(self._missing(lane, number, selected))
                    kept, lost = kept + length(selected) - gone, lost + gone
            found[number] = (kept, lost)
        return found

    def pull(self) -> Iterator[Item]:
        """What can leave."""
        last = self.closed  # it may be closed while what leaves is pulled; then more is pulled
        for track, lane in list(self._lanes.items()):
            count = lane.closed_at if last else len(lane.tokens)
            for block in lane.stream.ready(lane.tokens, self._row_end(count), last=last):
                at = block.positions.tolist()
                yield Chunk(self, track, block, self._token_ids(lane, at))
            if lane.lossy is not None or last or self._refused:
                yield from self._losses(track, lane, 0 if last else lane.lossy or 0, count)
        if last and not self._ended:
            self._ended = True
            for lane in self._lanes.values():
                lane.stream.discard()  # rows of steps that ran on after the last token
            yield End(self)

    def _lane(self, track: Track) -> _Lane:
        lane = self._lanes.get(track)
        if lane is None:
            wanted = {n: one for n, one in self.captures.items() if n not in self._refused}
            stream = CaptureStream(wanted, self._held, len(self._prompt), self._reservoir.meter)
            lane = self._lanes[track] = _Lane(stream)
        return lane

    def _losses(self, track: Track, lane: _Lane, start: int, tokens: int) -> Iterator[Loss]:
        """What was lost from a position on, as far as so many tokens let that be known."""
        known = None
        for number, capture in self.captures.items():
            end = self._computed(lane, number, tokens)
            known = end if known is None else min(known, end)
            selected = self._selected(lane, capture, end, start)
            reported = lane.reported.get(number, ())
            lost = subtracted(self._missing(lane, number, selected), reported)
            if lost:
                lane.reported[number] = united((*reported, *lost))
                yield Loss(self, track, number, lost, length(lost) * len(capture.sites))

        if lane.lossy is not None and known is not None:
            lane.lossy = max(lane.lossy, known)

    def _missing(self, lane: _Lane, number: int, selected: Spans) -> Spans:
        return selected if number in self._refused else lane.stream.lost(number, selected)

    def _selected(self, lane: _Lane, capture: ResolvedCapture, end: int, start: int = 0) -> Spans:
        start = max(start, lane.start)
        if start >= end:
            return ()
        return capture.selection.held(len(self._prompt), lane.tokens, start, end)

    def _row_end(self, tokens: int) -> int:
        """One past the last position that is known to have a row after so many tokens."""
        return max(0, len(self._prompt) + tokens - 1)

    def _computed(self, lane: _Lane, number: int, tokens: int) -> int:
        """One past the last position whose row has come by then, or has been lost."""
        if number in self._refused:
            return self._row_end(tokens)
        if lane.released is not None:
            return min(self._row_end(tokens), lane.released.computed[1])
        return min(self._row_end(tokens), lane.stream.frontier(number))

    def _token_ids(self, lane: _Lane, positions: Sequence[int]) -> list[int]:
        prompt, count = self._prompt, len(self._prompt)
        return [prompt[p] if p < count else lane.tokens[p - count] for p in positions]
