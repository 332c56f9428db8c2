"""How rows leave the device: encoded and copied into the staging area while the next step runs.

Invariant: handing rows over costs the step thread no wait and no work that grows with them; their
region of the ring may be written again once the returned fence has happened. Rows that can't be
brought into their form leave as they are; those that can't leave at all are said to be lost.
Encoding takes no more memory of the device at once than it was given. Ranges of the staging area
are reserved in the order in which their frames are sent.

Why only few pieces are under way at once: a device runs copies in one direction in the order in
which they were launched, whatever their streams. Sampled tokens would wait for all rows of a step.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import torch

from rheostat_engine.core.delivery import Delivery, Frame
from rheostat_engine.core.forms import Made
from rheostat_engine.core.ring import Fence
from rheostat_engine.core.staging import StagingArea
from rheostat_engine.events import Head, RowsHead
from rheostat_engine.staging import Place, aligned

_LOG = logging.getLogger(__name__)

_PIECE = 16 << 20
"""Bytes of a piece: what a device copies in about 0.3 ms."""

_QUIET = 60.0
"""Seconds between two words in the log about rows that do not leave as they should."""


class _NoRoom(Exception):
    """The staging area is full."""


class Group(NamedTuple):
    """Rows of a step that lie together and have one form."""

    form: Made | None
    """The form; None: as they are."""
    rows: int
    """How many."""

    def bytes(self, raw: int) -> int:
        """Bytes of them all, `raw` being those of a row as it is."""
        return self.rows * (raw if self.form is None else self.form.row_bytes)


@dataclass
class _Leaving:
    """A step's rows that have not left; a fence that says when they have."""

    head: RowsHead
    rows: torch.Tensor
    groups: Sequence[Group]
    written: torch.cuda.Event | None
    """When the rows hold what they should."""
    handled: threading.Event = field(default_factory=threading.Event)
    left: Fence | None = None
    """Known once it is handled."""

    @property
    def bytes(self) -> int:
        """The most that they take in the staging area."""
        return aligned(max(self.rows.nbytes, packed_bytes(self.rows, self.groups)))

    def synchronize(self) -> None:
        """Waits until nothing reads the rows any more; never for the server."""
        self.handled.wait()
        if self.left is not None:
            self.left.synchronize()


