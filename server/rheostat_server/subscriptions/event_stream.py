"""Sends events to one reader in order, and keeps them until the reader acknowledges them.

What subscriptions and watches share: sequence numbers, credit, resumption and heartbeats. They
differ in what their events are and where these wait.

Invariants: an event gets the next sequence number when it is first sent. A sent event is kept, byte
for byte, until it is acknowledged. No payload is sent without credit. If a connection breaks, only
its credit is lost.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

import google.protobuf.message

from rheostat_server.errors import CursorExpired, QueueFull, RheostatError, Superseded
from rheostat_server.limits import BATCH_BYTES, BATCH_EVENTS, RETRY_SECONDS, UNREAD_WATCH_ANSWERS
from rheostat_server.subscriptions.flow_control import Credit
from rheostat_server.subscriptions.replay_window import M, ReplayWindow, Sendable, Sent
from rheostat_server.tasks.alarm import Alarm
from rheostat_wire.message_parts import MessageParts
from rheostat_wire.v1 import capture_service_pb2

_UNACKNOWLEDGED = 256 << 10
"""Unacknowledged bytes above the buffer's limit at which sending pauses."""

Outgoing = google.protobuf.message.Message | MessageParts
"""A message of the server."""


def ignore_interruption(_: RheostatError) -> None:
    """Does nothing, because there is no call to interrupt."""


Next = TypeVar("Next", bound=Sendable, covariant=True)


class StreamBuffer(Protocol):
    """Memory for the events of one reader."""

    news: asyncio.Event
    """Set when an event can be taken."""
    kept: int
    """Bytes of sent events that are not acknowledged."""

    @property
    def limit(self) -> int:
        """The most bytes that may wait or be kept."""

    @property
    def waiting(self) -> int:
        """Bytes that were not sent yet."""

    def close(self) -> None:
        """Drops everything."""


class EventQueue(Protocol[Next]):
    """The next events, which have no number yet."""

    batched: bool
    """Whether the reader accepts several events in a message."""

    def __len__(self) -> int:
        """Number of events."""

    @property
    def bytes(self) -> int:
        """Bytes of their payloads."""

    def prepare(self) -> None:
        """Takes events out of the buffer, and begins to encode them."""

    async def message(self) -> Next | None:
        """The first event's message; None if there is no event, or another call has taken it."""

    def encoded(self) -> Next | None:
        """The first event's message, if it is encoded already."""

    def clear(self) -> None:
        """Removes all events."""


