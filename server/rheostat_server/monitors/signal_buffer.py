"""The events of a watch that wait to be sent.

Invariants: events are sent in the order in which they were added. Events that wait or are not
acknowledged fit the watch's buffer. If it is full, the oldest waiting signals are dropped. Their
positions are reported before the next event, but after the beginning of their request. Beginnings
and ends of requests are never dropped.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rheostat_server.delivery.row_messages import add_runs
from rheostat_server.errors import CaptureOverflow
from rheostat_server.selectors.spans import united
from rheostat_wire.message_parts import MessageParts
from rheostat_wire.v1 import monitor_service_pb2, tensor_pb2

_pb = monitor_service_pb2

_EVENT_BYTES = 512
"""Approximate memory of an event without its numbers."""

_ROW_BYTES = 32
"""Approximate memory of the labels of a sample in a step."""

_FIRING_BYTES = 64
"""Approximate memory of a firing, once it is encoded."""

_ENCODED = 4
"""Memory of a message in Python, divided by its encoded size."""


@dataclass(eq=False)
class WatchedRequest:
    """A request that a watch reads."""

    number: int
    """Its number in the watch."""
    request_id: str
    slots: tuple[int, ...]
    """The slot of each sample in the summaries."""
    position_count: int = 0
    """Positions whose readings were sent."""
    dropped_position_count: int = 0
    dropped: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Dropped positions that were not reported, by sample."""


class Step(NamedTuple):
    """The readings of a step. The first four lists have one entry for each sample."""

    watched: list[WatchedRequest]
    samples: list[int]
    firsts: list[int]
    """First positions."""
    counts: list[int]
    """Numbers of rows."""
    values: npt.NDArray[np.float32]
    """[rows, columns]."""
    firings: npt.NDArray[np.int64]
    """[firings, 2]: row and rule of each firing."""

    @property
    def weight(self) -> int:
        """Bytes of memory."""
        labels = _ROW_BYTES * len(self.watched) + _FIRING_BYTES * len(self.firings)
        return _EVENT_BYTES + labels + self.values.nbytes


class SignalMessage(NamedTuple):
    """A message without its sequence number."""

    response: monitor_service_pb2.WatchResponse
    payload: int
    weight: int = _EVENT_BYTES

    def numbered(self, sequence: int) -> MessageParts:
        """The message with a sequence number."""
        self.response.sequence = sequence
        return MessageParts((self.response.SerializeToString(),))


class Notice(NamedTuple):
    """The beginning or the end of a request."""

    response: monitor_service_pb2.WatchResponse
    weight: int
    """Bytes of memory."""
    begins: WatchedRequest | None = None
    """The request whose beginning it is."""


