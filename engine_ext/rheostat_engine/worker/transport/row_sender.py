"""Encodes rows and copies them into the staging area, while the next step runs.

Invariants: `send_rows` does not wait for a device, and its cost does not depend on the number of
rows, but for a small copy on a CPU. Their region of the ring may be written again after the
returned fence. If rows can't be encoded, they are
sent raw. If they can't be copied, they are reported as lost. So are signals, for which captured
rows leave a part of the staging area free. Encoding takes a bounded amount of device memory. Ranges
of the staging area are reserved in the order in which frames are sent.

Why few copies run at once
    A device runs copies in one direction in launch order, across all streams. Sampled tokens would
    wait for all rows of a step.

Why small copies do not take the thread
    A thread that wakes up in each step takes Python's lock from the step thread several times. So
    if this module's thread has nothing to do, the step thread itself launches the copy of a few
    raw rows or signals, and passes frames to the `EventSender`. Otherwise it queues them for the
    thread, because frames must not overtake each other. It also does so while the device still
    copies earlier rows, because the step's stream would wait for them.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import torch

from rheostat_engine.channel.events import Head, RowsHead, SignalsHead
from rheostat_engine.channel.staging import StagingRange, aligned
from rheostat_engine.worker.state.device_table import recorded_event
from rheostat_engine.worker.transport.event_sender import EventSender, Fence, Frame
from rheostat_engine.worker.transport.row_encodings import RowEncoder
from rheostat_engine.worker.transport.staging_area import StagingArea

_LOG = logging.getLogger(__name__)

_CHUNK = 16 << 20
"""Bytes of a chunk. A device copies it in about 0.3 ms."""

_SMALL = 256 << 10
"""Bytes of raw rows or signals up to which the step thread launches their copy: 32 rows of 4,096
elements, or 64 numbers of 1,024 tokens. At 25 GB/s the device copies them in 10 us, between two
steps."""

_NOT_COPIED = "captured rows or signals could not be copied off the device and are lost"

_LOG_INTERVAL = 60.0
"""Seconds between equal log messages about failed rows."""


class _StagingFull(Exception):
    """The staging area is full."""


class Group(NamedTuple):
    """Consecutive rows of a step with one encoding."""

    encoding: RowEncoder | None
    """None if the rows are raw."""
    rows: int

    def bytes(self, raw: int) -> int:
        """Bytes of the group; `raw` is the bytes of a raw row."""
        return self.rows * (raw if self.encoding is None else self.encoding.row_bytes)


class _PendingRows:
    """A step's rows in the queue; also the fence after which they were copied off the device."""

    __slots__ = ("_launched", "bytes", "copied", "groups", "head", "rows", "written")

    def __init__(
        self,
        head: RowsHead | SignalsHead,
        rows: torch.Tensor,
        groups: Sequence[Group],
        written: torch.cuda.Event | None,
    ) -> None:
        """`written` is the fence after which the rows are complete; None: they already are."""
        self.head = head
        self.rows = rows
        self.groups = groups
        self.written = written
        self.copied: Fence | None = None
        """The fence of the copies; set before `set_launched`."""
        raw = rows.nbytes
        encoded = any(group.encoding is not None for group in groups)
        self.bytes = aligned(max(raw, packed_bytes(rows, groups)) if encoded else raw)
        """The most bytes that the rows take in the staging area."""
        # A `threading.Event` would take ten times as long to make.
        self._launched = threading.Lock()
        self._launched.acquire()

    def set_launched(self) -> None:
        """Call this once the copies were launched or have failed."""
        self._launched.release()

    @property
    def captured(self) -> int:
        """The number of captured rows."""
        return len(self.rows) if isinstance(self.head, RowsHead) else 0

    def synchronize(self) -> None:
        """Waits until no copy reads the rows. Does not wait for the server."""
        with self._launched:
            pass
        if self.copied is not None:
            self.copied.synchronize()


class _InStreamOrder:
    """A fence of rows that are copied before any work which is launched later on their stream."""

    def synchronize(self) -> None:
        """Waits for nothing: what overwrites the rows is such later work."""


_IN_STREAM_ORDER = _InStreamOrder()