class EventStream(ABC, Generic[M]):
    """The events for one reader. Used on the event loop alone."""

    kind: ClassVar[str]
    """What it is called in errors and in the log."""

    def __init__(
        self,
        name: str,
        buffer: StreamBuffer,
        queue: EventQueue[M],
        *,
        heartbeat: float,
        resume_window: float,
        on_failed: Callable[[str], None],
    ) -> None:
        """No call reads the stream yet.

        Args:
            name: its id.
            buffer: memory for its events.
            queue: the next events.
            heartbeat: the longest silence, in seconds.
            resume_window: seconds that it waits for a reader whose connection broke.
            on_failed: called once, with its id, when it fails.
        """
        self.name = name
        self.failure: RheostatError | None = None
        self.ended = False
        """Whether it was closed, and all events were sent."""
        self.on_left: Callable[[], None] = lambda: None
        """Called when it takes no more events."""
        self._memory = buffer
        self._queue = queue
        self._heartbeat = heartbeat
        self._resume_window = resume_window
        self._on_failed = on_failed
        self._alarm = Alarm(buffer.news)
        """Ends a wait for news when the reader is due a sign of life."""
        self._replay = ReplayWindow[M]()
        self._call: object | None = None
        self._interruption: RheostatError | None = None
        self._interrupt_write: Callable[[RheostatError], None] = ignore_interruption
        """Ends the call at once if its client does not read."""
        self._credit = Credit()
        self._answers: deque[Outgoing] = deque()
        """Answers to the client of the present call, which have no number and are not replayed."""
        self.dismissed = False
        """Whether its client has ended it."""
        self._closing = False
        self._reason: RheostatError | None = None

    @property
    def connected(self) -> bool:
        """Whether a call reads it."""
        return self._call is not None

    def read_by(self, call: object) -> bool:
        """Whether the call `call` reads it."""
        return self._call is call

    def interrupt(self, call: object, error: RheostatError) -> None:
        """Ends the call that reads it with an error. The stream itself stays."""
        if self._call is call:
            self._interruption = error
            self._memory.news.set()

    @property
    def taking(self) -> bool:
        """Whether events may still be added."""
        return not self._closing and not self.ended and self.failure is None

    def answer(self, message: Outgoing) -> None:
        """Sends an answer to a message of the client, before the events that wait.

        Raises:
            QueueFull: too many answers wait to be read.
        """
        if len(self._answers) >= UNREAD_WATCH_ANSWERS:
            raise QueueFull(
                f"{UNREAD_WATCH_ANSWERS} answers wait to be read; read what the {self.kind} sends",
                retry_after=RETRY_SECONDS,
            )
        self._answers.append(message)
        self._memory.news.set()

    def dismiss(self) -> None:
        """Notes that its client has ended it."""
        self.dismissed = True

    def allow(self, size: int) -> None:
        """Grants credit for more payload.

        Args:
            size: bytes.

        Raises:
            InvalidValue: it is 0.
        """
        self._credit.grant(size)
        self._credit_changed()
        self._memory.news.set()

    def acknowledge(self, sequence: int) -> None:
        """Removes the events up to a sequence number, because the reader has them.

        Raises:
            InvalidValue: the number was never sent.
        """
        self._replay.check(sequence, "ack.sequence")
        for sent in self._replay.acknowledge(sequence):
            self._memory.kept -= sent.message.weight
            self._acknowledged(sent.message)
        self._memory.news.set()

    def resume_after(self, sequence: int) -> None:
        """Checks the cursor of a resuming reader, and acknowledges the events up to it.

        Raises:
            InvalidValue: the number was never sent.
            CursorExpired: events after the cursor were already discarded.
            RheostatError: the stream has failed.
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
        """Takes no more events. Waiting events are sent without credit; then the stream ends.

        Args:
            reason: the error with which its call ends; None if its client closed it, so that the
                call ends with OK.
        """
        if reason is None or not self._closing:
            self._reason = reason
        self._closing = True
        self._credit.endless = True
        self._close_sources()
        self.on_left()
        self._memory.news.set()

    def fail(self, error: RheostatError) -> None:
        """Ends it with an error. Waiting events are lost."""
        if self.failure is None and not self.ended:
            self.failure = error
            self._drop_sources()
            self._replay.clear()
            self._queue.clear()
            self._memory.close()
            self._memory.news.set()
            self._interrupt_write(error)
            self._on_failed(self.name)
            self.on_left()

    async def messages(
        self,
        call: object,
        credit: int,
        interrupt_write: Callable[[RheostatError], None] = ignore_interruption,
        *,
        batched: bool = False,
    ) -> AsyncGenerator[Outgoing, None]:
        """Yields the responses of a call, from the first unacknowledged event on.

        Args:
            call: identifies the call. A later call ends an earlier one.
            credit: bytes of payload that may be sent at first.
            interrupt_write: ends the call with an error, even while a write waits for the client to
                read.
            batched: whether the client reads several events in a message.

        Raises:
            Superseded: a later call reads the stream.
            RheostatError: the stream has failed, or was closed with this error.
        """
        interrupt_older, self._interrupt_write = self._interrupt_write, interrupt_write
        self._call, self._interruption = call, None
        self._answers.clear()
        interrupt_older(self._superseded())
        self._credit.begin(credit)
        self._queue.batched = batched
        self._memory.news.set()
        opened = self._opened(self._replay.acknowledged + 1)
        self._credit_changed()
        at = self._replay.acknowledged
        silent_until = time.monotonic() + self._heartbeat
        yield opened
        while True:
            self._check(call)
            if self._answers and not self._joins_answers:
                yield self._answers.popleft()
                continue
            sent = await self._after(at, call)
            self._check(call)
            answers: list[Outgoing] = []
            while self._joins_answers and self._answers and len(answers) < BATCH_EVENTS:
                answers.append(self._answers.popleft())
            if sent:
                at = sent[-1].sequence
                yield self._response(sent, answers)
            elif answers:
                yield self._response(sent, answers)
                continue  # answers do not postpone the sign of life
            elif self._closing and not self._has_sources and not len(self._queue):
                self.ended = True
                self._memory.close()
                if self._reason is not None:
                    raise self._reason
                return
            elif time.monotonic() < silent_until:
                self._alarm.set_in(silent_until - time.monotonic())
                await self._memory.news.wait()
                continue
            else:
                yield self._silent(self._sign_of_sequence())
            silent_until = time.monotonic() + self._heartbeat

    def leave(self, call: object) -> None:
        """Notes that a call has ended."""
        if self._call is call:
            self._call = None
            self._interrupt_write = ignore_interruption
            self._alarm.cancel()

    @abstractmethod
    def release(self) -> None:
        """Releases what it holds beside its events, because it has ended."""

    @property
    @abstractmethod
    def _has_sources(self) -> bool:
        """Whether the end of a request was not sent yet."""

    @abstractmethod
    def _close_sources(self) -> None:
        """Takes nothing more of any request."""

    @abstractmethod
    def _drop_sources(self) -> None:
        """Takes and sends nothing more of any request."""

    @abstractmethod
    def _opened(self, next_sequence: int) -> Outgoing:
        """The first message of a call."""

    @abstractmethod
    def _silent(self, sign: capture_service_pb2.Heartbeat) -> Outgoing:
        """The message that is sent when nothing else was for a while."""

    @abstractmethod
    def _response(self, sent: Sequence[Sent[M]], answers: Sequence[Outgoing] = ()) -> Outgoing:
        """The message of some events. Answers are before them, if `_joins_answers`."""

    @abstractmethod
    def _take(self, message: M) -> None:
        """Removes the first event from the queue, because it is being sent."""

    @property
    def _joins_answers(self) -> bool:
        """Whether answers go in one message with events."""
        return False

    def _acknowledged(self, message: M) -> None:  # most need nothing here
        """Frees what a message holds that was acknowledged."""

    def _credit_changed(self) -> None:  # most need nothing here
        """Adapts the size of events to the credit of the call."""

    def _superseded(self) -> Superseded:
        return Superseded(f"another call resumed this {self.kind}")

    def _check(self, call: object) -> None:
        if self._call is not call:
            raise self._superseded()
        if self._interruption is not None:
            raise self._interruption
        if self.failure is not None:
            raise self.failure

    async def _after(self, sequence: int, call: object) -> list[Sent[M]]:
        """The next events after a sequence number; none if there are none or credit is too low."""
        self._memory.news.clear()
        if self._replay.after(sequence) is not None:
            return self._sent_before(sequence)
        if self._paused or await self._queue.message() is None:
            return []
        if self._call is not call or self.failure is not None:
            return []
        sent: list[Sent[M]] = []
        size = 0
        while (message := self._queue.encoded()) is not None:
            payload = message.payload
            if not (self._fits(sent, size + payload) and self._credit.try_spend(payload)):
                break
            self._take(message)
            sent.append(self._replay.add(message))
            size += message.weight
        self._memory.kept += size
        if sent and self._memory.kept <= self._memory.limit:
            self._queue.prepare()
        return sent

    @property
    def _paused(self) -> bool:
        """Whether nothing new is sent until more is acknowledged."""
        most = self._memory.limit + _UNACKNOWLEDGED
        return not self._closing and self._memory.kept > most

    def _sent_before(self, sequence: int) -> list[Sent[M]]:
        """The events after a number that were sent before, as far as the credit covers them."""
        again: list[Sent[M]] = []
        size = 0
        while (sent := self._replay.after(sequence)) is not None:
            payload = sent.message.payload
            if not (self._fits(again, size + payload) and self._credit.try_spend(payload)):
                break
            again.append(sent)
            sequence, size = sent.sequence, size + sent.message.weight
        return again

    def _fits(self, batch: Sequence[Sent[M]], size: int) -> bool:
        """Whether another event may join a batch, which would then have so many bytes."""
        if not batch:
            return True
        return self._queue.batched and len(batch) < BATCH_EVENTS and size <= BATCH_BYTES

    def _sign_of_sequence(self) -> capture_service_pb2.Heartbeat:
        return capture_service_pb2.Heartbeat(
            buffered_bytes=self._memory.waiting + self._queue.bytes,
            credit_bytes=self._credit.left,
            last_sequence=self._replay.last,
        )
