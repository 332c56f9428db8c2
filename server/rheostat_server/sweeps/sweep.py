"""Serves sweeps: registers them, sends what they will run, their cells and their summaries.

Invariants: the index of a cell depends on the request alone. A cell whose rows cannot be had gets
an error in the place of values. A sweep that ends early leaves no running requests, and no runs.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from typing import NamedTuple

from rheostat_server import validation
from rheostat_server.errors import DuplicateRequest, QueueFull, Resource
from rheostat_server.limits import RETRY_SECONDS, SWEEPS
from rheostat_server.requests.manager import RequestManager
from rheostat_server.selectors.sites import to_wire
from rheostat_server.sweeps.measurements import Measurements
from rheostat_server.sweeps.pairs import Pair
from rheostat_server.sweeps.running_sweep import Put, RunningSweep
from rheostat_server.sweeps.settings import Settings, resolve
from rheostat_server.sweeps.sources import HeldRuns
from rheostat_server.tasks.offload import offload_plan
from rheostat_server.tasks.tracebacks import drop_tracebacks
from rheostat_wire.v1 import sweep_pb2, sweep_service_pb2, types_pb2

_pb = sweep_service_pb2

_EVENTS = 256
"""Events that wait for a slow reader. Then no further cells start."""

_TOGETHER_BYTES = 16 << 10
"""Once events have this many bytes, further events are sent later. A cell's has about 60."""

_TOKEN_BYTES = 16
"""Bytes that `offload` counts for a token of a prompt that the first event lists."""


class _End(NamedTuple):
    """Follows the last event."""

    error: Exception | None
    """Why the sweep has failed."""


class Sweeps:
    """Runs the sweeps of a server."""

    def __init__(self) -> None:
        """None runs."""
        self._running: set[str] = set()

    async def sweep(
        self, request: sweep_service_pb2.SweepRequest, manager: RequestManager
    ) -> AsyncGenerator[list[sweep_service_pb2.SweepResponse], None]:
        """Runs a sweep. Yields what it will run, cells as they are ready, and a summary.

        Events that are ready at the same time are yielded together.

        Raises:
            RheostatError: the request is invalid, or the engine cannot go on.
        """
        with self._registered(request) as request_id:
            began = time.monotonic()
            manager.watched.pass_over(request_id, "watches do not read sweeps")
            settings = await resolve(request, manager)
            runs = HeldRuns(manager.runs, settings.lease)
            sweep = RunningSweep(settings, Measurements(settings, runs, manager))
            kept = False
            try:
                size = _TOKEN_BYTES * sum(pair.token_count for pair in settings.pairs)
                started = await offload_plan(size, _started, request_id, settings)
                yield [_pb.SweepResponse(started=started)]
                async with aclosing(_streamed(sweep.run)) as batches:
                    async for events in batches:
                        yield events
                kept = settings.lease is not None
                summary = sweep.summary(time.monotonic() - began, runs.made_ids if kept else ())
                yield [_pb.SweepResponse(summary=summary)]
            finally:
                runs.release(keep=kept)

    @contextmanager
    def _registered(self, request: sweep_service_pb2.SweepRequest) -> Iterator[str]:
        """Counts a sweep as running, and gives its id."""
        request_id = request.request_id or uuid.uuid4().hex
        validation.matches(request_id, validation.REQUEST_ID, "request_id")
        if request_id in self._running:
            raise DuplicateRequest(
                "a running sweep has this id",
                field="request_id",
                resource=Resource("request", request_id),
            )
        if len(self._running) >= SWEEPS:
            raise QueueFull(
                f"{len(self._running)} sweeps run already; try again later",
                retry_after=RETRY_SECONDS,
            )
        self._running.add(request_id)
        try:
            yield request_id
        finally:
            self._running.discard(request_id)


async def _streamed(
    run: Callable[[Put], Coroutine[None, None, None]],
) -> AsyncGenerator[list[sweep_service_pb2.SweepResponse], None]:
    """Yields the events that a coroutine puts. The coroutine does not outlast the generator."""
    waiting: asyncio.Queue[sweep_service_pb2.SweepResponse | _End] = asyncio.Queue(_EVENTS)

    async def running() -> None:
        end = _End(None)
        try:
            await run(waiting.put)
        except asyncio.CancelledError as error:
            drop_tracebacks(error)
            raise
        except Exception as error:  # raised by the reader, after the events before it
            end = _End(error)
        await waiting.put(end)

    work = asyncio.create_task(running())
    try:
        event = await waiting.get()
        while not isinstance(event, _End):
            events, size = [event], event.ByteSize()
            while not waiting.empty() and size < _TOGETHER_BYTES:
                event = waiting.get_nowait()
                if isinstance(event, _End):
                    break
                events.append(event)
                size += event.ByteSize()
            yield events
            if not isinstance(event, _End):
                event = await waiting.get()
        if event.error is not None:
            raise event.error
    finally:
        work.cancel()
        await asyncio.wait({work})


def _started(request_id: str, settings: Settings) -> sweep_pb2.SweepStarted:
    grid, zoom = settings.grid, settings.zoom
    coarse = range(grid.cells) if zoom is None else zoom.coarse(grid)
    return sweep_pb2.SweepStarted(
        request_id=request_id,
        cell_count=int((~settings.done.cells[list(coarse)]).sum()),
        rows=[to_wire(row.site) for row in grid.rows],
        columns=settings.labels,
        pairs=map(_resolved_pair, settings.pairs),
    )


def _resolved_pair(pair: Pair) -> sweep_pb2.ResolvedPair:
    clean = pair.clean.prompt.token_ids
    message = sweep_pb2.ResolvedPair(clean_token_ids=types_pb2.TokenIds(ids=clean))
    if not pair.corrupt:
        return message
    message.corrupt_token_ids.ids.extend(pair.corrupt[0].prompt.token_ids)
    alignment = pair.alignment
    message.alignment.prefix_token_count = alignment.prefix
    message.alignment.suffix_token_count = alignment.suffix
    unaligned = len(clean) - alignment.prefix - alignment.suffix
    if unaligned:
        message.alignment.unaligned.add(start=alignment.prefix, count=unaligned)
    return message