class PacedCopies:
    """Limits the copies to the host that run at once.

    Only the launching thread waits. Small copies share the event of a chunk.
    """

    def __init__(self, stream: torch.cuda.Stream | None, in_flight: int) -> None:
        """`stream` runs the copies; None if they are synchronous. `in_flight` as in `RowSender`."""
        self._stream = stream
        self._in_flight = in_flight
        self._ends: deque[torch.cuda.Event] = deque()
        self._bytes = 0
        """Bytes launched after the last of these events."""

    def copy(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Launches a copy chunk by chunk, and waits while too many chunks are being copied.

        `target` is uint8 on the host; `values`, on the device, has as many bytes.
        """
        values = values.view(torch.uint8).flatten()
        if len(values) <= _CHUNK:
            self._copy_chunk(target, values)
            return
        for chunk, part in zip(values.split(_CHUNK), target.split(_CHUNK), strict=True):
            self._copy_chunk(part, chunk)

    def _copy_chunk(self, target: torch.Tensor, chunk: torch.Tensor) -> None:
        if self._stream is not None and self._in_flight:
            self._wait(chunk.nbytes)
        target.copy_(chunk, non_blocking=True)

    def _wait(self, nbytes: int) -> None:
        if self._bytes + nbytes > _CHUNK:
            # A blocking event yields the core; a spinning wait would take it from the step thread.
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
            self._ends.append(event)
            self._bytes = 0
            while len(self._ends) >= self._in_flight:
                self._ends.popleft().synchronize()
        self._bytes += nbytes


class RowSender:
    """Sends the rows and events of one worker to the server."""

    def __init__(
        self,
        event_sender: EventSender,
        device: torch.device,
        area: StagingArea,
        *,
        scratch: int,
        in_flight: int = 2,
    ) -> None:
        """Starts the thread that encodes and copies rows, on its own stream on CUDA.

        `scratch` is the bytes of device memory for encoding; `in_flight` the number of chunks of
        16 MiB that are copied at once (0: no limit).
        """
        self.area = area
        self.scratch = scratch
        self.left_bytes = 0
        """Bytes of rows copied off the device."""
        self.plain_rows = 0
        """Rows sent raw because they could not be encoded."""
        self.kept_free = 0
        """Bytes of the staging area that captured rows leave free."""
        self._event_sender = event_sender
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copies = PacedCopies(self._stream, in_flight)
        self._queue: queue.SimpleQueue[Frame | _PendingRows | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending_bytes = 0
        """Bytes of queued rows without a range of the staging area."""
        self._queued = 0
        """Number of frames and rows that the step thread has put into the queue."""
        self._passed_on = 0
        """Number of them that the other thread has passed to the event sender."""
        self._last_copy: torch.cuda.Event | None = None
        """The end of the other thread's last copies; None: the device has ended them."""
        self._lost_rows = 0
        self._next_log: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="rheostat-rows", daemon=True)
        self._thread.start()

    @property
    def lost_rows(self) -> int:
        """Rows that could not be copied off the device, or whose frames were not sent."""
        return self._lost_rows + self._event_sender.lost_rows

    @property
    def free_bytes(self) -> int:
        """Bytes of additional captured rows that fit into the staging area."""
        with self._lock:
            return max(0, self.area.free_bytes - self._pending_bytes - self.kept_free)

    def send(self, frame: Frame) -> None:
        """Queues a frame without rows. Called by the step thread, as all methods that send."""
        if self._idle:
            self._event_sender.send(frame)
        else:
            self._put(frame)

    def send_rows(
        self, head: RowsHead | SignalsHead, rows: torch.Tensor, groups: Sequence[Group]
    ) -> Fence:
        """Copies or queues rows, [n, W], which the current stream's launched work writes.

        Args:
            head: the labels, group by group.
            rows: on the device.
            groups: the encodings, in row order.

        Returns:
            A fence after which the rows may be overwritten by work on the current stream.
        """
        raw = len(groups) == 1 and groups[0].encoding is None
        if raw and self._copies_at_once(rows):
            self._event_sender.send(self._copy_at_once(head, rows))
            return _IN_STREAM_ORDER
        pending = _PendingRows(head, rows, groups, recorded_event(self._device))
        self._count(pending.bytes)
        self._put(pending)
        return pending

    def send_signals(self, head: SignalsHead, values: torch.Tensor) -> None:
        """Queues signals, [n, columns] float32, which the current stream's launched work writes.

        Args:
            head: the labels.
            values: on the device; nothing else writes them.
        """
        if self._stream is not None and not self._copies_at_once(values):
            values.record_stream(self._stream)
        self.send_rows(head, values, [Group(None, len(values))])

    def _copies_at_once(self, values: torch.Tensor) -> bool:
        """Whether the step thread launches the copy of raw values itself."""
        if values.nbytes > _SMALL or not self._idle:
            return False
        # Without pinned memory, the step thread would wait for the device.
        return self._stream is None or (self.area.pinned and self._copied_all())

    def _copied_all(self) -> bool:
        """Whether the device has ended all copies of the other thread, which is idle."""
        if self._last_copy is not None and self._last_copy.query():
            self._last_copy = None
        return self._last_copy is None

    def _copy_at_once(self, head: RowsHead | SignalsHead, values: torch.Tensor) -> Frame:
        """Launches the copy of a few raw values on the current stream; returns their frame."""
        captured = len(values) if isinstance(head, RowsHead) else 0
        try:
            staging_range = self._fill(values.nbytes, 0, lambda to: copy_at_once(to, values))
            head = msgspec.structs.replace(head, staging_range=staging_range)
            copied = self._fence(None)
        except Exception:  # as in `_copy_rows`
            self._log_failure(_NOT_COPIED)
            self._lost_rows += captured
            stream = None if self._stream is None else torch.cuda.current_stream()
            return _lost(head, stream)
        self.left_bytes += values.nbytes
        return Frame(head, copied, (head.as_lost,), captured)

    @property
    def _idle(self) -> bool:
        """Whether the other thread has nothing left to send, so that no frame can be overtaken."""
        return self._queued == self._passed_on

    def _put(self, queued: Frame | _PendingRows) -> None:
        self._queued += 1
        self._queue.put(queued)

    def send_measured(
        self,
        measured: torch.Tensor,
        heads: Callable[[torch.Tensor], Sequence[Head]],
        fallback: Sequence[Head],
    ) -> None:
        """Queues frames that are built from measurements of the work launched so far.

        Args:
            measured: the measurements, on the device.
            heads: builds the frames' heads from the measurements on the host, on another thread.
            fallback: heads to send if that fails.
        """
        copied: Fence | None = None
        if self._stream is None:
            host = measured.clone()
        else:
            host = torch.empty(measured.shape, dtype=measured.dtype, pin_memory=True)
            self._stream.wait_stream(torch.cuda.current_stream())
            measured.record_stream(self._stream)
            with torch.cuda.stream(self._stream):
                host.copy_(measured, non_blocking=True)
                copied = self._fence(self._stream)
        self.send(Frame(lambda: heads(host), ready=copied, fallback=fallback))

    def close(self) -> None:
        """Sends the queued rows and frames, then stops."""
        self._queue.put(None)
        self._thread.join(timeout=5)
        self._event_sender.close()
        self.area.close()

    def _run(self) -> None:
        with torch.cuda.stream(self._stream):  # no effect for None
            while (queued := self._queue.get()) is not None:
                if isinstance(queued, _PendingRows):
                    queued = self._copy_rows(queued)
                self._event_sender.send(queued)
                self._passed_on += 1

    def _copy_rows(self, pending: _PendingRows) -> Frame:
        """Launches the copies of rows; returns their frame."""
        head = pending.head
        try:
            try:
                head = self._launch(pending)
            finally:
                # Launched copies read the rows, even if a later launch failed.
                pending.copied = self._last_copy = self._fence(self._stream)
        except (
            Exception
        ):  # any error, because the engine must continue, and the frame reports the loss
            self._log_failure(_NOT_COPIED)
            self._lost_rows += pending.captured
            if head.staging_range is None:  # otherwise the staging area counts the rows already
                self._count(-pending.bytes)
            return _lost(head, self._stream)
        finally:
            pending.set_launched()  # the step thread may be waiting in `Ring.reserve`
        assert head.staging_range is not None
        self.left_bytes += head.staging_range.size
        return Frame(head, pending.copied, (head.as_lost,), pending.captured)

    def _launch(self, pending: _PendingRows) -> RowsHead | SignalsHead:
        """Launches the copies of rows; returns their head with the range."""
        head = pending.head
        if self._stream is not None and pending.written is not None:
            self._stream.wait_event(pending.written)
        try:
            staging_range = self._pack(pending, pending.groups)
        except Exception:  # most likely out of device memory, which raw rows do not need
            if all(group.encoding is None for group in pending.groups):
                raise
            self._log_failure("captured rows could not be encoded and are sent raw")
            self.plain_rows += sum(group.rows for group in pending.groups if group.encoding)
            head = head.as_raw
            staging_range = self._pack(pending, [Group(None, len(pending.rows))])
        return msgspec.structs.replace(head, staging_range=staging_range)

    def _fence(self, stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        """A fence after the work launched on a stream; None if that work is complete.

        If `stream` is None, the current stream is meant.
        """
        if self._stream is None:
            return None
        # A blocking event, because the wait may take a whole step, and spinning would take a core.
        launched = torch.cuda.Event(blocking=True)
        launched.record(stream)
        return launched

    def _log_failure(self, message: str) -> None:
        """Logs the current exception at limited intervals, because a device may stay full."""
        if time.monotonic() >= self._next_log.get(message, 0.0):
            self._next_log[message] = time.monotonic() + _LOG_INTERVAL
            _LOG.exception(
                "%s; further failures within %.0f s are not logged", message, _LOG_INTERVAL
            )

    def _pack(self, pending: _PendingRows, groups: Sequence[Group]) -> StagingRange:
        """Reserves a range and launches the copies of rows into it."""
        rows, scratch, copies = pending.rows, self.scratch, self._copies
        return self._fill(
            packed_bytes(rows, groups),
            pending.bytes,
            lambda target: pack(rows, groups, target, scratch=scratch, copies=copies),
        )

    def _fill(
        self, size: int, pending: int, launch: Callable[[torch.Tensor], None]
    ) -> StagingRange:
        """Reserves a range of `size` bytes, and calls `launch` to launch the copies into it.

        From the reservation on, the area counts the rows, so they no longer count as `pending`
        bytes. Paced copies take a while to launch, and rows of later steps would find no space
        meanwhile.
        """
        with self._lock:
            staging_range = self.area.reserve(size)
            if staging_range is None:
                raise _StagingFull(f"{size} bytes do not fit into the free staging memory")
            self._pending_bytes -= pending
        try:
            launch(self.area[staging_range])
        except BaseException:
            with self._lock:
                self.area.ranges.give_back(staging_range)
                self._pending_bytes += pending
            raise
        return staging_range

    def _count(self, change: int) -> None:
        with self._lock:
            self._pending_bytes += change


def _lost(head: RowsHead | SignalsHead, stream: Fence | None) -> Frame:
    """The frame of rows or signals that are lost.

    It waits for the stream: a copy may be launched whose fence could not be recorded, and the
    server gives the range back once it has the frame.
    """
    return Frame(head.as_lost, stream, (head.as_lost,))


def copy_at_once(target: torch.Tensor, values: torch.Tensor) -> None:
    """Launches a copy in one piece. `target` and `values` as in `PacedCopies.copy`."""
    target.copy_(values.view(torch.uint8).flatten(), non_blocking=True)


def packed_bytes(rows: torch.Tensor, groups: Sequence[Group]) -> int:
    """Bytes of rows, [n, W], with their encodings."""
    raw = rows.shape[1] * rows.element_size()
    return sum(group.bytes(raw) for group in groups)


def pack(
    rows: torch.Tensor,
    groups: Sequence[Group],
    target: torch.Tensor,
    *,
    scratch: int,
    copies: PacedCopies,
) -> None:
    """Launches the encoding of rows, [n, W], and their copies to `target`, uint8 on the host.

    Encoding takes at most `scratch` bytes of device memory at once.
    """
    if len(groups) == 1 and groups[0].encoding is None:  # the usual case, in one copy
        copies.copy(target, rows)
        return
    raw = rows.shape[1] * rows.element_size()
    parts = rows.split([group.rows for group in groups])
    targets = target.split([group.bytes(raw) for group in groups])
    for group, part, packed in zip(groups, parts, targets, strict=True):
        if group.encoding is None:
            copies.copy(packed, part)
            continue
        at_once = max(1, scratch // group.encoding.scratch)
        slabs = packed.split(at_once * group.encoding.row_bytes)
        for rows_of_slab, slab in zip(part.split(at_once), slabs, strict=True):
            copies.copy(slab, group.encoding.encode(rows_of_slab))
