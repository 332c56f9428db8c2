"""The watches that hold a request, because their readers are gone (`WATCH_LOST_HOLD`).

Invariant: while a watch holds the request, its samples do not go on in the engine, and no sample
begins. No token is released, not even those that the engine was computing when the hold began.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.engine.backend import Delta
from rheostat_server.engine.held_samples import Fail, HeldSamples
from rheostat_server.engine.pace import Pace
from rheostat_server.requests.response_queue import ResponseQueue
from rheostat_server.requests.sequence import EngineSequence
from rheostat_server.requests.token_hold import TokenHold
from rheostat_wire.v1 import receipt_pb2


def hold_tokens(
    samples: Sequence[EngineSequence],
    admitted: AdmittedRequest,
    stops: bool,
    count: Callable[[int], None],
) -> None:
    """Makes the samples hold tokens, if rules, watches or the client of their request need it.

    Args:
        samples: the request's own samples.
        admitted: the request.
        stops: whether a rule may stop a sample.
        count: is called with the number of bytes that wait in addition; negative if fewer wait.
    """
    held = any(part.watch.holds_if_lost for part in admitted.watch_parts)
    if not stops and not held and not admitted.hold_back:
        return
    for sequence in samples:
        sequence.token_hold = TokenHold(
            admitted.prompt_len, watched=stops, hold_back=admitted.hold_back, count=count
        )


def let_tokens_wait(
    sequences: Sequence[EngineSequence], queue: ResponseQueue, pace: Pace | None
) -> None:
    """Lets held tokens of a request wait for later ones only after they are released.

    The server must know tokens that are held at once.

    Args:
        sequences: all sequences of the request, after `hold_tokens`. Their jobs have the pace.
        queue: the queue of the request.
        pace: says how long tokens wait. None: they don't.
    """
    if pace is None or all(sequence.token_hold is None for sequence in sequences):
        return
    queue.paced = True
    for sequence in sequences:
        sequence.job = replace(sequence.job, pace=None)


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
