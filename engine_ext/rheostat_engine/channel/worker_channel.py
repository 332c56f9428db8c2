"""The server's end of the side channel: converts frames from all workers to events of requests.

Order
    A request's events are delivered in order. Events other than rows wait until every reporting
    worker has sent them. So no row comes before `Installed` or after `Released`.
Failures
    If an event fails, the error is logged and counted, and its request receives `Dropped`. A frame
    that can't be parsed is logged and skipped. Rows that can't be read are counted as lost. Later
    events are unaffected.
Cost
    Rows are copied out of the workers' memory at once. Rows of decode steps are batched; see
    `RowBatcher`. While the event loop is behind, no frame is received. vLLM's step outputs are not
    involved.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from rheostat_engine.channel.events import (
    Attached,
    AttachedHead,
    ControllerDisabledHead,
    Dropped,
    Event,
    GainsHead,
    Head,
    Installed,
    InstalledHead,
    Released,
    ReleasedHead,
    ReportHead,
    RowArray,
    RowBlocks,
    Rows,
    RowsHead,
    SignalRows,
    SignalsHead,
    copy_arrays,
    decode_head,
    signal_rows,
    split_rows,
)
from rheostat_engine.channel.frame_copies import FrameCopies
from rheostat_engine.channel.row_batcher import RowBatcher
from rheostat_engine.channel.staging import StagingError, StagingReader, StagingReport
from rheostat_engine.settings import EngineSettings

_LOG = logging.getLogger(__name__)

_FRAMES = 16
"""Frames that may wait for the event loop. Beyond it the workers wait. Once their staging areas are
full, they lose rows and report the loss."""

_STOP_POLL = 0.2
"""Seconds between checks for a stop, while the event loop is behind."""

_EVENTS_PER_ITERATION = 64
"""Events per iteration of the event loop. A frame may have thousands, which must not delay other
clients' tokens."""

_SECONDS_PER_ITERATION = 0.01
"""Seconds of the thread's CPU time after the first event of an iteration, after which the iteration
delivers no further event. Without this limit, rows of several frames took up to 32 ms."""

_COPY_THREADS = 4
"""Threads that copy large frames, because one thread is slower than a device."""

_BYTES_PER_THREAD = 1 << 20
"""Bytes per thread from which on threads pay off."""

Payload = bytes | memoryview | npt.NDArray[np.uint8]
"""The rows or signals of a frame. `Rows` refer to an array; bytes and memoryviews are copied."""


