"""A subscription: captured rows of requests that others run, and how each request ended."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.delivery.delivery_buffer import Deliveries, DeliveryBuffer
from rheostat_server.delivery.items import End, ItemSource
from rheostat_server.delivery.row_feed import RowFeed
from rheostat_server.delivery.spill_manager import SpillManager
from rheostat_server.errors import CaptureOverflow, RheostatError
from rheostat_server.subscriptions.event_stream import EventStream, Outgoing
from rheostat_server.subscriptions.messages import DeliveryCounts, Message, Response
from rheostat_server.subscriptions.observed import ObservedCaptures, ObservedRequests
from rheostat_server.subscriptions.payload_transport import PayloadTransport
from rheostat_server.subscriptions.pending_changes import MissedRequest, write_attachments
from rheostat_server.subscriptions.replay_window import Sent
from rheostat_server.subscriptions.send_queue import SendQueue
from rheostat_server.tensors import FloatType
from rheostat_server.vectors.store import Vector
from rheostat_wire.message_parts import MessageParts
from rheostat_wire.v1 import capture_pb2, capture_service_pb2

_pb = capture_service_pb2

_NO_ROOM = (
    "the engine has no room for what is captured of a request. Capture fewer sites or tokens, "
    "raise the server's --capture-mib"
)

_UNREAD = 16 << 20
"""Bytes, beside the buffer, that ended requests may take before they are read to their end. If the
buffer is larger, they may take as many bytes as the buffer."""


@dataclass(eq=False)
class _OpenFeed:
    """A request whose end has not been sent."""

    feed: RowFeed
    fail: Callable[[RheostatError], None] | None
    """Fails the request when the buffer is full; None if the subscription fails instead."""
    counts: DeliveryCounts = field(default_factory=DeliveryCounts)
    unread_bytes: int = 0
    """Memory of a request that has ended."""


class Subscription(EventStream[Message]):
    """Captured rows of some requests for one reader. Used on the event loop alone."""

    kind = "subscription"

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
        on_failed: Callable[[str], None],
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
            on_failed: called once, with its id, when it fails.
            deliveries: counts rows that are lost before they reach the reader.
            spill_manager: stores rows on disk that find no room, if its policy is to spill.
        """
        self.captures = captures
        """The captures of observed requests."""
        self.overload = overload
        self.buffer = DeliveryBuffer(buffer_bytes, self._overflow, deliveries)
        if spill_manager is not None and overload == capture_pb2.OVERLOAD_SPILL:
            spill_manager.open(self.buffer, self._broken)
        self._feeds: dict[ItemSource, _OpenFeed] = {}
        self._unread_bytes = 0
        """Sum of the bytes of ended requests that were not read to their ends."""
        self.transport = PayloadTransport()
        """Sends payloads to the reader, in messages or through shared memory."""
        self._send_queue = SendQueue(self.buffer, self.transport)
        super().__init__(
            name,
            self.buffer,
            self._send_queue,
            heartbeat=heartbeat,
            resume_window=resume_window,
            on_failed=on_failed,
        )
        self.attached: Sequence[RowFeed] = ()
        """Feeds of requests that began before the subscription."""
        self.missed: Sequence[MissedRequest] = ()
        """Selected requests that began before it and could not be attached."""
        self.vectors: Sequence[Vector] = ()
        """The vectors on which its rows are projected, each once."""
        self._requests = requests

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

    def prove(self, nonce: bytes) -> None:
        """Checks the reader's proof that it reads the shared memory."""
        self.transport.prove(nonce)
        self._credit_changed()

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
        self._credit_changed()

    def release(self) -> None:
        """Releases the memory that it shares with its reader."""
        self.transport.close()

    @property
    def _has_sources(self) -> bool:
        return bool(self._feeds)

    def _close_sources(self) -> None:
        for entry in list(self._feeds.values()):
            entry.feed.close()

    def _drop_sources(self) -> None:
        for entry in list(self._feeds.values()):
            entry.feed.discard()
        self._feeds.clear()

    def _opened(self, next_sequence: int) -> Response:
        opened = _pb.SubscribeOpened(subscription_id=self.name, next_sequence=next_sequence)
        write_attachments(opened, self.attached, self.missed)
        opened.heartbeat_interval.FromNanoseconds(int(self._heartbeat * 1e9))
        opened.resume_window.FromNanoseconds(int(self._resume_window * 1e9))
        self.transport.begin(opened)
        return Response(opened=opened)

    def _silent(self, sign: capture_service_pb2.Heartbeat) -> Response:
        self.transport.trim()
        return Response(heartbeat=sign)

    def _response(
        self, sent: Sequence[Sent[Message]], answers: Sequence[Outgoing] = ()
    ) -> MessageParts:
        events = [self.transport.readable(event.message).numbered(event.sequence) for event in sent]
        if len(events) == 1:
            return events[0]
        number = _pb.EventBatch.EVENTS_FIELD_NUMBER
        batch = MessageParts(part for event in events for part in event.as_field(number))
        return batch.as_field(Response.BATCH_FIELD_NUMBER)

    def _take(self, message: Message) -> None:
        item = self._send_queue.take()
        self._feeds[item.feed].counts.count(item, message)
        if isinstance(item, End):
            self._remove(item.feed)

    def _acknowledged(self, message: Message) -> None:
        self.transport.free(message)

    def _credit_changed(self) -> None:
        """Sizes new chunks so that each fits the credit of the call."""
        self.buffer.chunk_bytes = self.transport.chunk_bytes(self.buffer.limit, self._credit.window)

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
