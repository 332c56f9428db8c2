"""The watches that hold a request, because their readers are gone (`WATCH_LOST_HOLD`).

Invariant: while a watch holds the request, its samples do not go on in the engine, and no sample
begins. No token is released, not even those that the engine was computing when the hold began.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rheostat_server.engine.backend import Delta
from rheostat_server.engine.held_samples import Fail, HeldSamples
from rheostat_server.requests.sequence import EngineSequence
from rheostat_wire.v1 import receipt_pb2


@dataclass
class _Hold:
    """What one watch has held."""

    count: int = 0
    seconds: float = 0.0
    """Of the holds that have ended."""
    begun: float | None = None
    """When the present hold began; None: the watch does not hold the request."""

    def duration(self, now: float) -> float:
        """Seconds of all holds."""
        return self.seconds + (0.0 if self.begun is None else now - self.begun)


class RequestHolds:
    """The holds of one request. Used on the event loop alone."""

    def __init__(
        self,
        sequences: Sequence[EngineSequence],
        held_samples: HeldSamples,
        fail: Fail,
        accept: Callable[[EngineSequence, Delta], None],
    ) -> None:
        """No watch holds the request.

        Args:
            sequences: its sequences, to which more may be added.
            held_samples: holds samples in the engine.
            fail: ends the request.
            accept: is called with what a sample's token hold releases.
        """
        self._sequences = sequences
        self._held_samples = held_samples
        self._fail = fail
        self._accept = accept
        self._holds: dict[str, _Hold] = {}
        """By the ids of the watches, in the order of their first holds."""
        self._none: asyncio.Event | None = None
        """Set once no watch holds the request; None: none does."""
        self._closed = False

    async def none(self) -> None:
        """Returns once no watch holds the request."""
        while self._none is not None:
            await self._none.wait()

    def begin(self, watch: str) -> None:
        """Begins the hold of a watch, by its id."""
        if self._closed:
            return
        hold = self._holds.setdefault(watch, _Hold())
        if hold.begun is None:
            hold.begun = time.monotonic()
            hold.count += 1
        if self._none is None:
            self._none = asyncio.Event()
            for sequence in self._sequences:
                if sequence.token_hold is not None:
                    sequence.token_hold.pause()
            self._set(self._sequences, held=True)

    def end(self, watch: str) -> None:
        """Ends the hold of a watch. The request goes on unless another watch holds it."""
        self._end(watch)
        if self._none is None or any(hold.begun is not None for hold in self._holds.values()):
            return
        self._none.set()
        self._none = None
        self._set(self._sequences, held=False)
        for sequence in self._sequences:
            if sequence.token_hold is not None:
                for delta in sequence.token_hold.go_on():
                    self._accept(sequence, delta)

    def close(self) -> None:
        """Ends all holds, because the request has ended."""
        self._closed = True
        for watch in self._holds:
            self._end(watch)
        if self._none is not None:
            self._none.set()
            self._none = None
        # These refer to the request, whose memory must be freed at once. No hold begins or ends any
        # more, so they are not called again.
        self._fail = lambda _: None
        self._accept = lambda sequence, delta: None

    def hold_late(self, sequence: EngineSequence) -> None:
        """Holds a sample that was added to the engine while a hold began."""
        if self._none is not None:
            self._set([sequence], held=True)

    def write(self, receipt: receipt_pb2.Receipt) -> None:
        """Adds the holds to what the receipt says of each watch."""
        written = {message.watch_id: message for message in receipt.watches}
        for watch, hold in self._holds.items():
            message = written.get(watch)
            if message is None:
                message = receipt.watches.add(watch_id=watch)
            message.hold_count = hold.count
            message.held_duration.FromNanoseconds(int(hold.duration(time.monotonic()) * 1e9))

    def _end(self, watch: str) -> None:
        hold = self._holds.get(watch)
        if hold is not None:
            hold.seconds, hold.begun = hold.duration(time.monotonic()), None

    def _set(self, sequences: Sequence[EngineSequence], *, held: bool) -> None:
        """Makes the engine hold samples that it has, or go on with them."""
        running = [
            sequence.plan_id for sequence in sequences if sequence.started and not sequence.ended
        ]
        self._held_samples.set(running, self._fail, held=held)
