"""The server's end of the side channel: frames from all workers become events of requests.

Invariant: a request's events are handed over in order, and all but rows only once every
reporting worker has said them, so that no row of the request can come before the one nor follow the
other. A frame that can't be read is logged and skipped; rows that can't be read are lost and
counted. Rows are copied out of the workers' memory once, and only while the loop has room for them.
vLLM's step outputs are not involved.
"""

import asyncio
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import zmq

from rheostat_engine.events import (
    Attached,
    AttachedHead,
    Dose,
    Event,
    Head,
    Installed,
    InstalledHead,
    Released,
    ReleasedHead,
    RowArray,
    Rows,
    RowsHead,
    copied,
    decode_head,
    lost_rows,
    split_rows,
)
from rheostat_engine.settings import EngineSettings
from rheostat_engine.staging import StagingError, StagingReader, readers_of

_LOG = logging.getLogger(__name__)

_FRAMES = 16
"""Frames that may wait for the event loop; beyond, the workers wait, then lose rows and say so."""

_PATIENCE = 0.2
"""Seconds between two looks at whether to stop, while the loop has no room."""


_COPIERS = 4
"""Threads that copy large frames out of the workers' memory: one is far slower than a device."""

_LARGE = 1 << 20
"""Bytes that are worth a thread."""


class EventMerger:
    """Joins what several workers say of one request."""

    def __init__(
        self, ranks: int, copies: Callable[[Sequence[RowArray]], list[RowArray]] = copied
    ) -> None:
        """Nobody has said anything.

        Args:
            ranks: how many workers report.
            copies: makes copies of arrays.
        """
        self._ranks = ranks
        self._copies = copies
        self._names: dict[int, dict[int, str]] = {}
        self._installed: dict[str, list[str]] = {}
        self._attached: dict[tuple[str, int], list[AttachedHead]] = {}
        self._early: dict[str, list[Rows]] = {}
        self._released: dict[str, list[ReleasedHead]] = {}
        self._lost: dict[tuple[int, int], Counter[int]] = {}
        """Rows by site that were sent and lost on the way, by worker and its number."""

    def feed(self, head: Head, rows: bytes | memoryview = b"") -> list[Event]:
        """The events that one frame completes.

        Args:
            head: the frame's head.
            rows: the rows that it describes, of which nothing is kept.

        Raises:
            LookupError, OverflowError, ValueError: it is malformed.
        """
        if isinstance(head, RowsHead):
            if head.lost:
                return self._lose(head)
            names = self._names[head.rank]
            return self._pass_on(split_rows(head, rows, names, self._copies))
        if isinstance(head, InstalledHead):
            return self._install(head)
        if isinstance(head, AttachedHead):
            return self._attach(head)
        return self._release(head)

    def _pass_on(self, rows: list[Rows]) -> list[Event]:
        ready: list[Event] = []
        for one in rows:
            if one.request_id in self._installed:
                self._early.setdefault(one.request_id, []).append(one)
            else:
                ready.append(one)
        return ready

    def _lose(self, head: RowsHead) -> list[Event]:
        for number, rows in lost_rows(head).items():
            self._lost.setdefault((head.rank, number), Counter()).update(rows)
        return []

    def _install(self, head: InstalledHead) -> list[Event]:
        self._names.setdefault(head.rank, {})[head.number] = head.request_id
        errors = self._installed.setdefault(head.request_id, [])
        errors.append(head.error)
        if len(errors) < self._ranks:
            return []
        del self._installed[head.request_id]
        error = next(filter(None, errors), "")
        return [Installed(head.request_id, error), *self._early.pop(head.request_id, [])]

    def _attach(self, head: AttachedHead) -> list[Event]:
        key = head.request_id, head.change
        heads = self._attached.setdefault(key, [])
        heads.append(head)
        if len(heads) < self._ranks:
            return []
        del self._attached[key]
        error = next((one.error for one in heads if one.error), "")
        return [Attached(*key, max(one.first for one in heads), error)]

    def _release(self, head: ReleasedHead) -> list[Event]:
        del self._names[head.rank][head.number]
        head = _corrected(head, self._lost.pop((head.rank, head.number), Counter()))
        heads = self._released.setdefault(head.request_id, [])
        heads.append(head)
        if len(heads) < self._ranks:
            return []
        del self._released[head.request_id]
        captured: dict[int, int] = {}
        for one in heads:
            captured.update(one.captured)
        first = heads[0]
        return [
            Released(
                request_id=head.request_id,
                doses=tuple(sorted(Dose(*dose) for one in heads for dose in one.doses)),
                measured=all(one.measured for one in heads),
                captured=captured,
                lost_rows=sum(one.lost_rows for one in heads),
                preemptions=max(one.preemptions for one in heads),
                computed=first.computed,
                recomputed=first.recomputed,
            )
        ]


