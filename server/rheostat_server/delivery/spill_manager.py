"""Writes rows that do not fit into memory to disk, and reads them back in order.

Invariants: items leave in the same order as without a disk. Items stay in memory until they are on
disk, so that a failed write loses no rows. The event loop never waits for a disk.
"""

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rheostat_server.delivery.byte_budget import ByteCounter
from rheostat_server.delivery.delivery_buffer import DeliveryBuffer
from rheostat_server.delivery.items import (
    Chunk,
    DeliveryItem,
    EncodedChunk,
    End,
    ItemSource,
    Loss,
    SequenceKey,
    size_of,
)
from rheostat_server.delivery.row_messages import captured_of, dropped
from rheostat_server.delivery.spill_directory import (
    SpillDirectory,
    SpillDirectoryFull,
    SpillFile,
    SpillFileDamaged,
)
from rheostat_server.errors import CaptureOverflow, Defect, RheostatError, RowsLost
from rheostat_server.limits import MIB
from rheostat_server.tasks.offload import on_pool
from rheostat_wire.v1 import capture_pb2

_LOG = logging.getLogger(__name__)

_WRITE_BYTES = 8 * MIB
"""Bytes that are written at once."""

_READ_BYTES = 4 * MIB
"""Bytes that are read back at once, unless the buffer is smaller."""

_POOL = ThreadPoolExecutor(8, "rheostat-spool")
"""Threads for the spool alone, because a disk may hang."""

_LABEL = struct.Struct("<BIIBIQ")
"""Before each item: its kind, the number of its feed, its sample, whether of the baseline, its rows
and their bytes in memory."""

_CHUNK, _LOSS, _END = range(3)


class SpillManager:
    """The spill queues of all buffers, if the server has a spool. Used on the event loop alone."""

    def __init__(self, spool: SpillDirectory, slack: int) -> None:
        """No rows are on disk.

        Args:
            spool: the folder on disk.
            slack: the most bytes above all limits that rows may take on their way to the disk.
        """
        self.spool = spool
        self._slack = slack
        self._spills: set[SpillQueue] = set()

    @property
    def rows(self) -> int:
        """Number of rows on disk."""
        return sum(spill.rows for spill in self._spills)

    def open(self, buffer: DeliveryBuffer, on_broken: Callable[[RheostatError], None]) -> None:
        """Lets a buffer spill until it is closed; calls `on_broken` if rows cannot be read back."""
        spill = SpillQueue(self, buffer, on_broken)
        self._spills.add(spill)
        buffer.spill = spill

    def remove(self, spill: "SpillQueue") -> None:
        """Removes a spill queue that was closed."""
        self._spills.discard(spill)

    @property
    def full(self) -> CaptureOverflow:
        """The error if the spool is full."""
        return CaptureOverflow(
            f"captured rows came faster than they were read, and the {self.spool.limit} bytes of "
            "the server's spool are full. Read and acknowledge faster, capture less, or raise the "
            "server's --spool-mib"
        )

    def refusal(self) -> CaptureOverflow | None:
        """The error if no more rows may wait for the disk; None if they may."""
        waiting = sum(spill.excess for spill in self._spills)
        if waiting > self.spool.left:
            return self.full
        if waiting > self._slack:
            return CaptureOverflow(
                "captured rows came faster than the server's spool could take them. Capture less, "
                "or give the server a faster disk as --spool"
            )
        return None


