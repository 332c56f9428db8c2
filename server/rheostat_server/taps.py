"""A request's rows on their way to one reader, and the room in which they wait for it.

Invariants: the model never waits for a reader. What waits, with what the reader may ask for again,
stays within the room; rows that find none are lost only under a policy that says so, counted, and
reported in their place. A tap's end comes after all of its rows, and exactly once.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rheostat._proto.v1 import capture_pb2, types_pb2
from rheostat_engine import Released, Rows, Spans
from rheostat_server.capture_specs import ResolvedCapture
from rheostat_server.capture_stream import Block, CaptureStream, Meter, Piece
from rheostat_server.errors import CaptureOverflow
from rheostat_server.spans import length, subtracted, united
from rheostat_server.tensors import FloatType


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
            while self._pieces and not len(self._pieces[0][0]):
                self._pieces.popleft()
            self._pieces.extend((piece, tap, lane) for piece in pieces)
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

    def refuse(self, tap: "Tap") -> None:
        """The engine has no room for a tap's rows, none of which may be lost."""
        self._on_full(
            tap,
            CaptureOverflow(
                "the engine has no room for what is captured of a request. Capture fewer sites or "
                "tokens, raise the server's --capture-mib, or choose an overload policy that may "
                "lose rows"
            ),
        )

    def _lose(self, piece: Piece, tap: "Tap", lane: "_Lane") -> None:
        if len(piece):
            piece.give_up()
            lane.lossy = True
            self.touch(tap)


@dataclass
class _Lane:
    """The rows of one track."""

    stream: CaptureStream
    tokens: list[int] = field(default_factory=list)
    """Generated so far."""
    released: Released | None = None
    lossy: bool = False
    """Whether a row may be missing."""
    reported: dict[int, Spans] = field(default_factory=dict)
    """Lost positions of each capture that were reported."""


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
        self._ended = False
        self._refused: frozenset[int] = frozenset()

    def extend(self, track: Track, token_ids: Sequence[int]) -> None:
        """Takes tokens that were generated; rows before them may leave."""
        if not self.closed and token_ids:
            self._lane(track).tokens += token_ids
            self._reservoir.touch(self)

    def feed(self, track: Track, rows: Rows) -> None:
        """Takes rows of one site, or loses them."""
        if self.closed:
            return
        lane = self._lane(track)
        self._reservoir.admit(self, lane, lane.stream.feed(rows))

    def release(self, track: Track, released: Released) -> None:
        """Takes what the engine says of a track that has ended."""
        if not self.closed:
            lane = self._lane(track)
            lane.released = released
            lane.lossy |= released.lost_rows > 0
            self._reservoir.touch(self)

    def refuse(self, numbers: Collection[int]) -> None:
        """Nothing of these captures will come, since the engine has no room: all of it is lost."""
        self._refused = frozenset(numbers)
        if self.policy == capture_pb2.OVERLOAD_FAIL:
            self._reservoir.refuse(self)

    def close(self, reasons: Sequence[types_pb2.FinishReason.ValueType] = ()) -> None:
        """Nothing more enters; what waits leaves, then the end."""
        if not self.closed:
            self.closed = True
            self.finish_reasons = reasons
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
                    selected = self._selected(lane, capture, self._computed(lane, number))
                    gone = length(lane.stream.lost(number, selected))
                    kept, lost = kept + length(selected) - gone, lost + gone
            found[number] = (kept, lost)
        return found

    def pull(self) -> Iterator[Item]:
        """What can leave."""
        last = self.closed  # it may be closed while what leaves is pulled; then more is pulled
        for track, lane in list(self._lanes.items()):
            for block in lane.stream.ready(lane.tokens, self._row_end(lane), last=last):
                at = block.positions.tolist()
                yield Chunk(self, track, block, self._token_ids(lane, at))
            if lane.lossy or last:
                yield from self._losses(track, lane)
        if last and not self._ended:
            self._ended = True
            yield End(self)

    def _lane(self, track: Track) -> _Lane:
        lane = self._lanes.get(track)
        if lane is None:
            stream = CaptureStream(
                self.captures, self._held, len(self._prompt), self._reservoir.meter
            )
            lane = self._lanes[track] = _Lane(stream)
        return lane

    def _losses(self, track: Track, lane: _Lane) -> Iterator[Loss]:
        for number, capture in self.captures.items():
            selected = self._selected(lane, capture, self._computed(lane, number))
            reported = lane.reported.get(number, ())
            lost = subtracted(lane.stream.lost(number, selected), reported)
            if lost:
                lane.reported[number] = united((*reported, *lost))
                yield Loss(self, track, number, lost, length(lost) * len(capture.sites))

    def _selected(self, lane: _Lane, capture: ResolvedCapture, end: int) -> Spans:
        return capture.selection.held(len(self._prompt), lane.tokens, 0, end)

    def _row_end(self, lane: _Lane) -> int:
        """One past the last position whose row is known to be one."""
        return max(0, len(self._prompt) + len(lane.tokens) - 1)

    def _computed(self, lane: _Lane, number: int) -> int:
        """One past the last position whose row has come, or has been lost."""
        if number in self._refused:
            return self._row_end(lane)
        if lane.released is not None:
            return min(self._row_end(lane), lane.released.computed[1])
        return min(self._row_end(lane), lane.stream.frontier(number))

    def _token_ids(self, lane: _Lane, positions: Sequence[int]) -> list[int]:
        prompt, count = self._prompt, len(self._prompt)
        return [prompt[p] if p < count else lane.tokens[p - count] for p in positions]
