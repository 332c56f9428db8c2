"""A subscription: what its reader is sent, in order, and what is kept until it says that it has it.

Invariants: sequence numbers rise by one and are given when something is first sent; what was sent
stays, byte for byte, until it is acknowledged; no payload leaves without credit. A connection that
breaks loses nothing but its credit.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from rheostat._proto.v1 import capture_pb2, capture_service_pb2
from rheostat_server.capture_specs import ResolvedCapture
from rheostat_server.errors import (
    CaptureOverflow,
    CursorExpired,
    InvalidValue,
    RheostatError,
    Superseded,
)
from rheostat_server.joining import Missed, tell
from rheostat_server.subscription_messages import Response, Tally, message_of
from rheostat_server.taps import End, Item, Reservoir, Tap
from rheostat_server.tensors import FloatType

_pb = capture_service_pb2

_MESSAGE_BYTES = 512
"""What a message weighs beside its payload."""


_UNACKNOWLEDGED = 256 << 10
"""Bytes beyond the buffer at which nothing more is sent before something is acknowledged."""


class _Sent(NamedTuple):
    """Something that was sent and may be asked for again."""

    sequence: int
    response: Response
    payload: int
    """Bytes of payload."""

    @property
    def weight(self) -> int:
        """Bytes that it takes while it is kept."""
        return self.payload + _MESSAGE_BYTES


class Subscription:
    """A reader's view of some requests. Lives on the event loop."""

    def __init__(
        self,
        name: str,
        filter: capture_service_pb2.RequestFilter | None,
        specs: Sequence[capture_pb2.CaptureSpec],
        overload: capture_pb2.Overload.ValueType,
        *,
        buffer_bytes: int,
        heartbeat: float,
        on_failed: Callable[["Subscription"], None],
    ) -> None:
        """A subscription that nobody reads yet.

        Args:
            name: its id.
            filter: which requests it captures from; None: those that send their rows here.
            specs: what it captures of them.
            overload: what happens when the reader is too slow.
            buffer_bytes: bytes that may wait or be unacknowledged.
            heartbeat: the longest silence, in seconds.
            on_failed: hears once of its failure.
        """
        self.name = name
        self.filter = filter
        self.specs = tuple(specs)
        self.overload = overload
        self.failure: RheostatError | None = None
        self.ended = False
        """Whether all has been said: it was closed, and everything was sent."""
        self.reservoir = Reservoir(buffer_bytes, self._overflow)
        self._heartbeat = heartbeat
        self._on_failed = on_failed
        self._taps: dict[Tap, Callable[[RheostatError], None] | None] = {}
        self._tallies: dict[Tap, Tally] = {}
        self._sequence = 0
        self._acknowledged = 0
        self._replay: deque[_Sent] = deque()
        self._pulling: Iterator[Item] = iter(())
        self._head: Item | None = None
        """What comes next and has no number yet."""
        self._encoded: Response | None = None
        """Its message."""
        self._call: object | None = None
        self._interruption: RheostatError | None = None
        self._credit: int | None = 0
        self._closing = False
        self.attached: Sequence[Tap] = ()
        """Those of requests that began before it."""
        self.missed: Sequence[Missed] = ()
        """Requests that it selects, that began before it, and that it could not join."""
        self.on_left: Callable[[], None] = lambda: None
        """Hears once that it takes nothing more."""

    @property
    def connected(self) -> bool:
        """Whether a call reads it."""
        return self._call is not None

    def read_by(self, call: object) -> bool:
        """Whether this call reads it."""
        return self._call is call

    def interrupt(self, call: object, error: RheostatError) -> None:
        """Ends a call that reads it, with an error; it stays."""
        if self._call is call:
            self._interruption = error
            self.reservoir.news.set()

    @property
    def taking(self) -> bool:
        """Whether rows may still be sent here."""
        return not self._closing and not self.ended and self.failure is None

    def refuse(self, tap: Tap, numbers: Collection[int]) -> None:
        """The engine has no room for some captures of a tap; where no row may be lost, it fails."""
        tap.refuse(numbers)
        if self.overload == capture_pb2.OVERLOAD_FAIL:
            self.fail(
                CaptureOverflow(
                    "the engine has no room for what is captured of a request. Capture fewer "
                    "sites or tokens, raise the server's --capture-mib, or choose an overload "
                    "policy that may lose rows"
                )
            )

    def selects(self, request_id: str, labels: Mapping[str, str]) -> bool:
        """Whether its filter selects a request."""
        if self.filter is None or not self.specs or self._closing:
            return False
        kind = self.filter.WhichOneof("kind")
        if kind == "requests":
            return request_id in self.filter.requests.request_ids
        if kind == "labels":
            wanted = self.filter.labels.labels
            return all(labels.get(key) == value for key, value in wanted.items())
        return True

    def tap(
        self,
        request_id: str,
        prompt: Sequence[int],
        captures: Mapping[int, ResolvedCapture],
        held: FloatType,
        fail: Callable[[RheostatError], None] | None,
    ) -> Tap:
        """A tap whose rows come here.

        Args:
            request_id: the request.
            prompt: its tokens.
            captures: what is wanted of it, by number.
            held: element type in which rows come.
            fail: ends the request; None where a full buffer ends the subscription instead.
        """
        tap = Tap(request_id, prompt, captures, held, self.overload, self.reservoir)
        self._taps[tap] = fail
        self._tallies[tap] = Tally()
        return tap

    def allow(self, size: int) -> None:
        """More payload may be sent.

        Raises:
            InvalidValue: it allows nothing.
        """
        if size < 1:
            raise InvalidValue("allows at least 1 byte", field="credit.bytes")
        if self._credit is not None:
            self._credit += size
        self.reservoir.news.set()

    def acknowledge(self, sequence: int) -> None:
        """The reader has everything up to a sequence number.

        Raises:
            InvalidValue: it was never sent.
        """
        if sequence > self._sequence:
            raise InvalidValue(
                f"{sequence} was not sent; the last was {self._sequence}", field="ack.sequence"
            )
        self._acknowledged = max(self._acknowledged, sequence)
        while self._replay and self._replay[0].sequence <= sequence:
            self.reservoir.kept -= self._replay.popleft().weight
        self.reservoir.news.set()

    def resume_after(self, sequence: int) -> None:
        """Checks a cursor, and takes it for an acknowledgement.

        Raises:
            InvalidValue: it was never sent.
            CursorExpired: what follows it is not kept any more.
            RheostatError: the subscription has failed.
        """
        if self.failure is not None:
            raise self.failure
        if sequence > self._sequence:
            raise InvalidValue(
                f"{sequence} was not sent; the last was {self._sequence}",
                field="open.resume.after_sequence",
            )
        if sequence < self._acknowledged:
            oldest = self._acknowledged + 1
            raise CursorExpired(
                f"what follows {sequence} was acknowledged and is gone; the first that can be had "
                f"is {oldest}",
                field="open.resume.after_sequence",
                metadata={"oldest": str(oldest)},
            )
        self.acknowledge(sequence)

    def close(self) -> None:
        """Takes nothing more; what waits is sent, without need of credit, then it ends."""
        self._closing = True
        self._credit = None
        for tap in list(self._taps):
            tap.close()
        self.on_left()
        self.reservoir.news.set()

    def fail(self, error: RheostatError) -> None:
        """Ends it with an error; what waits is lost."""
        if self.failure is None and not self.ended:
            self.failure = error
            for tap in list(self._taps):
                tap.discard()
            self._taps.clear()
            self._tallies.clear()
            self._replay.clear()
            self._head = self._encoded = None
            self._pulling = iter(())
            self.reservoir.kept = 0
            self.reservoir.news.set()
            self._on_failed(self)
            self.on_left()

    async def messages(self, call: object, credit: int) -> AsyncGenerator[Response, None]:
        """What a call sends, from what is first unacknowledged on.

        Args:
            call: identifies it; a later call ends an older one.
            credit: bytes of payload that may be sent at once.

        Raises:
            Superseded: another call has taken over.
            RheostatError: the subscription has failed.
        """
        self._call, self._interruption = call, None
        self._credit = None if self._closing else credit
        self.reservoir.news.set()
        opened = _pb.SubscribeOpened(subscription=self.name, next_sequence=self._acknowledged + 1)
        tell(opened, self.attached, self.missed)
        opened.heartbeat_interval.FromNanoseconds(int(self._heartbeat * 1e9))
        at = self._acknowledged
        silent_until = time.monotonic() + self._heartbeat
        yield Response(opened=opened)
        while True:
            self._check(call)
            sent = await self._after(at, call)
            self._check(call)
            if sent is not None:
                at = sent.sequence
                yield sent.response
            elif self._closing and not self._taps and self._head is None:
                self.ended = True
                return
            elif time.monotonic() < silent_until:
                await self._news_until(silent_until)
                continue
            else:
                yield Response(heartbeat=self._sign_of_life())
            silent_until = time.monotonic() + self._heartbeat

    def leave(self, call: object) -> None:
        """A call has ended."""
        if self._call is call:
            self._call = None

    def _check(self, call: object) -> None:
        if self._call is not call:
            raise Superseded("another call took this subscription up")
        if self._interruption is not None:
            raise self._interruption
        if self.failure is not None:
            raise self.failure

    async def _after(self, sequence: int, call: object) -> _Sent | None:
        """What comes after a sequence number, if its payload is allowed."""
        self.reservoir.news.clear()
        sequence = max(sequence, self._acknowledged)
        if sequence < self._sequence:
            sent = self._replay[sequence - self._acknowledged]
            if not self._allowed(sent.payload):
                return None
            self._spend(sent.payload)
            return sent
        if not self._closing and self.reservoir.kept > self.reservoir.limit + _UNACKNOWLEDGED:
            return None
        if self._head is None:
            self._head = self._next_item()
        if self._head is None:
            return None
        item, response = self._head, self._encoded
        if response is None:
            response = await message_of(item)
            if self._call is not call or self.failure is not None:
                return None
            self._encoded = response
        payload = len(response.captured.tensor.inline)
        if not self._allowed(payload):
            return None
        self._head = self._encoded = None
        self._spend(payload)
        self._sequence += 1
        response.sequence = self._sequence
        self._count(item, response)
        sent = _Sent(self._sequence, response, payload)
        self._replay.append(sent)
        self.reservoir.kept += sent.weight
        return sent

    def _next_item(self) -> Item | None:
        item = next(self._pulling, None)
        if item is None:
            self._pulling = self.reservoir.pull()
            item = next(self._pulling, None)
        return item

    def _count(self, item: Item, response: Response) -> None:
        self._tallies[item.tap].count(item, response)
        if isinstance(item, End):
            del self._taps[item.tap], self._tallies[item.tap]

    def _allowed(self, payload: int) -> bool:
        return self._credit is None or payload <= self._credit

    def _spend(self, payload: int) -> None:
        if self._credit is not None:
            self._credit -= payload

    async def _news_until(self, moment: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(moment - time.monotonic()):
                await self.reservoir.news.wait()

    def _sign_of_life(self) -> capture_service_pb2.Heartbeat:
        return _pb.Heartbeat(
            buffered_bytes=self.reservoir.meter.bytes + self._encoded_bytes,
            credit_bytes=self._credit or 0,
            last_sequence=self._sequence,
        )

    @property
    def _encoded_bytes(self) -> int:
        """Bytes of the payload that comes next."""
        return 0 if self._encoded is None else len(self._encoded.captured.tensor.inline)

    def _overflow(self, tap: Tap, error: RheostatError) -> None:
        fail = self._taps.get(tap)
        if fail is None:
            self.fail(error)
        else:
            fail(error)