class SpillQueue:
    """The items of a buffer that wait on disk. They are older than those in its memory."""

    def __init__(
        self,
        spill_manager: SpillManager,
        buffer: DeliveryBuffer,
        on_broken: Callable[[RheostatError], None],
    ) -> None:
        """An empty queue; see `SpillManager.open`."""
        self.rows = 0
        """Rows on disk."""
        self.bytes = 0
        """Their bytes, before they were encoded."""
        self._spill_manager = spill_manager
        self._buffer = buffer
        self._on_broken = on_broken
        self._file = SpillFile(spill_manager.spool)
        self._feeds: dict[int, ItemSource] = {}
        self._numbers: dict[ItemSource, int] = {}
        self._numbered = 0
        self._writing: Sequence[DeliveryItem] = ()
        self._written = 0
        """Items on disk."""
        self._back: deque[DeliveryItem] = deque()
        """Items that were read back."""
        self._unwritten: deque[DeliveryItem] = deque()
        """Items that could not be written. They are newer than the items on disk."""
        self._failure: CaptureOverflow | None = None
        """Why they could not be written."""
        self._hungry = False
        self._closed = False
        self._task: asyncio.Task[None] | None = None
        self._allowed = buffer.limit
        """Bytes that the buffer may take before rows go to the disk."""
        self._memory = ByteCounter(buffer.total)
        """Counts items before they are written and after they were read back."""

    @property
    def holds(self) -> bool:
        """Whether items wait here."""
        return bool(self._back or self._written or self._unwritten or self._writing)

    @property
    def excess(self) -> int:
        """Bytes above the limit of the buffer."""
        return max(0, self._buffer.used - self._allowed)

    def refusal(self) -> CaptureOverflow | None:
        """The error if no more rows may wait above the limit; None if they may."""
        return self._failure or self._spill_manager.refusal()

    def relieve(self, size: int) -> None:
        """Writes rows above the limit to the disk, and `size` bytes in addition."""
        if size:
            self._allowed = max(0, min(self._allowed, self._buffer.used) - size)
        if self._failure is None:
            self._work_soon()

    def take(self) -> DeliveryItem | None:
        """Removes and returns the next item; None if it is still being read back."""
        item = None
        if self._back:
            item = self._back.popleft()
        elif self._unwritten and not self._written:
            item = self._unwritten.popleft()
            if not self._unwritten:
                self._failure = None
        if item is not None:
            self._memory.add(-size_of(item))
        if isinstance(item, End):  # the feed's last item
            self._feeds.pop(self._numbers.pop(item.feed, 0), None)
        if not self.holds:  # feeds that were discarded have no end
            self._feeds.clear()
            self._numbers.clear()
        if not self._back and self._written:
            self._hungry = True
            self._work_soon()
        return item

    def close(self) -> None:
        """Drops all items."""
        if not self._closed:
            self._closed = True
            self._spill_manager.remove(self)
            self._back.clear()
            self._unwritten.clear()
            self._written = 0
            self._feeds.clear()
            self._numbers.clear()
            self._memory.add(-self._memory.bytes)
            self.rows = self.bytes = 0
            self._on_broken = lambda _: None  # it refers to the buffer's reader
            if self._task is None or self._task.done():
                _POOL.submit(self._file.close)

    def _work_soon(self) -> None:
        if not self._closed and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        try:
            await self._write_and_read()
        except Exception as error:  # the task ends, so any error must fail the readers
            _LOG.error("spilling failed", exc_info=error)
            self._on_broken(Defect("the server could not keep captured rows on disk"))
            self.close()
        if self._closed:
            await on_pool(_POOL, self._file.close)

    async def _write_and_read(self) -> None:
        """Writes and reads in turn until neither is necessary."""
        busy = True
        while busy and not self._closed:
            busy = await self._write()
            if self._hungry and self._written and not self._back and not self._closed:
                await self._read()
                busy = True

    async def _write(self) -> bool:
        """Writes the oldest rows in memory to disk if there are too many; whether it did."""
        batch = self._batch()
        if not batch:
            if self._buffer.used <= self._allowed:
                self._allowed = self._buffer.limit
            return False
        self._writing = batch
        sizes = sum(map(size_of, batch))
        self._memory.add(sizes)
        try:
            await on_pool(
                _POOL, _append, self._file, [(item, self._number(item.feed)) for item in batch]
            )
        except (OSError, SpillDirectoryFull) as error:
            self._writing = ()
            if not self._closed:
                self._keep(batch, error)
            return False
        self._writing = ()
        if not self._closed:
            self._memory.add(-sizes)
            self._written += len(batch)
            self.rows += sum(map(_rows, batch))
            self.bytes += sizes
            self._buffer.news.set()
        return True

    def _batch(self) -> list[DeliveryItem]:
        buffer = self._buffer
        batch: list[DeliveryItem] = []
        if self._failure is None and buffer.used > self._allowed:
            left, size = buffer.used - self._allowed // 2, 0
            while size < min(left, _WRITE_BYTES):
                item = buffer.take_from_memory()
                if item is None:
                    break
                batch.append(item)
                size += size_of(item)
        return batch

    def _keep(self, batch: Sequence[DeliveryItem], error: OSError | SpillDirectoryFull) -> None:
        """Keeps a batch that could not be written in memory, and refuses further rows."""
        self._failure = self._spill_manager.full
        if isinstance(error, OSError):
            self._failure = CaptureOverflow(
                "captured rows came faster than they were read, and the server's spool cannot be "
                f"written: {error.strerror or 'the disk failed'}. Look at the disk of --spool"
            )
        self._unwritten.extend(batch)
        self._buffer.news.set()

    async def _read(self) -> None:
        self._hungry = False
        try:
            most = min(_READ_BYTES, self._buffer.limit // 4)
            records = await on_pool(_POOL, _load, self._file, most, dict(self._feeds))
        except (OSError, SpillFileDamaged):
            if not self._closed:
                self._on_broken(
                    RowsLost(
                        f"{self.rows} captured rows that waited on the server's disk cannot be "
                        "read back. Look at the disk of --spool",
                        metadata={"rows": str(self.rows)},
                    )
                )
                self.close()
            return
        if self._closed:
            return
        for record in records:
            self._written -= 1
            self.rows -= record.rows
            self.bytes -= record.size
            self._back.append(record.item)
            self._memory.add(size_of(record.item))
        self._buffer.news.set()

    def _number(self, feed: ItemSource) -> int:
        number = self._numbers.get(feed)
        if number is None:
            self._numbered += 1
            number = self._numbers[feed] = self._numbered
            self._feeds[number] = feed
        return number


class _Loaded(NamedTuple):
    """An item that was read back."""

    item: DeliveryItem
    rows: int
    size: int


def _rows(item: DeliveryItem) -> int:
    return len(item.token_ids) * len(item.block.sites) if isinstance(item, Chunk) else 0


def _append(file: SpillFile, batch: Sequence[tuple[DeliveryItem, int]]) -> None:
    file.append([_encoded(item, number) for item, number in batch])


def _encoded(item: DeliveryItem, feed: int) -> bytes:
    if isinstance(item, End):
        return _LABEL.pack(_END, feed, 0, False, 0, 0)
    kind, message = _LOSS, b""
    if isinstance(item, Chunk):
        kind, message = _CHUNK, captured_of(item).SerializeToString()
    elif isinstance(item, Loss):
        message = dropped(item).SerializeToString()
    return _LABEL.pack(kind, feed, *item.sequence_key, _rows(item), size_of(item)) + message


def _load(file: SpillFile, most: int, feeds: Mapping[int, ItemSource]) -> list[_Loaded]:
    return [_decoded(record, feeds) for record in file.read(most)]


def _decoded(record: bytes, feeds: Mapping[int, ItemSource]) -> _Loaded:
    kind, number, sample, baseline, rows, size = _LABEL.unpack_from(record)
    body, feed, key = record[_LABEL.size :], feeds[number], SequenceKey(sample, bool(baseline))
    item: DeliveryItem = End(feed)
    if kind == _CHUNK:
        item = EncodedChunk(feed, key, capture_pb2.Captured.FromString(body))
    elif kind == _LOSS:
        lost = capture_pb2.Dropped.FromString(body)
        spans = tuple((run.start, run.start + run.count) for run in lost.positions)
        item = Loss(feed, key, lost.capture_index, spans, lost.row_count)
    return _Loaded(item, rows, size)
