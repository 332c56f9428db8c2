"""The queue between the engine and the response stream of a request.

Its entries are tokens, events of the engine, notices of updates, and the sign that rows are ready.

Invariants: entries of a sample keep their order. Waiting tokens merge into fewer messages of
bounded size. They count in the memory of the request. When this memory is full, the request fails,
because tokens must not be lost.

A waiting reader gets an entry directly, so that tokens of a fast reader are neither stored nor
counted. Few readers wake in an iteration of the event loop, and the others wait for their turns,
because an iteration in which hundreds of messages are sent takes milliseconds. While many streams
run, tokens wait for later tokens; see `Pace`. Tokens of most requests have waited before they come
here.

A message costs more than its events. So if events may be joined in one message, entries wait until
the next iteration, and are sent together.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from typing import NamedTuple

from rheostat_engine import Event
from rheostat_server.delivery.byte_budget import ByteCounter, Cost, Holder, Share
from rheostat_server.engine.backend import Delta, Ending
from rheostat_server.engine.pace import Pace
from rheostat_server.errors import ResponseOverflow, RheostatError
from rheostat_server.requests.delta_weight import DELTA_BYTES, weight
from rheostat_server.requests.sequence import EngineSequence
from rheostat_server.tasks.turns import Turns
from rheostat_wire.v1 import generation_pb2

_MESSAGE_BYTES = 1 << 20
"""Memory of the tokens that merge into one message. The message on the wire is smaller."""

Notice = generation_pb2.UpdateApplied | generation_pb2.UpdateRefused
"""The result of an update."""


class ResponseItem(NamedTuple):
    """New tokens or an event of a sample."""

    sequence: EngineSequence
    what: Delta | Event


class Sign(Enum):
    """An entry of the whole request."""

    ROWS = "rows"
    """Captured rows are ready; see `ActiveRequest.response_rows`."""
    SIGNALS = "signals"
    """Signals wait that should leave at once; see `ActiveRequest.signals`."""
    ANSWERED = "answered"
    """A change that a watch asked for was answered; see `ActiveRequest.unanswered`."""


Message = ResponseItem | Notice | Sign
"""What the reader of a request takes."""
Entry = Message | RheostatError


class _Merged:
    """Deltas of a sample that are sent as one message."""

    __slots__ = ("_ending", "_first", "_logprobs", "_stop", "_texts", "_token_ids", "weight")

    def __init__(self, delta: Delta, weight: int) -> None:
        """Begins with one delta, of `weight` bytes."""
        self.weight = weight
        self._first = delta
        self._ending: Ending | None = None
        self._texts: list[str] = []
        """Empty until there is a second delta, because most messages of a fast reader have one."""

    def add(self, delta: Delta, weight: int) -> bool:
        """Adds a delta of `weight` bytes. Returns False if it must begin another message."""
        heavier = self.weight + weight - DELTA_BYTES
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

    @property
    def plain(self) -> bool:
        """Whether it has tokens alone: neither an end nor log-probabilities of the prompt."""
        first = self._first
        return first.ending is None and self._ending is None and first.prompt_logprobs is None

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
    """The waiting deltas of a sample, merged into messages."""

    def __init__(self, byte_counter: ByteCounter) -> None:
        """No delta waits. `byte_counter` counts the memory of the deltas."""
        self._byte_counter = byte_counter
        self._merged: deque[_Merged] = deque()
        self._sealed = True

    def add(self, delta: Delta) -> bool:
        """Adds a delta. Returns whether it begins another message."""
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

    @property
    def first_is_plain(self) -> bool:
        """Whether the first message has tokens alone."""
        return self._merged[0].plain

    def seal(self) -> None:
        """Makes the next delta begin another message, because an event comes before it."""
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


class ResponseQueue(Holder):
    """The queue of one request. It has one reader, and is used on the event loop alone."""

    cost = Cost.REQUEST
    """The request fails, because tokens may not be lost."""

    def __init__(
        self,
        share: Share,
        on_full: Callable[[ResponseOverflow], None],
        pace: Pace,
        turns: Turns,
    ) -> None:
        """An empty queue.

        Args:
            share: the memory of the request.
            on_full: is called with an error when the waiting tokens exceed that memory.
            pace: counts the streams. If `paced`, it limits how often their tokens are sent.
            turns: limits how many readers wake in an iteration of the event loop.
        """
        self.direct: Callable[[EngineSequence, Delta], bool] = lambda sequence, delta: False
        """Sends a delta without waking the reader, which waits. Returns whether it did."""
        self.direct_rows: Callable[[], bool] = lambda: False
        """Sends the rows that are ready in the same way. Returns whether it sent all."""
        self.direct_entries: Callable[[], None] = lambda: None
        """Sends entries in the same way, which it takes by `take_plain`. It may leave some."""
        self.direct_in_turn = False
        """Whether `direct` takes turns with those of other requests, and with readers that wake."""
        self.joined = False
        """Whether entries of an iteration of the event loop are sent together in the next one."""
        self.paced = False
        """Whether tokens wait here for later tokens. For most requests they wait in the engine's
        client instead; see `adapters/outputs`."""
        self.byte_counter = ByteCounter(share.byte_counter)
        """Counts the memory of waiting tokens, with those that the reader holds back."""
        self._share = share
        self._on_full = on_full
        self._entries: deque[EngineSequence | Entry] = deque()
        """A sample stands for the next message of its deltas."""
        self._deltas: dict[EngineSequence, WaitingDeltas] = {}
        self._reader: asyncio.Future[Entry] | None = None
        """Set while the reader waits for an entry."""
        self._turns = turns
        self._turn_asked = False
        """Whether the reader waits for its turn to wake."""
        self._pace = pace
        self._streams: set[EngineSequence] = set()
        """The samples that `pace` counts."""
        self._clock = asyncio.get_running_loop().time
        self._passed_on = 0.0
        """When tokens were passed on last, if they may wait for later ones."""
        self._timer: asyncio.TimerHandle | None = None
        """Set while tokens wait for later tokens."""
        share.add(self)

    @property
    def freeable(self) -> int:
        """Bytes of the tokens that wait."""
        return self.byte_counter.token_bytes

    def give_up(self, size: int, why: str) -> None:
        """Fails the request."""
        self._on_full(
            ResponseOverflow(
                f"the waiting tokens of the request take too much memory: {why}. Read faster, or "
                "ask for fewer samples, tokens or log-probabilities",
                metadata={"bytes": str(self.byte_counter.token_bytes)},
            )
        )

    def __len__(self) -> int:
        """Number of waiting messages and events."""
        return len(self._entries)

    def put(self, entry: Entry) -> None:
        """Adds an entry, or merges its tokens into the last message of the sample."""
        if not isinstance(entry, ResponseItem):
            if entry is Sign.ROWS and self._waits_for_entry and self.direct_rows():
                return
            self._append(entry)
        elif isinstance(entry.what, Delta):
            self.put_delta(entry.sequence, entry.what)
        else:
            if entry.sequence in self._deltas:
                self._deltas[entry.sequence].seal()
            self._append(entry)

    def put_delta(self, sequence: EngineSequence, delta: Delta) -> None:
        """Adds a delta of a sample, or merges it into the sample's last message.

        If the reader waits, the last tokens of a sample are sent at once, as its others are, and
        the reader wakes for its end alone. When hundreds of samples end in one step, no last token
        waits for the ends of others.
        """
        if delta.ending is not None:
            if sequence in self._streams:
                self._streams.remove(sequence)
                self._pace.add(-1)
        elif sequence not in self._streams:
            self._streams.add(sequence)
            self._pace.add(1)
        reader = self._reader
        waits = reader is not None and not reader.done()
        due = waits and self._is_due(delta)
        if due and not self._entries and not self.joined:
            if delta.ending is None:
                if self._send_now(sequence, delta):
                    return
            elif self._send_now(sequence, delta._replace(ending=None, stop=None)):
                delta = delta._replace(token_ids=(), text="", logprobs=())
            if self._waits_for_entry and self._give(ResponseItem(sequence, delta)):
                return
        deltas = self._deltas.get(sequence)
        if deltas is None:
            deltas = self._deltas[sequence] = WaitingDeltas(self.byte_counter)
        if deltas.add(delta):
            self._entries.append(sequence)
        if due:
            self._wake_in_turn()
        elif waits and self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._passed_on + self._pace.interval, self._wake)
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

    def take_plain(self, may_send: Callable[[EngineSequence], bool]) -> Entry | None:
        """Removes and returns the first entry, if `direct_entries` may send it.

        These are notices, `Sign.SIGNALS`, and tokens alone of samples of which `may_send` is true.
        """
        if not self._entries:
            return None
        entry = self._entries[0]
        if isinstance(entry, EngineSequence):
            plain = self._deltas[entry].first_is_plain and may_send(entry)
        else:
            plain = entry is Sign.SIGNALS or isinstance(entry, Notice)
        return self._pop() if plain else None

    def put_back(self, sign: Sign) -> None:
        """Puts a sign before all entries, for the reader. To be called by `direct_entries`."""
        self._entries.appendleft(sign)

    def close(self) -> None:
        """Discards all entries but errors, and counts no more memory. Only errors may be added."""
        # The reader still has to get the error that ended the request.
        self._entries = deque(entry for entry in self._entries if isinstance(entry, RheostatError))
        self._deltas.clear()
        self._pace.add(-len(self._streams))
        self._streams.clear()
        self.byte_counter.close()
        # They refer to the request, which refers to this queue.
        self._on_full = lambda _: None
        self.direct = lambda sequence, delta: False
        self.direct_rows = lambda: False
        self.direct_entries = lambda: None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _is_due(self, delta: Delta) -> bool:
        """Whether a waiting reader gets a delta at once."""
        if not self.paced or not self._pace.interval:
            return True
        now = self._clock()
        if delta.ending is None and now < self._passed_on + self._pace.interval:
            return False
        self._passed_on = now
        return True

    @property
    def _waits_for_entry(self) -> bool:
        """Whether the reader waits, and gets the next entry at once."""
        return not self._entries and self._reader is not None and not self._reader.done()

    def _append(self, entry: Entry) -> None:
        if not self.joined and self._waits_for_entry and self._give(entry):
            return
        self._entries.append(entry)
        if isinstance(entry, RheostatError):
            self._wake()
        else:
            self._wake_in_turn()

    def _send_now(self, sequence: EngineSequence, delta: Delta) -> bool:
        """Sends a delta directly, if it is this queue's turn; returns whether it did."""
        if self.direct_in_turn and not self._turns.take():
            return False
        return self.direct(sequence, delta)

    def _give(self, entry: Entry) -> bool:
        """Gives an entry to the waiting reader; returns False if the reader must wait its turn."""
        reader = self._reader
        if reader is None or not self._turns.free:
            return False
        self._turns.call(partial(reader.set_result, entry))
        return True

    def _wake_in_turn(self) -> None:
        """Calls `_wake` when it is the reader's turn."""
        if not self._turn_asked and self._reader is not None and not self._reader.done():
            self._turn_asked = True
            if self.joined:
                self._turns.call_later(self._take_turn)
            else:
                self._turns.call(self._take_turn)

    def _take_turn(self) -> None:
        self._turn_asked = False
        self._wake()

    def _wake(self) -> None:
        """Sends entries directly; gives the first that is left to the reader, if it waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._entries and self._reader is not None and not self._reader.done():
            self._passed_on = self._clock()
            self.direct_entries()
        if self._entries and self._reader is not None and not self._reader.done():
            self._reader.set_result(self._pop())

    def _pop(self) -> Entry:
        """Removes and returns the first entry."""
        entry = self._entries.popleft()
        return (
            ResponseItem(entry, self._deltas[entry].take())
            if isinstance(entry, EngineSequence)
            else entry
        )