class PacedCopies:
    """Copies to the host, with few pieces under way at once.

    Only the thread that launches the copies waits. Copies smaller than a piece share its event.
    """

    def __init__(self, stream: torch.cuda.Stream | None, in_flight: int) -> None:
        """Nothing is under way.

        Args:
            stream: runs the copies; None: they are over when `copy` returns.
            in_flight: pieces that may be under way; 0: all of them.
        """
        self._stream = stream
        self._in_flight = in_flight
        self._ends: deque[torch.cuda.Event] = deque()
        self._bytes = 0
        """Bytes that were launched after the last of these events."""

    def copy(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Launches a copy, piece by piece; waits while too many pieces are under way.

        Args:
            target: on the host, uint8.
            values: on the device, of as many bytes.
        """
        pieces = values.view(torch.uint8).flatten().split(_PIECE)
        for piece, wanted in zip(pieces, target.split(_PIECE), strict=True):
            if self._stream is not None and self._in_flight:
                self._wait(piece.nbytes)
            wanted.copy_(piece, non_blocking=True)

    def _wait(self, nbytes: int) -> None:
        if self._bytes + nbytes > _PIECE:
            # A blocking event yields the core. Spinning would take it from the step thread.
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
            self._ends.append(event)
            self._bytes = 0
            while len(self._ends) >= self._in_flight:
                self._ends.popleft().synchronize()
        self._bytes += nbytes


class Outlet:
    """Rows and events of one worker, on their way to the server."""

    def __init__(
        self,
        delivery: Delivery,
        device: torch.device,
        area: StagingArea,
        *,
        scratch: int,
        in_flight: int = 2,
    ) -> None:
        """Rows are encoded and copied on a thread, and where there are streams on one of their own.

        Args:
            delivery: the way out.
            device: where the rows come from.
            area: where rows wait for the server.
            scratch: bytes of the device's memory that encoding may take at once.
            in_flight: pieces of 16 MiB that may be copied at once; 0: all of them.
        """
        self.area = area
        self.scratch = scratch
        self.left_bytes = 0
        """Bytes of rows that have been brought off the device."""
        self.plain_rows = 0
        """Rows that left as they are because their form could not be made."""
        self._delivery = delivery
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copies = PacedCopies(self._stream, in_flight)
        self._queue: queue.SimpleQueue[Frame | _Leaving | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._held = 0
        self._lost_rows = 0
        self._quiet_until: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="rheostat-outlet", daemon=True)
        self._thread.start()

    @property
    def lost_rows(self) -> int:
        """Rows that could not leave, or of which the server could not be told."""
        return self._lost_rows + self._delivery.lost_rows

    @property
    def free_bytes(self) -> int:
        """Bytes of rows that may still be handed over now."""
        with self._lock:
            return max(0, self.area.free_bytes - self._held)

    def send(self, frame: Frame) -> None:
        """Hands over a frame without rows."""
        self._queue.put(frame)

    def send_rows(self, head: RowsHead, rows: torch.Tensor, groups: Sequence[Group]) -> Fence:
        """Hands over rows that the work launched so far will have written.

        Args:
            head: their labels, group by group.
            rows: [n, W] on the device.
            groups: in which forms they are to leave, as they lie.

        Returns:
            When the rows have left the device.
        """
        written = None
        if self._stream is not None:
            written = torch.cuda.Event()
            written.record()
        leaving = _Leaving(head, rows, groups, written)
        self._count(leaving.bytes)
        self._queue.put(leaving)
        return leaving

    def send_measured(
        self,
        measured: torch.Tensor,
        heads: Callable[[torch.Tensor], Sequence[Head]],
        otherwise: Sequence[Head],
    ) -> None:
        """Hands over frames that are made of what the work launched so far will have measured.

        Args:
            measured: on the device.
            heads: makes the frames' heads of it once it is on the host, on another thread.
            otherwise: what is sent where that fails.
        """
        host, left = self._copy(measured)
        self._queue.put(Frame(lambda: heads(host), ready=left, otherwise=otherwise))

    def close(self) -> None:
        """Sends what has been handed over, then stops."""
        self._queue.put(None)
        self._thread.join(timeout=5)
        self._delivery.close()
        self.area.close()

    def _copy(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        if self._stream is None:
            return values.clone(), None
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        values.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            host.copy_(values, non_blocking=True)
            left = torch.cuda.Event()
            left.record(self._stream)
        return host, left

    def _run(self) -> None:
        with torch.cuda.stream(self._stream):  # of None is none
            while (item := self._queue.get()) is not None:
                if isinstance(item, Frame):
                    self._delivery.send(item)
                    continue
                frame = self._depart(item)
                self._count(-item.bytes)
                self._delivery.send(frame)

    def _depart(self, leaving: _Leaving) -> Frame:
        """The frame of rows whose copies have been launched."""
        head = leaving.head
        try:
            try:
                head = self._launch(leaving)
            finally:
                # Copies that were launched read the rows, whatever failed after them.
                leaving.left = self._fence()
        except Exception:  # whatever it is, their requests hear of it and the engine lives
            self._complain("captured rows could not leave the device and are lost")
            self._lost_rows += len(leaving.rows)
            return Frame(head.without_rows)
        finally:
            leaving.handled.set()  # the step thread may wait for it in `Ring.reserve`
        assert head.place is not None
        self.left_bytes += head.place.size
        return Frame(head, leaving.left, (head.without_rows,), len(leaving.rows))

    def _launch(self, leaving: _Leaving) -> RowsHead:
        """Launches the copies of rows; their head, with their place."""
        head = leaving.head
        if self._stream is not None and leaving.written is not None:
            self._stream.wait_event(leaving.written)
        try:
            place = self._pack(leaving.rows, leaving.groups)
        except Exception:  # the device has no room, most likely; rows as they are need none
            if all(group.form is None for group in leaving.groups):
                raise
            self._complain("captured rows could not be encoded and leave as they are")
            self.plain_rows += sum(group.rows for group in leaving.groups if group.form)
            head = head.as_they_are
            place = self._pack(leaving.rows, [Group(None, len(leaving.rows))])
        return msgspec.structs.replace(head, place=place)

    def _fence(self) -> Fence | None:
        """When what was launched so far has happened; None: it has."""
        if self._stream is None:
            return None
        launched = torch.cuda.Event()
        launched.record(self._stream)
        return launched

    def _complain(self, what: str) -> None:
        """Logs the exception at hand; a device that stays full would fill the log."""
        if time.monotonic() >= self._quiet_until.get(what, 0.0):
            self._quiet_until[what] = time.monotonic() + _QUIET
            _LOG.exception("%s; so may be others within %.0f s", what, _QUIET)

    def _pack(self, rows: torch.Tensor, groups: Sequence[Group]) -> Place:
        size = packed_bytes(rows, groups)
        with self._lock:
            place = self.area.reserve(size)
        if place is None:
            raise _NoRoom(f"{size} bytes of rows find no room beside those that wait")
        try:
            pack(rows, groups, self.area[place], scratch=self.scratch, copies=self._copies)
        except BaseException:
            with self._lock:
                self.area.ranges.give_back(place)
            raise
        return place

    def _count(self, change: int) -> None:
        with self._lock:
            self._held += change


def packed_bytes(rows: torch.Tensor, groups: Sequence[Group]) -> int:
    """Bytes of rows, [n, W], in their forms."""
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
    """Launches what brings rows into their forms and to the host.

    Args:
        rows: [n, W] on the device.
        groups: their forms, as they lie.
        target: on the host, uint8, of `packed_bytes`.
        scratch: bytes of the device's memory that encoding may take at once.
        copies: launches the copies.
    """
    raw = rows.shape[1] * rows.element_size()
    parts = rows.split([group.rows for group in groups])
    targets = target.split([group.bytes(raw) for group in groups])
    for group, part, wanted in zip(groups, parts, targets, strict=True):
        if group.form is None:
            copies.copy(wanted, part)
            continue
        at_once = max(1, scratch // group.form.scratch)
        slabs = wanted.split(at_once * group.form.row_bytes)
        for slab, made in zip(part.split(at_once), slabs, strict=True):
            copies.copy(made, group.form.encode(slab))