class SignalBuffer:
    """Waiting events of one watch. Used on the event loop alone."""

    def __init__(self, limit: int, on_full: Callable[[CaptureOverflow], None]) -> None:
        """An empty buffer.

        Args:
            limit: the most bytes of events that may wait or be unacknowledged.
            on_full: called if beginnings and ends of requests alone fill it.
        """
        self.limit = limit
        self.news = asyncio.Event()
        self.kept = 0
        self.batched = False
        self.lost_positions = 0
        """Positions whose readings were dropped."""
        self._on_full = on_full
        self._steps: deque[tuple[int, Step]] = deque()
        """Waiting steps, each with the number of events that were added before it."""
        self._notices: deque[tuple[int, Notice]] = deque()
        """Waiting notices, with such numbers."""
        self._added = 0
        """Number of events that were added."""
        self.waiting = 0
        """Bytes that were not sent yet."""
        self._lossy: dict[WatchedRequest, None] = {}
        """Requests with dropped positions that are to be reported next."""
        self._unannounced: set[WatchedRequest] = set()
        """Requests whose beginning was not sent."""
        self._head: SignalMessage | None = None
        """The message of the first event, or of dropped positions before it."""
        self._head_event: Step | Notice | None = None
        """The event of `_head`; None if `_head` reports dropped positions."""

    def __len__(self) -> int:
        """Number of events."""
        return len(self._steps) + len(self._notices) + len(self._lossy)

    @property
    def bytes(self) -> int:
        """Zero, because `waiting` counts all events."""
        return 0

    def add_step(self, step: Step) -> None:
        """Adds the readings of a step."""
        self._steps.append((self._added, step))
        self._add(step.weight)

    def add_notice(
        self,
        response: monitor_service_pb2.WatchResponse,
        begins: WatchedRequest | None = None,
    ) -> None:
        """Adds the beginning or the end of a request.

        Args:
            response: the message.
            begins: the request that begins; None for an end.
        """
        notice = Notice(response, _EVENT_BYTES + _ENCODED * response.ByteSize(), begins)
        if begins is not None:
            self._unannounced.add(begins)
        self._notices.append((self._added, notice))
        self._add(notice.weight)

    def prepare(self) -> None:
        """Does nothing, because messages are cheap."""

    async def message(self) -> SignalMessage | None:
        """The first event's message; None if there is none."""
        return self.encoded()

    def encoded(self) -> SignalMessage | None:
        """The first event's message; None if there is none."""
        if self._head is None:
            self._encode()
        return self._head

    def take(self) -> None:
        """Removes the event whose message `encoded` has returned."""
        event = self._head_event
        self._head = self._head_event = None
        if event is None:
            return
        self.waiting -= event.weight
        if isinstance(event, Notice):
            self._notices.popleft()
            if event.begins is not None:
                self._unannounced.discard(event.begins)
                if event.begins.dropped:
                    self._lossy[event.begins] = None
            return
        self._steps.popleft()
        for watched, count in zip(event.watched, event.counts, strict=True):
            watched.position_count += count

    def clear(self) -> None:
        """Removes all events."""
        self._steps.clear()
        self._notices.clear()
        self._lossy.clear()
        self._unannounced.clear()
        self.waiting = 0
        self._head = self._head_event = None

    def close(self) -> None:
        """Drops everything."""
        self.clear()
        self.kept = 0
        self._on_full = lambda _: None  # it refers to the watch, which refers to this buffer

    def _add(self, weight: int) -> None:
        self._added += 1
        self.waiting += weight
        self._make_room()
        self.news.set()

    def _make_room(self) -> None:
        """Drops the oldest steps until the other events fit."""
        while self.waiting + self.kept > self.limit and self._steps:
            self._drop()
        if self.waiting > self.limit:
            self._on_full(
                CaptureOverflow(
                    f"{len(self._notices)} beginnings and ends of requests wait to be read: read "
                    "and acknowledge faster, watch fewer requests, or ask for more buffer_bytes"
                )
            )

    def _drop(self) -> None:
        _, step = self._steps.popleft()
        if step is self._head_event:
            self._head = self._head_event = None
        self.waiting -= step.weight
        for watched, sample, first, count in zip(
            step.watched, step.samples, step.firsts, step.counts, strict=True
        ):
            watched.dropped.setdefault(sample, []).append((first, first + count))
            watched.dropped_position_count += count
            self.lost_positions += count
            if watched not in self._unannounced:
                self._lossy[watched] = None

    def _encode(self) -> None:
        if self._lossy:
            watched = next(iter(self._lossy))
            sample, spans = next(iter(watched.dropped.items()))
            del watched.dropped[sample]
            if not watched.dropped:
                del self._lossy[watched]
            response = _pb.WatchResponse()
            response.dropped.number, response.dropped.sample = watched.number, sample
            add_runs(response.dropped.positions.add, united(spans))
            self._head = SignalMessage(response, 0)
        elif self._steps and (not self._notices or self._steps[0][0] < self._notices[0][0]):
            step = self._steps[0][1]
            self._head = SignalMessage(_signals(step), step.values.nbytes, step.weight)
            self._head_event = step
        elif self._notices:
            notice = self._notices[0][1]
            self._head = SignalMessage(notice.response, 0, notice.weight)
            self._head_event = notice


def _signals(step: Step) -> monitor_service_pb2.WatchResponse:
    response = _pb.WatchResponse()
    signals = response.signals
    signals.numbers.extend([watched.number for watched in step.watched])
    signals.samples.extend(step.samples)
    signals.first_positions.extend(step.firsts)
    signals.row_counts.extend(step.counts)
    signals.values.dtype = tensor_pb2.DTYPE_FLOAT32
    signals.values.encoding = tensor_pb2.ENCODING_RAW
    signals.values.shape.extend(step.values.shape)
    signals.values.inline = step.values.tobytes()
    for row, rule in step.firings.tolist():
        signals.firings.add(row=row, rule=rule)
    return response