class EventMerger:
    """Merges the reports of several workers about a request."""

    def __init__(
        self,
        ranks: int,
        copies: Callable[[Sequence[RowArray]], list[RowArray]] = copy_arrays,
        batcher: RowBatcher | None = None,
    ) -> None:
        """`ranks` is the number of reporting workers; `copies` copies arrays."""
        self._ranks = ranks
        self._copies = copies
        self._batcher = batcher or RowBatcher(FrameCopies())
        self._names: dict[int, dict[int, str]] = {}
        self._installed: dict[str, list[str]] = {}
        self._attached: dict[tuple[str, int], list[Attached]] = {}
        self._gained: Counter[tuple[str, int]] = Counter()
        """Number of workers that have reported a change of gains."""
        self._early: dict[str, list[Rows]] = {}
        self._released: dict[str, list[Released]] = {}
        self._lost: dict[tuple[int, int], Counter[int]] = {}
        """By (rank, the worker's number of the request): rows lost after sending, by site."""

    def feed(self, head: Head, rows: Payload = b"") -> list[Event]:
        """Merges a frame and returns the events that it completes.

        Raises:
            LookupError, OverflowError, ValueError: the frame is malformed.
        """
        if isinstance(head, RowsHead):
            if head.lost:
                return self._count_lost(head)
            return self._hold_early(self._split(head, rows))
        if isinstance(head, SignalsHead):
            return [self._signals(head, rows)]
        if isinstance(head, InstalledHead):
            return self._on_installed(head)
        if isinstance(head, AttachedHead):
            return self._on_attached(head)
        if isinstance(head, GainsHead):
            return self._on_gains(head)
        if isinstance(head, ControllerDisabledHead):
            return [head.report]
        return self._on_released(head)

    @property
    def due(self) -> float | None:
        """Seconds until `take_due` returns rows; None if no rows wait."""
        return self._batcher.due

    def take_due(self) -> list[Event]:
        """The events of batched rows whose delay is over."""
        rows, lost = self._batcher.take_due(self._names)
        for rank, number, sites in lost:
            self._lost.setdefault((rank, number), Counter()).update(sites)
        return self._hold_early(rows)

    def _split(self, head: RowsHead, rows: Payload) -> list[Rows]:
        """The events of a frame of rows, except rows that are batched."""
        names = self._names[head.rank]
        blocks = RowBlocks(head)
        if blocks.bytes != len(rows):
            raise ValueError(f"a frame of {len(rows)} bytes labels {blocks.bytes}")
        if not names.keys() >= set(blocks.number.tolist()):
            raise LookupError(f"rows of requests that worker {head.rank} does not have")
        if not isinstance(rows, np.ndarray):
            earlier = self._batcher.take(head.rank, blocks.number.tolist(), names)
            return earlier + split_rows(blocks, rows, names, self._copies)
        earlier, others = self._batcher.add(head.rank, blocks, rows, names)
        return earlier + split_rows(blocks, rows, names, list, others.tolist())

    def skip(self, head: Head | None) -> list[Event]:
        """The events in place of a frame that `feed` refused, so that no reader waits for it.

        `head` is None if it can't be parsed.
        """
        if isinstance(head, RowsHead):
            with contextlib.suppress(LookupError, OverflowError, ValueError):
                return self._count_lost(head)
        if isinstance(head, SignalsHead):
            with contextlib.suppress(LookupError, ValueError):
                return [self._signals(head.as_lost)]
        if isinstance(head, ReleasedHead):
            nothing = Released(head.report.request_id, (), False, {}, 0, 0, (0, 0))
            return [Dropped(nothing)]
        return []

    def _signals(self, head: SignalsHead, values: Payload = b"") -> SignalRows:
        """The event of a frame of signals.

        They need not wait for `Installed`: gates are read with a single reporting worker alone.
        """
        return signal_rows(head, None if head.lost else bytes(values), self._names[head.rank])

    def _hold_early(self, rows: list[Rows]) -> list[Event]:
        ready: list[Event] = []
        for event in rows:
            if event.request_id in self._installed:
                self._early.setdefault(event.request_id, []).append(event)
            else:
                ready.append(event)
        return ready

    def _count_lost(self, head: RowsHead) -> list[Event]:
        blocks = RowBlocks(head)
        for number, which, count in zip(
            blocks.number.tolist(), blocks.which.tolist(), blocks.count.tolist(), strict=True
        ):
            lost = self._lost.setdefault((head.rank, number), Counter())
            lost.update(dict.fromkeys(blocks.site_sets[which], count))
        return []

    def _on_installed(self, head: InstalledHead) -> list[Event]:
        request_id = head.report.request_id
        self._names.setdefault(head.rank, {})[head.number] = request_id
        errors = self._installed.setdefault(request_id, [])
        errors.append(head.report.error)
        if len(errors) < self._ranks:
            return []
        del self._installed[request_id]
        error = next(filter(None, errors), "")
        return [Installed(request_id, error), *self._early.pop(request_id, [])]

    def _on_attached(self, head: AttachedHead) -> list[Event]:
        rows = self._last_rows(head)
        key = head.report.request_id, head.report.change
        reports = self._attached.setdefault(key, [])
        reports.append(head.report)
        if len(reports) < self._ranks:
            return rows
        del self._attached[key]
        error = next((report.error for report in reports if report.error), "")
        return [*rows, Attached(*key, max(report.first for report in reports), error)]

    def _on_gains(self, head: GainsHead) -> list[Event]:
        events: list[Event] = []
        for gained in head.changes:
            key = gained.request_id, gained.change
            self._gained[key] += 1
            if self._gained[key] == self._ranks:  # all of them name one position
                del self._gained[key]
                events.append(gained)
        return events

    def _last_rows(self, head: ReportHead) -> list[Event]:
        """The batched rows of a request, which must precede a report about it."""
        names = self._names.get(head.rank, {})
        return self._hold_early(self._batcher.take(head.rank, (head.number,), names))

    def _on_released(self, head: ReleasedHead) -> list[Event]:
        rows = self._last_rows(head)
        del self._names[head.rank][head.number]
        lost = self._lost.pop((head.rank, head.number), Counter())
        report = _corrected(head.report, lost)
        if self._ranks == 1:
            return [*rows, report]
        request_id = report.request_id
        reports = self._released.setdefault(request_id, [])
        reports.append(report)
        if len(reports) < self._ranks:
            return rows
        del self._released[request_id]
        merged = replace(
            reports[0],
            doses=tuple(sorted(dose for report in reports for dose in report.doses)),
            measured=all(report.measured for report in reports),
            captured={site: count for report in reports for site, count in report.captured.items()},
            lost_rows=sum(report.lost_rows for report in reports),
            preemptions=max(report.preemptions for report in reports),
        )
        return [*rows, merged]


