"""What waits for the reader of a response: tokens, events, answers to updates, word of rows.

Invariants: whatever concerns one sample comes out in the order in which it went in. Tokens that
wait merge into fewer messages, and each message has a bounded size. The waiting tokens count in
the memory of the request. When that is full the request fails, because tokens may not be lost.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from rheostat_engine import Event
from rheostat_server.capture.budget import Cost, Meter, Share
from rheostat_server.errors import ResponseOverflow, RheostatError
from rheostat_server.host import Delta, Ending
from rheostat_server.sequence import Life
from rheostat_wire.v1 import generation_pb2

_DELTA_BYTES = 256
"""Memory of a delta without its tokens, measured as the next three are."""

_TOKEN_BYTES = 40
"""Memory of a token id in a list."""

_READING_BYTES = 800
"""Memory of the log-probability of a token: a message with an arena of its own."""

_ALTERNATIVE_BYTES = 112
"""Memory that each alternative adds to it."""

_MESSAGE_BYTES = 1 << 20
"""Memory of the tokens that merge into one message. The message on the wire is smaller."""

Notice = generation_pb2.UpdateApplied | generation_pb2.UpdateRefused
"""What became of an update."""


class Item(NamedTuple):
    """Something that happened to a sample."""

    life: Life
    what: Delta | Event


class Sign(Enum):
    """Something that concerns no sample."""

    ROWS = "rows"
    """Captured rows can leave; see `Flight.inline`."""


class _Merged:
    """Deltas of a sample that will be one message."""

    __slots__ = ("_ending", "_first", "_logprobs", "_stop", "_texts", "_token_ids", "weight")

    def __init__(self, delta: Delta) -> None:
        """Begins with one delta."""
        self.weight = weight(delta)
        self._first = delta
        self._ending: Ending | None = None
        self._texts: list[str] = []
        """Empty until a second delta comes: with a quick reader none does."""

    def add(self, delta: Delta) -> bool:
        """Takes another delta; False: it must begin a message of its own."""
        heavier = self.weight + weight(delta) - _DELTA_BYTES
        first = self._first
        if heavier > _MESSAGE_BYTES or delta.prompt_logprobs:
            return False
        if not self._texts:
            if first.ending is not None:
                return False
            self._texts = [first.text]
            self._token_ids = [*first.token_ids]
            self._logprobs = [*first.logprobs]
        elif self._ending is not None:
            return False
        self.weight = heavier
        self._token_ids += delta.token_ids
        self._texts.append(delta.text)
        self._logprobs += delta.logprobs
        self._ending, self._stop = delta.ending, delta.stop
        return True

    def delta(self) -> Delta:
        """All deltas as one."""
        if not self._texts:
            return self._first
        return Delta(
            token_ids=tuple(self._token_ids),
            text="".join(self._texts),
            logprobs=self._logprobs,
            prompt_logprobs=self._first.prompt_logprobs,
            cached_tokens=self._first.cached_tokens,
            ending=self._ending,
            stop=self._stop,
        )


class WaitingDeltas:
    """The deltas of a sample that wait, merged."""

    def __init__(self, meter: Meter) -> None:
        """Nothing waits. `meter` counts the memory of the deltas that come."""
        self._meter = meter
        self._merged: deque[_Merged] = deque()
        self._sealed = True

    def add(self, delta: Delta) -> bool:
        """Adds a delta. Returns whether it begins a message of its own."""
        last = self._merged[-1] if self._merged and not self._sealed else None
        before = 0 if last is None else last.weight
        if last is not None and last.add(delta):
            self._meter.add_tokens(last.weight - before)
            return False
        self._merged.append(_Merged(delta))
        self._meter.add_tokens(self._merged[-1].weight)
        self._sealed = False
        return True

    def seal(self) -> None:
        """Makes the next delta begin a message of its own, because an event comes between."""
        self._sealed = True

    def take(self) -> Delta:
        """Removes and returns the first message."""
        merged = self._merged.popleft()
        self._meter.add_tokens(-merged.weight)
        return merged.delta()

    def take_all(self) -> Iterator[Delta]:
        """Removes every message and yields it, in order."""
        while self._merged:
            yield self.take()


class ResponseQueue:
    """The queue of one request. Lives on the event loop, and has one reader."""

    def __init__(self, share: Share, on_full: Callable[[ResponseOverflow], None]) -> None:
        """An empty queue.

        Args:
            share: the memory of the request.
            on_full: is called with an error when the waiting tokens exceed that memory.
        """
        self.meter = Meter(share.meter)
        """Counts the memory of tokens that wait, also of those that the reader holds back."""
        self._share = share
        self._on_full = on_full
        self._entries: deque[Life | Item | Notice | Sign | RheostatError] = deque()
        """A sample stands for the next message of its deltas."""
        self._deltas: dict[Life, WaitingDeltas] = {}
        self._news = asyncio.Event()
        share.add(self)

    @property
    def cost(self) -> Cost:
        """The request fails, because tokens may not be lost."""
        return Cost.REQUEST

    @property
    def held(self) -> int:
        """Bytes of the tokens that wait."""
        return self.meter.token_bytes

    @property
    def leaving(self) -> int:
        """Zero: tokens do not go to a disk."""
        return 0

    @property
    def leaving_rows(self) -> int:
        """Zero: it holds no rows."""
        return 0

    def give_up(self, size: int, why: str) -> None:
        """Fails the request."""
        self._on_full(
            ResponseOverflow(
                f"the tokens of the request that wait take too much memory: {why}. Read faster, or "
                "ask for fewer samples, tokens or log-probabilities",
                metadata={"bytes": str(self.meter.token_bytes)},
            )
        )

    def __len__(self) -> int:
        """Number of messages and events that wait."""
        return len(self._entries)

    def put(self, entry: Item | Notice | Sign | RheostatError) -> None:
        """Adds an entry, or merges its tokens into the last message of the sample."""
        if not isinstance(entry, Item):
            self._append(entry)
        elif isinstance(entry.what, Delta):
            deltas = self._deltas.get(entry.life)
            if deltas is None:
                deltas = self._deltas[entry.life] = WaitingDeltas(self.meter)
            if deltas.add(entry.what):
                self._append(entry.life)
            self._share.check()
        else:
            if entry.life in self._deltas:
                self._deltas[entry.life].seal()
            self._append(entry)

    async def get(self) -> Item | Notice | Sign | RheostatError:
        """Removes and returns the first entry; waits for one if there is none."""
        while not self._entries:
            self._news.clear()
            await self._news.wait()
        entry = self._entries.popleft()
        return Item(entry, self._deltas[entry].take()) if isinstance(entry, Life) else entry

    def close(self) -> None:
        """Discards all but an error, and counts no memory any more. Only an error may be added."""
        # An error that waits is the request's last word, for which its reader waits.
        self._entries = deque(one for one in self._entries if isinstance(one, RheostatError))
        self._deltas.clear()
        self.meter.close()
        self._on_full = lambda _: None  # it refers to the request, which refers to this queue

    def _append(self, entry: Life | Item | Notice | Sign | RheostatError) -> None:
        self._entries.append(entry)
        self._news.set()


def weight(delta: Delta) -> int:
    """Bytes that a delta takes in memory, approximately."""
    size = _DELTA_BYTES + _TOKEN_BYTES * len(delta.token_ids) + len(delta.text)
    if delta.logprobs:
        size += readings_weight(delta.logprobs)
    if delta.prompt_logprobs:
        size += readings_weight(delta.prompt_logprobs)
    return size


def readings_weight(readings: Sequence[generation_pb2.TokenLogprobs]) -> int:
    """Bytes that log-probabilities take in memory, approximately."""
    alternatives = sum(len(one.alternatives) for one in readings)
    return _READING_BYTES * len(readings) + _ALTERNATIVE_BYTES * alternatives
