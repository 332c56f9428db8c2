"""A subscription: sends events to its reader in order, and keeps them until they are acknowledged.

Invariants: an event gets the next sequence number when it is first sent. A sent event is kept, byte
for byte, until it is acknowledged. No payload is sent without credit. If a connection breaks, only
its credit is lost.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.delivery.delivery_buffer import Deliveries, DeliveryBuffer
from rheostat_server.delivery.items import DeliveryItem, End, ItemSource
from rheostat_server.delivery.row_feed import RowFeed
from rheostat_server.delivery.spill_manager import SpillManager
from rheostat_server.errors import (
    CaptureOverflow,
    CursorExpired,
    RheostatError,
    Superseded,
)
from rheostat_server.limits import BATCH_BYTES, BATCH_EVENTS
from rheostat_server.message_parts import MessageParts
from rheostat_server.subscriptions.flow_control import Credit
from rheostat_server.subscriptions.messages import DeliveryCounts, Message, Response
from rheostat_server.subscriptions.observed import ObservedCaptures, ObservedRequests
from rheostat_server.subscriptions.payload_transport import PayloadTransport
from rheostat_server.subscriptions.pending_changes import MissedRequest, write_attachments
from rheostat_server.subscriptions.replay_window import ReplayWindow, Sent
from rheostat_server.subscriptions.send_queue import SendQueue
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import Vector
from rheostat_wire.v1 import capture_pb2, capture_service_pb2

_pb = capture_service_pb2

_UNACKNOWLEDGED = 256 << 10
"""Unacknowledged bytes above the buffer's limit at which sending pauses."""


_NO_ROOM = (
    "the engine has no room for what is captured of a request. Capture fewer sites or tokens, "
    "raise the server's --capture-mib"
)

_SUPERSEDED = "another call resumed this subscription"

_UNREAD = 16 << 20
"""Bytes, beside the buffer, that ended requests may take before they are read to their end. If the
buffer is larger, they may take as many bytes as the buffer."""


def _ignore(_: RheostatError) -> None:
    """Does nothing, because there is no call to interrupt."""


@dataclass(eq=False)
class _OpenFeed:
    """A request whose end has not been sent."""

    feed: RowFeed
    fail: Callable[[RheostatError], None] | None
    """Fails the request when the buffer is full; None if the subscription fails instead."""
    counts: DeliveryCounts = field(default_factory=DeliveryCounts)
    unread_bytes: int = 0
    """Memory of a request that has ended."""


