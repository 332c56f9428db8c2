"""Writes a request's rows to a sink or a run, on a thread, while the request runs.

Invariants: the model never waits for the sink, and the rows that wait for it are bounded. If a sink
fails, the request fails, and the sink publishes none of its rows. The writer ends exactly once:
either it publishes, or it fails.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Protocol

from rheostat_engine import Readout
from rheostat_server.admission.admitted_request import AdmittedRequest
from rheostat_server.capture.specs import ResolvedCapture
from rheostat_server.delivery.byte_budget import ByteCounter, Cost, Holder, Share
from rheostat_server.delivery.delivery_buffer import DeliveryBuffer
from rheostat_server.delivery.items import Chunk, DeliveryItem, EncodedChunk, End, Loss, size_of
from rheostat_server.delivery.row_feed import RowFeed
from rheostat_server.delivery.row_messages import captured_of
from rheostat_server.errors import CaptureOverflow, Defect, RheostatError
from rheostat_server.selectors.sites import from_wire
from rheostat_server.sinks import (
    CaptureAbout,
    Ending,
    Outcome,
    ReadoutAbout,
    RequestAbout,
    RowBlock,
    Target,
)
from rheostat_server.sinks.guarded import GuardedRecording
from rheostat_server.sinks.registry import Sinks
from rheostat_server.sinks.wire import block_of, encoding_of
from rheostat_server.tasks.offload import on_pool
from rheostat_wire.v1 import types_pb2

_LOG = logging.getLogger(__name__)

_WHOLE = {"stop", "length", "rule", "watch"}
"""How a sample ends whose rows are complete."""


class Recording(Protocol):
    """A destination of rows. Every method may block. The only errors are RheostatErrors."""

    @property
    def memory(self) -> int:
        """Bytes of rows that it holds in memory, and that `flush` can move to its disk."""

    def flush(self) -> None:
        """Moves the rows in memory to the disk."""

    def write(self, block: RowBlock) -> None:
        """Writes rows."""

    def finish(self, outcome: Outcome) -> object:
        """Ends the recording: no more rows come."""

    def abandon(self, error: BaseException) -> None:
        """Discards the recording; does nothing if it has ended."""


class SinkWriter(Holder):
    """Writes the rows of some captures of a request to one sink, or to a run."""

    cost = Cost.TIME
    """The consequence of giving up memory: time, because rows are moved to the disk."""

    def __init__(
        self,
        recording: Recording,
        abouts: Mapping[int, CaptureAbout],
        feed: RowFeed,
        buffer: DeliveryBuffer,
        share: Share,
        fail: Callable[[RheostatError], None],
        threads: Executor,
    ) -> None:
        """Makes a writer, and starts its task.

        Args:
            recording: the destination of the rows.
            abouts: its captures, by index in the request.
            feed: the source of the rows.
            buffer: holds the rows that wait.
            share: counts the rows that the recording holds in memory.
            fail: is called with the error if the writer fails.
            threads: run the calls of the recording, which may block.
        """
        self.feed = feed
        self._recording = recording
        self._buffer = buffer
        self._fail = fail
        self._abouts = abouts
        self._threads = threads
        self._share = share
        self._memory = ByteCounter(share.byte_counter)
        """Counts the rows that the recording holds in memory, and those that are being written."""
        self._flushing = 0
        """Bytes of them that the recording was asked to move to its disk."""
        share.add(self)
        self._dropped = 0
        self.failure: RheostatError | None = None
        self.task = asyncio.create_task(self._run())

    @property
    def freeable(self) -> int:
        """Bytes that it can be asked to move to its disk."""
        return self._memory.bytes - self._flushing

    @property
    def spilling(self) -> int:
        """Bytes that it was asked to move there."""
        return self._flushing

    def give_up(self, size: int, why: str) -> None:
        """Moves the rows in memory to the disk; fails if the disks are too slow for that."""
        self._flushing = self._memory.bytes
        self._buffer.news.set()
        if self._share.spills_too_much:
            self.overflow(
                CaptureOverflow(
                    f"captured rows came faster than the server's sinks could write them: {why}. "
                    "Capture less, or give the server a faster disk"
                )
            )

    def overflow(self, error: RheostatError) -> None:
        """Fails, unless it has failed: rows did not fit and none may be lost, or writing failed."""
        if self.failure is None:
            self.failure = error
            self.feed.discard()
            self._buffer.news.set()
            self._fail(error)

    async def _run(self) -> None:
        try:
            while self.failure is None:
                if self._flushing:
                    await self._flush()
                item = self._buffer.take()
                if isinstance(item, End):
                    await on_pool(self._threads, self._recording.finish, self._outcome())
                    return
                if item is None:
                    await self._buffer.news.wait()
                else:
                    await self._take(item)
        except RheostatError as error:
            self.overflow(error)
        except Exception as error:  # the task ends here, so any error must fail the request
            _LOG.error("writing %s failed", self.feed.request_id, exc_info=error)
            self.overflow(Defect("the server could not write the captured rows"))
        finally:
            self._buffer.close()
            if self.failure is not None:
                await on_pool(self._threads, self._recording.abandon, self.failure)
            self._flushing = 0
            self._hold(0)
            self._fail = lambda _: None  # it refers to the request, which refers to this writer

    async def _flush(self) -> None:
        await on_pool(self._threads, self._recording.flush)
        self._flushing = 0
        self._hold(self._recording.memory)

    def _hold(self, size: int) -> None:
        """Counts `size` bytes as held in memory."""
        self._memory.add(size - self._memory.bytes)
        self._share.check()

    async def _take(self, item: DeliveryItem) -> None:
        if isinstance(item, Chunk | EncodedChunk):
            self._hold(self._memory.bytes + size_of(item))
            await on_pool(self._threads, self._write, item)
            self._hold(self._recording.memory)
        elif isinstance(item, Loss):
            self._dropped += item.rows

    def _write(self, item: Chunk | EncodedChunk) -> None:
        message = item.message if isinstance(item, EncodedChunk) else captured_of(item)
        sites = [from_wire(site) for site in message.sites]
        self._recording.write(block_of(message, sites, self._abouts[message.capture_index]))

    def _outcome(self) -> Outcome:
        names = map(types_pb2.FinishReason.Name, self.feed.finish_reasons)
        reasons = tuple(name.removeprefix("FINISH_REASON_").lower() for name in names)
        if not reasons or not _WHOLE.issuperset(reasons):
            return Outcome(Ending.ABORTED, self._dropped, reasons)
        ending = Ending.PARTIAL if self._dropped else Ending.COMPLETE
        return Outcome(ending, self._dropped, reasons)


def _abandon(threads: Executor, opening: asyncio.Future[GuardedRecording]) -> None:
    """Discards a recording that was opened for a request that has ended meanwhile."""
    if not opening.cancelled() and opening.exception() is None:
        threads.submit(opening.result().abandon, Defect("the request went away"))


def about_capture(index: int, capture: ResolvedCapture) -> CaptureAbout:
    """The description of a capture for the sink or the run that stores its rows."""
    projection = capture.projection
    return CaptureAbout(
        index,
        capture.sites,
        capture.kind,
        capture.numbers,
        encoding_of(capture.form.encoding, ""),
        capture.form.kept or None,
        capture.form.seed,
        () if projection is None else tuple(vector.digest.hex() for vector in projection.vectors),
        {} if projection is None else projection.rows,
        () if projection is None else tuple(map(_about_readout, projection.readouts)),
    )


def _about_readout(readout: Readout) -> ReadoutAbout:
    normalise, activation = readout.normalise.name.lower(), readout.activation.name.lower()
    return ReadoutAbout(normalise, activation, readout.bias, readout.theta)


async def open_recording(
    sinks: Sinks,
    admitted: AdmittedRequest,
    target: Target,
    captures: Mapping[int, ResolvedCapture],
    *,
    model: str,
) -> GuardedRecording:
    """Opens a recording of some captures of a request in a sink.

    Args:
        sinks: the sinks of the server.
        admitted: the request.
        target: the sink and the tag.
        captures: by index in the request.
        model: the model's name.

    Raises:
        ArtifactExists: the sink holds rows under the request's id and tag.
        SinkFailed: the sink cannot open it.
    """
    about = RequestAbout(
        request_id=admitted.request_id,
        target=target,
        captures=tuple(about_capture(index, capture) for index, capture in captures.items()),
        model=model,
        prompt_token_ids=admitted.prompt.token_ids,
        labels=admitted.labels,
        started_at=time.time(),
    )
    threads = sinks.threads(target.sink)
    opening = asyncio.ensure_future(on_pool(threads, sinks.open, about))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(partial(_abandon, threads))
        raise
