"""The server's end of the side channel: frames from all workers become events of requests.

Invariant: a request's events are handed over in order, and all but rows only once every
reporting worker has said them, so that no row of the request can come before the one nor follow the
other. An event that fails is logged and counted, its request is told, and all other events arrive.
A frame that can't be read is logged and skipped; rows that can't be read are lost and counted. Rows
are copied out of the workers' memory once, and only while the loop has room for them. vLLM's step
outputs are not involved.
"""

import asyncio
import contextlib
import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import zmq

from rheostat_engine.events import (
    Attached,
    AttachedHead,
    Dose,
    Dropped,
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

_EVENTS_PER_TURN = 64
"""Events that are delivered in one turn of the event loop. A frame may hold thousands, and other
clients' tokens must not wait for all of them."""

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

    def skip(self, head: Head | None) -> list[Event]:
        """What follows from a frame that `feed` refused, so that nobody waits for it.

        Args:
            head: its head; None: that can't be read either.
        """
        if isinstance(head, RowsHead):
            with contextlib.suppress(LookupError, OverflowError, ValueError):
                return self._lose(head)
        if isinstance(head, ReleasedHead):
            nothing = Released(head.request_id, (), False, {}, 0, 0, (0, 0))
            return [Dropped(nothing)]
        return []

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


class EventQueue:
    """Delivers events on the event loop, in order, a bounded number in each turn of the loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[Event], None],
        taken: Callable[[], None],
    ) -> None:
        """An empty queue.

        Args:
            loop: the loop on which all methods are called.
            deliver: receives each event.
            taken: called once for each frame, after its last event.
        """
        self.failed = 0
        """Events that `deliver` raised an exception for."""
        self._loop = loop
        self._deliver = deliver
        self._taken = taken
        self._waiting: deque[Event | None] = deque()
        self._scheduled = False

    def put(self, events: Sequence[Event]) -> None:
        """Adds a frame's events."""
        self._waiting.extend(events)
        self._waiting.append(None)
        if not self._scheduled:
            self._turn()

    def _turn(self) -> None:
        for _ in range(min(_EVENTS_PER_TURN, len(self._waiting))):
            event = self._waiting.popleft()
            if event is None:
                self._taken()
            else:
                self._hand_over(event)
        self._scheduled = bool(self._waiting)
        if self._scheduled:
            self._loop.call_soon(self._turn)

    def _hand_over(self, event: Event) -> None:
        try:
            self._deliver(event)
        except Exception:  # whatever it is, the other events belong to other requests
            self.failed += 1
            _LOG.exception(
                "an event of %s could not be taken in, the %d. since the start",
                event.request_id,
                self.failed,
            )
            if not isinstance(event, Dropped):
                self._hand_over(Dropped(event))


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
        """Calls `deliver` on `loop` for every event from now on.

        If `deliver` raises, it is called again with `Dropped`, which names the event.
        """
        events = EventQueue(loop, deliver, self._room.release)
        self._thread = threading.Thread(
            target=self._receive, args=(loop, events), name="rheostat-channel", daemon=True
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

    def _receive(self, loop: asyncio.AbstractEventLoop, events: EventQueue) -> None:
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
                loop.call_soon_threadsafe(events.put, self._events_of(frame))
        except RuntimeError:
            _LOG.info("the event loop has closed; the side channel stops")
            stop.recv()
        finally:
            stop.close()

    def _events_of(self, frame: list[bytes]) -> list[Event]:
        head = None
        try:
            (data,) = frame
            head = decode_head(data)
            if isinstance(head, RowsHead):
                return self._rows_of(head)
            return self._merger.feed(head)
        except (msgspec.MsgspecError, LookupError, OverflowError, ValueError):
            _LOG.exception("a frame of the side channel is malformed and was skipped")
            return self._merger.skip(head)

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