class Subscription:
    """The events of some requests for one reader. Used on the event loop alone."""

    def __init__(
        self,
        name: str,
        requests: ObservedRequests | None,
        captures: ObservedCaptures,
        overload: capture_pb2.Overload.ValueType,
        *,
        buffer_bytes: int,
        heartbeat: float,
        resume_window: float = 60.0,
        on_failed: Callable[["Subscription"], None],
        deliveries: Deliveries | None = None,
        spill_manager: SpillManager | None = None,
    ) -> None:
        """No call reads the subscription yet.

        Args:
            name: its id.
            requests: the requests that it observes; None if it receives only rows that requests
                send to it.
            captures: the captures of observed requests.
            overload: the policy for a reader that is too slow.
            buffer_bytes: bytes that may wait or be unacknowledged.
            heartbeat: the longest silence, in seconds.
            resume_window: seconds that it waits for a reader whose connection broke.
            on_failed: called once when it fails.
            deliveries: counts rows that are lost before they reach the reader.
            spill_manager: stores rows on disk that find no room, if its policy is to spill.
        """
        self.name = name
        self.captures = captures
        """The captures of observed requests."""
        self.overload = overload
        self.failure: RheostatError | None = None
        self.ended = False
        """Whether it was closed, and all events were sent."""
        self.buffer = DeliveryBuffer(buffer_bytes, self._overflow, deliveries)
        if spill_manager is not None and overload == capture_pb2.OVERLOAD_SPILL:
            spill_manager.open(self.buffer, self._broken)
        self._heartbeat = heartbeat
        self._resume_window = resume_window
        self._on_failed = on_failed
        self._feeds: dict[ItemSource, _OpenFeed] = {}
        self._unread_bytes = 0
        """Sum of the bytes of ended requests that were not read to their ends."""
        self._replay = ReplayWindow()
        self._call: object | None = None
        self._interruption: RheostatError | None = None
        self._interrupt_write: Callable[[RheostatError], None] = _ignore
        """Ends the call at once if its client does not read."""
        self._credit = Credit()
        self._closing = False
        self._reason: RheostatError | None = None
        self.transport = PayloadTransport()
        """Sends payloads to the reader, in messages or through shared memory."""
        self._send_queue = SendQueue(self.buffer, self.transport)
        self.attached: Sequence[RowFeed] = ()
        """Feeds of requests that began before the subscription."""
        self.missed: Sequence[MissedRequest] = ()
        """Selected requests that began before it and could not be attached."""
        self.on_left: Callable[[], None] = lambda: None
        """Called when it takes no more rows."""
        self.vectors: Sequence[Vector] = ()
        """The vectors on which its rows are projected, each once."""
        self._requests = requests

    @property
    def connected(self) -> bool:
        """Whether a call reads it."""
        return self._call is not None

    def read_by(self, call: object) -> bool:
        """Whether the call `call` reads it."""
        return self._call is call

    def interrupt(self, call: object, error: RheostatError) -> None:
        """Ends the call that reads it with an error. The subscription itself stays."""
        if self._call is call:
            self._interruption = error
            self.buffer.news.set()

    @property
    def taking(self) -> bool:
        """Whether rows may still be sent here."""
        return not self._closing and not self.ended and self.failure is None

    def refuse(self, feed: RowFeed, numbers: Collection[int], reason: str = "") -> None:
        """Removes captures of a feed for which the engine has no room.

        If the policy allows no lost rows, the subscription fails.
        """
        feed.refuse(numbers)
        if self.overload in (capture_pb2.OVERLOAD_FAIL, capture_pb2.OVERLOAD_SPILL):
            self.fail(
                CaptureOverflow(
                    f"{reason or _NO_ROOM}, or choose an overload policy that may lose rows"
                )
            )

    def miss(self, feed: RowFeed, reason: str) -> None:
        """Notes that it misses a request. If the policy allows no lost rows, it fails."""
        feed.missed_reason = reason
        self.refuse(feed, (), f"a request cannot be observed: {reason}")

    def selects(self, request_id: str, labels: Mapping[str, str]) -> bool:
        """Whether it observes a request."""
        if self._requests is None or self._closing:
            return False
        return self._requests.hold(request_id, labels)

    def feed(
        self,
        request_id: str,
        prompt: Sequence[int],
        captures: Mapping[int, ResolvedCapture],
        row_type: FloatType,
        fail: Callable[[RheostatError], None] | None,
    ) -> RowFeed:
        """Adds a feed, which sends rows of a request to this subscription.

        Args:
            request_id: the request.
            prompt: its tokens.
            captures: its captures for this subscription, by number.
            row_type: element type of raw rows.
            fail: fails the request when the buffer is full; None if the subscription fails instead.
        """
        feed = RowFeed(
            request_id, prompt, captures, row_type, self.overload, self.buffer, self._request_ended
        )
        self._feeds[feed] = _OpenFeed(feed, fail)
        return feed

    def allow(self, size: int) -> None:
        """Grants credit for more payload.

        Args:
            size: bytes.

        Raises:
            InvalidValue: it is 0.
        """
        self._credit.grant(size)
        self._size_chunks()
        self.buffer.news.set()

    def acknowledge(self, sequence: int) -> None:
        """Removes the events up to a sequence number, because the reader has them.

        Raises:
            InvalidValue: the number was never sent.
        """
        self._replay.check(sequence, "ack.sequence")
        for sent in self._replay.acknowledge(sequence):
            self.buffer.kept -= sent.weight
            self.transport.free(sent.message)
        self.buffer.news.set()

    def prove(self, nonce: bytes) -> None:
        """Checks the reader's proof that it reads the shared memory."""
        self.transport.prove(nonce)
        self._size_chunks()

    def resume_after(self, sequence: int) -> None:
        """Checks the cursor of a resuming reader, and acknowledges the events up to it.

        Raises:
            InvalidValue: the number was never sent.
            CursorExpired: events after the cursor were already discarded.
            RheostatError: the subscription has failed.
        """
        if self.failure is not None:
            raise self.failure
        self._replay.check(sequence, "open.resume.after_sequence")
        if sequence < self._replay.acknowledged:
            oldest = self._replay.acknowledged + 1
            raise CursorExpired(
                f"events after {sequence} were acknowledged and discarded; the first that is left "
                f"is {oldest}",
                field="open.resume.after_sequence",
                metadata={"oldest": str(oldest)},
            )
        self.acknowledge(sequence)

    def close(self, reason: RheostatError | None = None) -> None:
        """Takes no more rows. Waiting events are sent without credit; then the subscription ends.

        Args:
            reason: the error with which its call ends; None if its client closed it, so that the
                call ends with OK.
        """
        if reason is None or not self._closing:
            self._reason = reason
        self._closing = True
        self._credit.endless = True
        for entry in list(self._feeds.values()):
            entry.feed.close()
        self.on_left()
        self.buffer.news.set()

    def fail(self, error: RheostatError) -> None:
        """Ends it with an error. Waiting events are lost."""
        if self.failure is None and not self.ended:
            self.failure = error
            for entry in list(self._feeds.values()):
                entry.feed.discard()
            self._feeds.clear()
            self._replay.clear()
            self._send_queue.clear()
            self.buffer.close()
            self.buffer.news.set()
            self._interrupt_write(error)
            self._on_failed(self)
            self.on_left()

    async def messages(
        self,
        call: object,
        credit: int,
        interrupt_write: Callable[[RheostatError], None] = _ignore,
        *,
        batched: bool = False,
    ) -> AsyncGenerator[Response | MessageParts, None]:
        """Yields the responses of a call, from the first unacknowledged event on.

        Args:
            call: identifies the call. A later call ends an earlier one.
            credit: bytes of payload that may be sent at first.
            interrupt_write: ends the call with an error, even while a write waits for the client to
                read.
            batched: whether the client reads several events in a message.

        Raises:
            Superseded: a later call reads the subscription.
            RheostatError: the subscription has failed, or was closed with this error.
        """
        interrupt_older, self._interrupt_write = self._interrupt_write, interrupt_write
        self._call, self._interruption = call, None
        interrupt_older(Superseded(_SUPERSEDED))
        self._credit.begin(credit)
        self._send_queue.batched = batched
        self.buffer.news.set()
        opened = _pb.SubscribeOpened(
            subscription_id=self.name, next_sequence=self._replay.acknowledged + 1
        )
        write_attachments(opened, self.attached, self.missed)
        opened.heartbeat_interval.FromNanoseconds(int(self._heartbeat * 1e9))
        opened.resume_window.FromNanoseconds(int(self._resume_window * 1e9))
        self.transport.begin(opened)
        self._size_chunks()
        at = self._replay.acknowledged
        silent_until = time.monotonic() + self._heartbeat
        yield Response(opened=opened)
        while True:
            self._check(call)
            sent = await self._after(at, call)
            self._check(call)
            if sent:
                at = sent[-1].sequence
                yield self._response(sent)
            elif self._closing and not self._feeds and not len(self._send_queue):
                self.ended = True
                self.buffer.close()
                if self._reason is not None:
                    raise self._reason
                return
            elif time.monotonic() < silent_until:
                await self._news_until(silent_until)
                continue
            else:
                self.transport.trim()
                yield Response(heartbeat=self._sign_of_sequence())
            silent_until = time.monotonic() + self._heartbeat

    def leave(self, call: object) -> None:
        """Notes that a call has ended."""
        if self._call is call:
            self._call = None
            self._interrupt_write = _ignore

    def _check(self, call: object) -> None:
        if self._call is not call:
            raise Superseded(_SUPERSEDED)
        if self._interruption is not None:
            raise self._interruption
        if self.failure is not None:
            raise self.failure

    async def _after(self, sequence: int, call: object) -> list[Sent]:
        """The next events after a sequence number; none if there are none or credit is too low."""
        self.buffer.news.clear()
        if self._replay.after(sequence) is not None:
            return self._sent_before(sequence)
        if self._paused or await self._send_queue.message() is None:
            return []
        if self._call is not call or self.failure is not None:
            return []
        sent: list[Sent] = []
        size = 0
        while (message := self._send_queue.encoded()) is not None:
            payload = message.payload
            if not (self._fits(sent, size + payload) and self._credit.try_spend(payload)):
                break
            self._count(self._send_queue.take(), message)
            sent.append(self._replay.add(message))
            size += sent[-1].weight
        self.buffer.kept += size
        if sent and self.buffer.kept <= self.buffer.limit:
            self._send_queue.prepare()
        return sent

    @property
    def _paused(self) -> bool:
        """Whether nothing new is sent until more is acknowledged."""
        most = self.buffer.limit + _UNACKNOWLEDGED
        return not self._closing and self.buffer.kept > most

    def _sent_before(self, sequence: int) -> list[Sent]:
        """The events after a number that were sent before, as far as the credit covers them."""
        again: list[Sent] = []
        size = 0
        while (sent := self._replay.after(sequence)) is not None:
            if not self._fits(again, size + sent.message.payload):
                break
            if not self._credit.try_spend(sent.message.payload):
                break
            again.append(sent)
            sequence, size = sent.sequence, size + sent.weight
        return again

    def _fits(self, batch: Sequence[Sent], size: int) -> bool:
        """Whether another event may join a batch, which would then have so many bytes."""
        if not batch:
            return True
        return self._send_queue.batched and len(batch) < BATCH_EVENTS and size <= BATCH_BYTES

    def _response(self, sent: Sequence[Sent]) -> MessageParts:
        """The message of some events."""
        events = [self.transport.readable(event.message).numbered(event.sequence) for event in sent]
        if len(events) == 1:
            return events[0]
        number = _pb.EventBatch.EVENTS_FIELD_NUMBER
        batch = MessageParts(part for event in events for part in event.as_field(number))
        return batch.as_field(Response.BATCH_FIELD_NUMBER)

    def _count(self, item: DeliveryItem, message: Message) -> None:
        self._feeds[item.feed].counts.count(item, message)
        if isinstance(item, End):
            self._remove(item.feed)

    def _remove(self, feed: ItemSource) -> None:
        self._unread_bytes -= self._feeds.pop(feed).unread_bytes

    def _request_ended(self, feed: RowFeed) -> None:
        """Handles the end of a request, or of a request that never started."""
        if feed.discarded:
            self._remove(feed)
            self.buffer.news.set()
            return
        ended = self._feeds[feed]
        ended.unread_bytes = feed.weight
        self._unread_bytes += ended.unread_bytes
        most = max(_UNREAD, self.buffer.limit)
        if self._unread_bytes <= most:
            return
        unread = [entry for entry in self._feeds.values() if entry.unread_bytes]
        for entry in unread:
            entry.unread_bytes = entry.feed.weight
        self._unread_bytes = sum(entry.unread_bytes for entry in unread)
        if self._unread_bytes > most and not self._closing:
            self.fail(
                CaptureOverflow(
                    f"{len(unread)} requests have ended that were not read to their end. "
                    "Read, grant credit and acknowledge faster, or select fewer requests"
                )
            )

    def expect(self, credit: int) -> None:
        """Sizes chunks for the credit of the first call, before that call begins."""
        self._credit.window = credit
        self._size_chunks()

    def _size_chunks(self) -> None:
        """Sizes new chunks so that each fits the credit of the call."""
        self.buffer.chunk_bytes = self.transport.chunk_bytes(self.buffer.limit, self._credit.window)

    async def _news_until(self, moment: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(moment - time.monotonic()):
                await self.buffer.news.wait()

    def _sign_of_sequence(self) -> capture_service_pb2.Heartbeat:
        return _pb.Heartbeat(
            buffered_bytes=self.buffer.waiting + self._send_queue.bytes,
            credit_bytes=self._credit.left,
            last_sequence=self._replay.last,
        )

    def _broken(self, error: RheostatError) -> None:
        """Fails the subscription and the requests that send rows to it, because rows were lost."""
        senders = [entry.fail for entry in self._feeds.values() if entry.fail is not None]
        self.fail(error)
        for fail in senders:
            fail(error)

    def _overflow(self, feed: ItemSource, error: RheostatError) -> None:
        sender = self._feeds.get(feed)
        if sender is None or sender.fail is None:
            self.fail(error)
        else:
            sender.fail(error)
