"""The events of a watch that were not sent yet.

Invariants: events leave in the order in which they came. Waiting and sent events stay within the
memory of the watch: if it is full, the oldest waiting signals are dropped, and their positions are
reported before the next event. Beginnings and ends of requests are never dropped.
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
    """What was read in a step. The first four lists have one entry for each sample."""

    watched: list[WatchedRequest]
    samples: list[int]
    firsts: list[int]
    """First positions."""
    counts: list[int]
    """Numbers of rows."""
    values: npt.NDArray[np.float32]
    """[rows, columns]."""
    firings: list[tuple[int, int]]
    """Row and rule of each firing."""

    @property
    def weight(self) -> int:
        """Bytes of memory."""
        labels = _ROW_BYTES * (len(self.watched) + len(self.firings))
        return _EVENT_BYTES + labels + self.values.nbytes


class SignalMessage(NamedTuple):
    """A message without its sequence number."""

    response: monitor_service_pb2.WatchResponse
    payload: int

    def numbered(self, sequence: int) -> MessageParts:
        """The message with a sequence number."""
        self.response.sequence = sequence
        return MessageParts((self.response.SerializeToString(),))


Notice = monitor_service_pb2.WatchResponse
"""The beginning or the end of a request."""


class SignalBuffer:
    """Waiting events of one watch. Used on the event loop alone."""

    def __init__(self, limit: int, on_full: Callable[[CaptureOverflow], None]) -> None:
        """An empty buffer.

        Args:
            limit: the most bytes that may wait or be kept.
            on_full: is called if beginnings and ends of requests alone fill it.
        """
        self.limit = limit
        self.news = asyncio.Event()
        self.kept = 0
        self.batched = False
        self.lost_positions = 0
        """Positions whose readings were dropped."""
        self._on_full = on_full
        self._events: deque[Step | Notice] = deque()
        self._waiting = 0
        self._steps = 0
        """Number of waiting steps."""
        self._lossy: dict[WatchedRequest, None] = {}
        """Requests with dropped positions that were not reported."""
        self._head: SignalMessage | None = None
        """The message of the first event, or of dropped positions before it."""
        self._head_is_event = False

    def __len__(self) -> int:
        """Number of events."""
        return len(self._events) + len(self._lossy)

    @property
    def waiting(self) -> int:
        """Bytes that were not sent yet."""
        return self._waiting

    @property
    def bytes(self) -> int:
        """Zero, because `waiting` counts all events."""
        return 0

    def add_step(self, step: Step) -> None:
        """Adds the readings of a step."""
        self._events.append(step)
        self._steps += 1
        self._waiting += step.weight
        self._make_room()
        self.news.set()

    def add_notice(self, notice: Notice) -> None:
        """Adds the beginning or the end of a request."""
        self._events.append(notice)
        self._waiting += _EVENT_BYTES
        self._make_room()
        self.news.set()

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
        event, self._head = self._head, None
        if event is None or not self._head_is_event:
            return
        first = self._events.popleft()
        if isinstance(first, Step):
            self._steps -= 1
            self._waiting -= first.weight
            for watched, count in zip(first.watched, first.counts, strict=True):
                watched.position_count += count
        else:
            self._waiting -= _EVENT_BYTES

    def clear(self) -> None:
        """Removes all events."""
        self._events.clear()
        self._lossy.clear()
        self._waiting = self._steps = 0
        self._head = None

    def close(self) -> None:
        """Drops everything."""
        self.clear()
        self.kept = 0

    def _make_room(self) -> None:
        """Drops the oldest steps until the rest fits."""
        while self._waiting + self.kept > self.limit and self._steps:
            index = next(
                index for index, event in enumerate(self._events) if isinstance(event, Step)
            )
            self._drop(index)
        if self._waiting > self.limit:
            self._on_full(
                CaptureOverflow(
                    f"{len(self._events)} beginnings and ends of requests wait to be read: read "
                    "and acknowledge faster, watch fewer requests, or ask for more buffer_bytes"
                )
            )

    def _drop(self, index: int) -> None:
        step = self._events[index]
        assert isinstance(step, Step)
        del self._events[index]
        if not index and self._head_is_event:
            self._head = None
        self._steps -= 1
        self._waiting -= step.weight
        for watched, sample, first, count in zip(
            step.watched, step.samples, step.firsts, step.counts, strict=True
        ):
            watched.dropped.setdefault(sample, []).append((first, first + count))
            watched.dropped_position_count += count
            self.lost_positions += count
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
            self._head, self._head_is_event = SignalMessage(response, 0), False
        elif self._events:
            event = self._events[0]
            self._head_is_event = True
            if isinstance(event, Step):
                self._head = SignalMessage(_signals(event), event.values.nbytes)
            else:
                self._head = SignalMessage(event, 0)


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
    for row, rule in step.firings:
        signals.firings.add(row=row, rule=rule)
    return response