def _corrected(head: ReleasedHead, lost: Counter[int]) -> ReleasedHead:
    """A worker's word on a request of which rows were lost after it had counted them."""
    if not lost:
        return head
    left = {site: count - lost[site] for site, count in head.captured.items()}
    return msgspec.structs.replace(
        head,
        captured={site: count for site, count in left.items() if count > 0},
        lost_rows=head.lost_rows + lost.total(),
    )


class WorkerChannel:
    """Receives from the workers on a thread of its own; hands events to an event loop."""

    def __init__(self, settings: EngineSettings, *, ranks: int) -> None:
        """Binds `settings.channel`.

        Raises:
            zmq.ZMQError: the address can't be bound.
        """
        self._merger = EventMerger(ranks, self._copies)
        self._copiers = ThreadPoolExecutor(_COPIERS, thread_name_prefix="rheostat-copy")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, _FRAMES)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(settings.channel)
        except zmq.ZMQError:
            self._context.destroy()  # left to the garbage collector, it would wait for its socket
            raise
        self._address = settings.channel
        self._stop_address = f"inproc://stop-{id(self):x}"
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.bind(self._stop_address)
        self._thread: threading.Thread | None = None
        self._room = threading.Semaphore(_FRAMES)
        self._areas: dict[int, StagingReader] = {}

    def attach(self, reports: Sequence[Mapping[str, object]]) -> None:
        """Gives the channel the memory that captured rows come in; to be done before any do.

        Args:
            reports: what each worker said to `rheostat_describe`.

        Raises:
            StagingError: a worker's memory can't be reached.
        """
        self._areas = readers_of(reports)

    def start(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Event], None]) -> None:
        """Calls `deliver` on `loop` for every event from now on."""
        self._thread = threading.Thread(
            target=self._receive, args=(loop, deliver), name="rheostat-channel", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stops receiving and frees the address."""
        if self._thread is not None:
            self._stop.send(b"")
            self._thread.join()
            self._thread = None
        self._socket.close()
        self._stop.close()
        self._context.term()
        self._copiers.shutdown()
        self._areas = {}
        if self._address.startswith("ipc://"):
            path = self._address.removeprefix("ipc://")
            if os.path.exists(path):
                os.unlink(path)

    def _receive(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[Event], None]) -> None:
        stop = self._context.socket(zmq.PAIR)
        stop.connect(self._stop_address)
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(stop, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll())
                if stop in ready:
                    return
                frame = self._socket.recv_multipart()
                while not self._room.acquire(timeout=_PATIENCE):
                    if stop.poll(0):
                        return
                loop.call_soon_threadsafe(self._hand_over, self._events_of(frame), deliver)
        except RuntimeError:
            _LOG.info("the event loop has closed; the side channel stops")
            stop.recv()
        finally:
            stop.close()

    def _hand_over(self, events: list[Event], deliver: Callable[[Event], None]) -> None:
        try:
            for event in events:
                deliver(event)
        finally:
            self._room.release()

    def _events_of(self, frame: list[bytes]) -> list[Event]:
        try:
            (data,) = frame
            head = decode_head(data)
            if isinstance(head, RowsHead):
                return self._rows_of(head)
            return self._merger.feed(head)
        except (msgspec.MsgspecError, LookupError, OverflowError, ValueError):
            _LOG.exception("a frame of the side channel is malformed and was skipped")
            return []

    def _copies(self, arrays: Sequence[RowArray]) -> list[RowArray]:
        if len(arrays) < _COPIERS or sum(array.nbytes for array in arrays) < _COPIERS * _LARGE:
            return copied(arrays)
        shares = [arrays[first::_COPIERS] for first in range(_COPIERS)]
        made: list[RowArray] = [*arrays]
        for first, share in enumerate(self._copiers.map(copied, shares)):
            made[first::_COPIERS] = share
        return made

    def _rows_of(self, head: RowsHead) -> list[Event]:
        """What a frame of rows says; its range is given back, whatever it says."""
        if head.place is None:
            return self._merger.feed(head.without_rows)
        try:
            if head.rank not in self._areas:
                raise StagingError(f"the memory of worker {head.rank} was never attached")
            with self._areas[head.rank].taken(head.place) as rows:
                return self._merger.feed(head, rows)
        except (StagingError, MemoryError):
            _LOG.exception("captured rows could not be read and are lost")
            return self._merger.feed(head.without_rows)