def _corrected(released: Released, lost: Counter[int]) -> Released:
    """A worker's last report, corrected by the rows that were lost after it counted them."""
    if not lost:
        return released
    left = {site: count - lost[site] for site, count in released.captured.items()}
    return replace(
        released,
        captured={site: count for site, count in left.items() if count > 0},
        lost_rows=released.lost_rows + lost.total(),
    )


class EventQueue:
    """Delivers events on the event loop, in order.

    The events of an iteration of the loop, and their CPU time, are limited.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[Event], None],
        frame_done: Callable[[], None],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """All methods are called on the event loop.

        Args:
            loop: the event loop.
            deliver: receives each event.
            frame_done: called once for each frame, after its last event.
            clock: returns the CPU time of the thread, in seconds.
        """
        self.failed = 0
        """Events for which `deliver` raised an exception."""
        self._loop = loop
        self._deliver = deliver
        self._frame_done = frame_done
        self._clock = clock
        self._waiting: deque[Event | None] = deque()
        self._left = _EVENTS_PER_ITERATION
        """Events that may still be delivered in this iteration."""
        self._end: float | None = None
        """The value of the clock after which this iteration delivers nothing. None: it has not
        delivered an event."""

    def put(self, events: Sequence[Event]) -> None:
        """Adds a frame's events."""
        deliver = not self._waiting
        self._waiting.extend(events)
        self._waiting.append(None)
        if deliver:
            self._deliver_some()

    def _deliver_some(self) -> None:
        if self._end is None:
            self._left = _EVENTS_PER_ITERATION
            self._end = self._clock() + _SECONDS_PER_ITERATION
            self._loop.call_soon(self._begin_iteration)
        while self._waiting and self._left and self._clock() < self._end:
            self._left -= 1
            event = self._waiting.popleft()
            if event is None:
                self._frame_done()
            else:
                self._deliver_one(event)

    def _begin_iteration(self) -> None:
        self._end = None
        if self._waiting:
            self._deliver_some()

    def _deliver_one(self, event: Event) -> None:
        try:
            self._deliver(event)
        except Exception:  # any error, because later events belong to other requests
            self.failed += 1
            _LOG.exception(
                "an event of request %s could not be processed (%d failures since the start)",
                event.request_id,
                self.failed,
            )
            if not isinstance(event, Dropped):
                self._deliver_one(Dropped(event))


