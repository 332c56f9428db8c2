"""What waits for the reader of a response: tokens, events, answers to updates, word of rows.

Invariants: whatever concerns one sample comes out in the order in which it went in. Tokens that
wait merge into fewer messages, and each message has a bounded size. The waiting tokens count in
the memory of the request. When that is full the request fails, because tokens may not be lost.

A reader that waits gets an entry directly, so that a token of a quick reader is neither stored nor
counted. While many streams run, tokens wait for later tokens; see `Pace`.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from rheostat_engine import Event
from rheostat_server.delivery.byte_budget import ByteCounter, Cost, Share
from rheostat_server.engine.backend import Delta, Ending
from rheostat_server.errors import ResponseOverflow, RheostatError
from rheostat_server.requests.pacing import Pace
from rheostat_server.requests.sequence import EngineSequence
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


class ResponseItem(NamedTuple):
    """Something that happened to a sample."""

    sequence: EngineSequence
    what: Delta | Event


class Sign(Enum):
    """Something that concerns no sample."""

    ROWS = "rows"
    """Captured rows can leave; see `ActiveRequest.inline`."""


Entry = ResponseItem | Notice | Sign | RheostatError


class _Merged:
    """Deltas of a sample that will be one message."""

    __slots__ = ("_ending", "_first", "_logprobs", "_stop", "_texts", "_token_ids", "weight")

    def __init__(self, delta: Delta, weight: int) -> None:
        """Begins with one delta, of `weight` bytes."""
        self.weight = weight
        self._first = delta
        self._ending: Ending | None = None
        self._texts: list[str] = []
        """Empty until a second delta comes: with a quick reader none does."""

    def add(self, delta: Delta, weight: int) -> bool:
        """Takes another delta, of `weight` bytes; False: it must begin a message of its own."""
        heavier = self.weight + weight - _DELTA_BYTES
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

    def __init__(self, byte_counter: ByteCounter) -> None:
        """Nothing waits. `byte_counter` counts the memory of the deltas that come."""
        self._byte_counter = byte_counter
        self._merged: deque[_Merged] = deque()
        self._sealed = True

    def add(self, delta: Delta) -> bool:
        """Adds a delta. Returns whether it begins a message of its own."""
        size = weight(delta)
        if self._merged and not self._sealed:
            last = self._merged[-1]
            before = last.weight
            if last.add(delta, size):
                self._byte_counter.add_tokens(last.weight - before)
                return False
        self._merged.append(_Merged(delta, size))
        self._byte_counter.add_tokens(size)
        self._sealed = False
        return True

    def seal(self) -> None:
        """Makes the next delta begin a message of its own, because an event comes between."""
        self._sealed = True

    def take(self) -> Delta:
        """Removes and returns the first message."""
        merged = self._merged.popleft()
        self._byte_counter.add_tokens(-merged.weight)
        return merged.delta()

    def take_all(self) -> Iterator[Delta]:
        """Removes every message and yields it, in order."""
        while self._merged:
            yield self.take()


class ResponseQueue:
    """The queue of one request. Lives on the event loop, and has one reader."""

    def __init__(
        self,
        share: Share,
        on_full: Callable[[ResponseOverflow], None],
        pace: Pace | None = None,
    ) -> None:
        """An empty queue.

        Args:
            share: the memory of the request.
            on_full: is called with an error when the waiting tokens exceed that memory.
            pace: how often tokens leave. None: at once.
        """
        self.byte_counter = ByteCounter(share.byte_counter)
        """Counts the memory of tokens that wait, also of those that the reader holds back."""
        self._share = share
        self._on_full = on_full
        self._entries: deque[EngineSequence | Entry] = deque()
        """A sample stands for the next message of its deltas."""
        self._deltas: dict[EngineSequence, WaitingDeltas] = {}
        self._reader: asyncio.Future[Entry] | None = None
        """Set while the reader waits for an entry."""
        self._pace = pace
        self._clock = asyncio.get_running_loop().time
        self._left = 0.0
        """When tokens last left while the reader waited."""
        self._timer: asyncio.TimerHandle | None = None
        """Set while tokens wait for later tokens."""
        share.add(self)

    @property
    def cost(self) -> Cost:
        """The request fails, because tokens may not be lost."""
        return Cost.REQUEST

    @property
    def held(self) -> int:
        """Bytes of the tokens that wait."""
        return self.byte_counter.token_bytes

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
                metadata={"bytes": str(self.byte_counter.token_bytes)},
            )
        )

    def __len__(self) -> int:
        """Number of messages and events that wait."""
        return len(self._entries)

    def put(self, entry: Entry) -> None:
        """Adds an entry, or merges its tokens into the last message of the sample."""
        if not isinstance(entry, ResponseItem):
            self._append(entry)
        elif isinstance(entry.what, Delta):
            self.put_delta(entry.sequence, entry.what)
        else:
            if entry.sequence in self._deltas:
                self._deltas[entry.sequence].seal()
            self._append(entry)

    def put_delta(self, sequence: EngineSequence, delta: Delta) -> None:
        """Adds a delta of a sample, or merges it into the sample's last message."""
        reader = self._reader
        waits = reader is not None and not reader.done()
        due = waits and self._is_due(delta)
        if due and not self._entries and reader is not None:
            reader.set_result(ResponseItem(sequence, delta))
            return
        deltas = self._deltas.get(sequence)
        if deltas is None:
            deltas = self._deltas[sequence] = WaitingDeltas(self.byte_counter)
        if deltas.add(delta):
            self._entries.append(sequence)
        if due:
            self._wake()
        elif waits and self._timer is None and self._pace is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._left + self._pace.interval, self._wake)
        self._share.check()  # last, because it may close this queue

    async def get(self) -> Entry:
        """Removes and returns the first entry; waits for one if there is none."""
        if self._entries:
            return self._pop()
        reader: asyncio.Future[Entry] = asyncio.get_running_loop().create_future()
        self._reader = reader
        try:
            return await reader
        except asyncio.CancelledError:
            if reader.done() and not reader.cancelled():
                self._entries.appendleft(reader.result())  # the next call returns it
            raise
        finally:
            self._reader = None

    def close(self) -> None:
        """Discards all but an error, and counts no memory any more. Only an error may be added."""
        # An error that waits is the request's last word, for which its reader waits.
        self._entries = deque(one for one in self._entries if isinstance(one, RheostatError))
        self._deltas.clear()
        self.byte_counter.close()
        self._on_full = lambda _: None  # it refers to the request, which refers to this queue
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_due(self, delta: Delta) -> bool:
        """Whether a delta, for which the reader waits, leaves at once."""
        if self._pace is None or not self._pace.interval:
            return True
        now = self._clock()
        if delta.ending is None and now < self._left + self._pace.interval:
            return False
        self._left = now
        return True

    def _append(self, entry: Entry) -> None:
        if not self._entries and self._reader is not None and not self._reader.done():
            self._reader.set_result(entry)
        else:
            self._entries.append(entry)
            self._wake()

    def _wake(self) -> None:
        """Gives the first entry to the reader, if it waits for one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._entries and self._reader is not None and not self._reader.done():
            self._left = self._clock()
            self._reader.set_result(self._pop())

    def _pop(self) -> Entry:
        """Removes and returns the first entry."""
        entry = self._entries.popleft()
        return (
            ResponseItem(entry, self._deltas[entry].take())
            if isinstance(entry, EngineSequence)
            else entry
        )


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
