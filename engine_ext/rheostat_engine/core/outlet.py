"""How rows leave the device: encoded and copied aside while the next step already runs.

Invariant: handing rows over costs the step thread no wait and no work that grows with them; their
region of the ring may be written again once the returned fence has happened. Rows that can't be
brought into their form leave as they are; those that can't leave at all are said to be lost.
Encoding takes no more memory of the device at once than it was given.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from rheostat_engine.core.delivery import Delivery, Frame
from rheostat_engine.core.forms import Made
from rheostat_engine.core.ring import Fence
from rheostat_engine.events import Head, RowsHead

_LOG = logging.getLogger(__name__)

_QUIET = 60.0
"""Seconds between two words in the log about rows that do not leave as they should."""


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

    def synchronize(self) -> None:
        """Waits until nothing reads the rows any more; never for the server."""
        self.handled.wait()
        if self.left is not None:
            self.left.synchronize()


class Outlet:
    """Rows and events of one worker, on their way to the server."""

    def __init__(
        self, delivery: Delivery, device: torch.device, *, limit: int, scratch: int
    ) -> None:
        """Rows are encoded and copied on a thread, and where there are streams on one of their own.

        Args:
            delivery: the way out.
            device: where the rows come from.
            limit: bytes of rows that may wait for the server.
            scratch: bytes of the device's memory that encoding may take at once.
        """
        self.scratch = scratch
        self.left_bytes = 0
        """Bytes of rows that have been brought off the device."""
        self.plain_rows = 0
        """Rows that left as they are because their form could not be made."""
        self.lost_rows = 0
        """Rows that could not leave."""
        self._delivery = delivery
        self._limit = limit
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: queue.SimpleQueue[Frame | _Leaving | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._held = 0
        self._quiet_until: dict[str, float] = {}
        self._thread = threading.Thread(target=self._run, name="rheostat-outlet", daemon=True)
        self._thread.start()

    @property
    def free_bytes(self) -> int:
        """Bytes of rows that may still be handed over now."""
        return max(0, self._limit - self._held - self._delivery.pending_bytes)

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
        self._count(rows.nbytes)
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
                else:
                    self._handle(item)

    def _handle(self, leaving: _Leaving) -> None:
        frame = Frame(leaving.head.without_rows)
        try:
            frame = self._depart(leaving)
        except Exception:  # whatever it is, the requests hear of it and the engine lives
            self._complain("captured rows could not leave the device and are lost")
            self.lost_rows += len(leaving.rows)
        finally:
            leaving.handled.set()
        self._delivery.send(frame)
        self._count(-leaving.rows.nbytes)

    def _depart(self, leaving: _Leaving) -> Frame:
        """The frame of rows whose copies have been launched."""
        head = leaving.head
        if self._stream is not None and leaving.written is not None:
            self._stream.wait_event(leaving.written)
        try:
            host = self._pack(leaving.rows, leaving.groups)
        except Exception:  # the device has no room, most likely; rows as they are need none
            plain = sum(group.rows for group in leaving.groups if group.form is not None)
            if not plain:
                raise
            self._complain("captured rows could not be encoded and leave as they are")
            self.plain_rows += plain
            head = head.as_they_are
            host = self._pack(leaving.rows, [Group(None, len(leaving.rows))])
        if self._stream is not None:
            left = torch.cuda.Event()
            left.record(self._stream)
            leaving.left = left
        self.left_bytes += host.nbytes
        return Frame(head, host, leaving.left, otherwise=(leaving.head.without_rows,))

    def _complain(self, what: str) -> None:
        """Logs the exception at hand; a device that stays full would fill the log."""
        if time.monotonic() >= self._quiet_until.get(what, 0.0):
            self._quiet_until[what] = time.monotonic() + _QUIET
            _LOG.exception("%s; so may be others within %.0f s", what, _QUIET)

    def _pack(self, rows: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
        return packed(rows, groups, scratch=self.scratch, pinned=self._stream is not None)

    def _count(self, change: int) -> None:
        with self._lock:
            self._held += change


def packed(
    rows: torch.Tensor, groups: Sequence[Group], *, scratch: int, pinned: bool
) -> torch.Tensor:
    """The bytes of rows in their forms, that will be on the host: uint8.

    Args:
        rows: [n, W] on the device.
        groups: their forms, as they lie.
        scratch: bytes of the device's memory that encoding may take at once.
        pinned: whether to copy, and encode, without waiting for it.
    """
    raw = rows.shape[1] * rows.element_size()
    sizes = [group.bytes(raw) for group in groups]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
    parts = rows.split([group.rows for group in groups])
    for group, part, target in zip(groups, parts, host.split(sizes), strict=True):
        if group.form is None:
            target.copy_(part.view(torch.uint8).flatten(), non_blocking=pinned)
            continue
        at_once = max(1, scratch // group.form.scratch)
        slabs = target.view(group.rows, -1).split(at_once)
        for slab, wanted in zip(part.split(at_once), slabs, strict=True):
            wanted.copy_(group.form.encode(slab), non_blocking=pinned)
    return host