class WorkerChannel:
    """Receives frames on its own thread, and delivers events on an event loop."""

    def __init__(self, settings: EngineSettings, *, ranks: int) -> None:
        """Binds `settings.channel`.

        Raises:
            zmq.ZMQError: the address can't be bound.
        """
        self._frames = FrameCopies()
        self._merger = EventMerger(ranks, self._copies, RowBatcher(self._frames))
        self._copy_threads = ThreadPoolExecutor(_COPY_THREADS, thread_name_prefix="rheostat-copy")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, _FRAMES)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(settings.channel)
        except zmq.ZMQError:
            self._context.destroy()  # the garbage collector would wait for its socket
            raise
        self._address = settings.channel
        self._stop_address = f"inproc://stop-{id(self):x}"
        self._socket.bind(self._stop_address)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._free_frames = threading.Semaphore(_FRAMES)
        self._areas: dict[int, StagingReader] = {}

    def attach(self, reports: Sequence[Mapping[str, object]]) -> None:
        """Maps the workers' staging areas, before the first rows arrive.

        Args:
            reports: the results of `rheostat_describe` from all workers.

        Raises:
            StagingError: an area can't be mapped.
        """
        areas = [cast(StagingReport | None, report["staging"]) for report in reports]
        self._areas = {area["rank"]: StagingReader(area) for area in areas if area is not None}

    def start(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Event], None]) -> None:
        """Starts the thread, which calls `deliver` on `loop` for every event.

        If `deliver` raises, it is called again with `Dropped`.
        """
        events = EventQueue(loop, deliver, self._free_frames.release)
        self._thread = threading.Thread(
            target=self._receive, args=(loop, events), name="rheostat-channel", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops receiving and frees the address."""
        if self._thread is not None:
            self._stopping.set()
            with self._context.socket(zmq.PUSH) as waking:
                waking.connect(self._stop_address)
                waking.send(b"")  # the thread waits for a message
            self._thread.join()
            self._thread = None
        self._socket.close()
        self._context.term()
        self._copy_threads.shutdown()
        self._areas = {}
        if self._address.startswith("ipc://"):
            Path(self._address.removeprefix("ipc://")).unlink(missing_ok=True)

    def _receive(self, loop: asyncio.AbstractEventLoop, events: EventQueue) -> None:
        try:
            while not self._stopping.is_set():
                arrived: list[Event] = []
                for data in self._next_heads():
                    arrived += self._events_of(data)
                if self._merger.due == 0:
                    arrived += self._merger.take_due()
                if not arrived:
                    continue
                while not self._free_frames.acquire(timeout=_STOP_POLL):
                    if self._stopping.is_set():
                        return
                loop.call_soon_threadsafe(events.put, arrived)
        except RuntimeError:
            _LOG.info("the event loop is closed; the side channel stops")
            self._stopping.wait()

    def _next_heads(self) -> list[bytes]:
        """Waits for a message; returns its heads. Empty: rows are due, or the thread must stop."""
        due = self._merger.due
        # `poll` takes twice the time of `recv`, so the usual step without rows that wait skips it.
        if due is not None and not self._socket.poll(math.ceil(due * 1e3)):
            return []
        heads = [self._socket.recv()]
        while self._socket.getsockopt(zmq.RCVMORE):
            heads.append(self._socket.recv())
        return [] if self._stopping.is_set() else heads

    def _events_of(self, data: bytes) -> list[Event]:
        """The events of a head."""
        head = None
        try:
            head = decode_head(data)
            if isinstance(head, RowsHead | SignalsHead):
                return self._rows_of(head)
            return self._merger.feed(head)
        except (msgspec.MsgspecError, LookupError, OverflowError, ValueError, MemoryError):
            _LOG.exception("a frame of the side channel could not be parsed and was skipped")
            return self._merger.skip(head)

    def _copies(self, arrays: Sequence[RowArray]) -> list[RowArray]:
        if (
            len(arrays) < _COPY_THREADS
            or sum(array.nbytes for array in arrays) < _COPY_THREADS * _BYTES_PER_THREAD
        ):
            return copy_arrays(arrays)
        shares = [arrays[first::_COPY_THREADS] for first in range(_COPY_THREADS)]
        copies: list[RowArray] = [*arrays]
        for first, share in enumerate(self._copy_threads.map(copy_arrays, shares)):
            copies[first::_COPY_THREADS] = share
        return copies

    def _rows_of(self, head: RowsHead | SignalsHead) -> list[Event]:
        """The events of a frame of rows or signals. Its range is freed even if it is malformed."""
        if head.staging_range is None:
            return self._merger.feed(head.as_lost)
        try:
            if head.rank not in self._areas:
                raise StagingError(f"the staging area of worker {head.rank} was never attached")
            with self._areas[head.rank].taken(head.staging_range) as rows:
                if isinstance(head, SignalsHead):
                    return self._merger.feed(head, rows)
                copied = self._frames.copy(rows)
                if copied is None:
                    return self._merger.feed(head, rows)
            return self._merger.feed(head, copied)
        except (StagingError, MemoryError):
            _LOG.exception("captured rows or signals could not be read and are lost")
            return self._merger.feed(head.as_lost)
