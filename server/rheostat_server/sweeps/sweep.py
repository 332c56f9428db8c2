"""Runs sweeps: captures the rows that cells put in, runs the cells, and grades them.

Invariants: the index of a cell depends on the request alone. A cell whose rows cannot be had gets
an error in the place of values. A sweep that ends early leaves no running requests, and no runs.
"""

import asyncio
import time
import uuid
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import NamedTuple, TypeVar

import numpy as np
from google.protobuf import duration_pb2

from rheostat_server import validation
from rheostat_server.admission.admit import AdmittedRequest
from rheostat_server.errors import (
    CacheSuspect,
    Draining,
    DuplicateRequest,
    EngineLost,
    NonFinite,
    QueueFull,
    Resource,
    ResourceExhausted,
    RheostatError,
    RunIncomplete,
)
from rheostat_server.errors.status import to_status
from rheostat_server.limits import (
    RETRY_SECONDS,
    SWEEPS,
)
from rheostat_server.requests.manager import RequestManager
from rheostat_server.selectors.sites import to_wire
from rheostat_server.sweeps.answers import Question, Readings
from rheostat_server.sweeps.cells import (
    Asked,
    Blend,
    Replaced,
    ask,
    packing_work,
    replacing,
    with_acts,
)
from rheostat_server.sweeps.divergence import Divergences
from rheostat_server.sweeps.grades import LastRow, PooledReading, RowReader
from rheostat_server.sweeps.grid import (
    cell_runs,
)
from rheostat_server.sweeps.pairs import Pair
from rheostat_server.sweeps.scores import (
    PairScale,
    Scores,
    Values,
    check_contrast,
    pair_scale,
)
from rheostat_server.sweeps.settings import Settings, resolve
from rheostat_server.sweeps.sources import HeldRuns, Source, sources_of
from rheostat_server.tasks.offload import offload
from rheostat_server.vectors.store import Vector
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.v1 import (
    sweep_pb2,
    sweep_service_pb2,
    tensor_pb2,
    types_pb2,
)

_pb = sweep_service_pb2

_EVENTS = 256
"""Events that wait for a slow reader. Then no further cells start."""

_TOKEN_BYTES = 16
"""Bytes that `offload` counts for a token of a prompt that the first event lists."""

_TURN = 0.002
"""Seconds after which a cell in the background looks again whether requests wait."""

_STALE = 1.0
"""Seconds after which a report of vLLM's queue is no longer believed; see `_until_nobody_waits`."""

_LATER = 0.05
"""Seconds after which a cell that the engine has no room for tries again."""


@dataclass
class _Cell:
    """A cell that runs: its values so far."""

    waiting: int
    """Prompts that have not answered yet."""
    raw: Values
    """[pairs, grades]: sums over the noises."""
    top_token_id: int = 0
    error: RheostatError | None = None


class _Answered(NamedTuple):
    """What a prompt says."""

    readings: Readings
    readers: Mapping[int, RowReader]
    """By the number of their grade, the readers of its rows."""

    @property
    def last_row(self) -> FloatArray:
        """[1, W]: the last row of the stream, if a grade compares distributions."""
        return next(one for one in self.readers.values() if isinstance(one, LastRow)).row


class _Work(NamedTuple):
    """A prompt of a cell or a baseline."""

    cell: int | None
    """The cell; None for an unchanged prompt."""
    pair: int
    noise: int


@dataclass
class _Progress:
    """What a sweep knows so far."""

    repeats: list[list[list[Values]]]
    """For each pair and noise, the values of its baselines."""
    other: list[list[Values]]
    """For each pair, the values of the prompts that rows come from."""
    waiting_baselines: int
    cells: dict[int, _Cell] = field(default_factory=dict)
    held_back: list[int] = field(default_factory=list)
    """Cells that are complete, while baselines are not."""
    computed: int = 0


class Sweeps:
    """Runs the sweeps of a server."""

    def __init__(self) -> None:
        """None runs."""
        self._running: set[str] = set()

    async def sweep(
        self, request: sweep_service_pb2.SweepRequest, manager: RequestManager
    ) -> AsyncGenerator[sweep_service_pb2.SweepResponse, None]:
        """Runs a sweep. Yields what it will run, cells as they are ready, and a summary.

        Raises:
            RheostatError: the request is invalid, or the engine cannot go on.
        """
        with self._registered(request) as request_id:
            began = time.monotonic()
            settings, pairs, labels = await resolve(request, manager)
            runs = HeldRuns(manager.runs, settings.lease)
            sweep = _Sweep(settings, pairs, runs, manager)
            kept = False
            try:
                started = await offload(
                    _TOKEN_BYTES * sum(pair.token_count for pair in pairs),
                    _started,
                    request_id,
                    settings,
                    pairs,
                    labels,
                )
                yield _pb.SweepResponse(started=started)
                async with aclosing(_streamed(sweep.run)) as events:
                    async for event in events:
                        yield event
                kept = settings.lease is not None
                yield _pb.SweepResponse(
                    summary=sweep.summary(time.monotonic() - began, runs.made_ids if kept else ())
                )
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


T = TypeVar("T")

_Put = Callable[[sweep_service_pb2.SweepResponse], Coroutine[None, None, None]]
"""Puts an event. Waits while many events are not read."""


async def _streamed(
    run: Callable[[_Put], Coroutine[None, None, None]],
) -> AsyncGenerator[sweep_service_pb2.SweepResponse, None]:
    """Yields the events that a coroutine puts. The coroutine does not outlast the generator."""
    events: asyncio.Queue[sweep_service_pb2.SweepResponse | Exception | None]
    events = asyncio.Queue(_EVENTS)

    async def running() -> None:
        end: Exception | None = None
        try:
            await run(events.put)
        except Exception as error:  # raised by the reader, after the events before it
            end = error
        await events.put(end)

    work = asyncio.create_task(running())
    try:
        while (event := await events.get()) is not None:
            if isinstance(event, Exception):
                raise event
            yield event
    finally:
        work.cancel()
        await asyncio.wait({work})


def _started(
    request_id: str, settings: Settings, pairs: Sequence[Pair], labels: Sequence[str]
) -> sweep_pb2.SweepStarted:
    grid, zoom = settings.grid, settings.zoom
    coarse = range(grid.cells) if zoom is None else zoom.coarse(grid)
    return sweep_pb2.SweepStarted(
        request_id=request_id,
        cell_count=int((~settings.done[list(coarse)]).sum()),
        rows=[to_wire(row.site) for row in grid.rows],
        columns=labels,
        pairs=map(_resolved_pair, pairs),
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


class _Sweep:
    """A sweep that runs."""

    def __init__(
        self,
        settings: Settings,
        pairs: tuple[Pair, ...],
        runs: HeldRuns,
        manager: RequestManager,
    ) -> None:
        """Makes a sweep that has run nothing."""
        self._settings = settings
        self._pairs = pairs
        self._runs = runs
        self._manager = manager
        self._scores = Scores(settings.grid.cells, settings.grades)
        self._sources: list[list[Source]] = []
        """For each pair and noise, where rows come from."""
        self._references: list[FloatArray | None] = [None] * len(pairs)
        """The last row [1, W] of each clean prompt, if a grade compares distributions."""
        self._divergences = Divergences(manager)
        self._requests = 0
        """Number of requests so far, for their ids."""
        self._running = 0
        """Number of requests that run or wait."""
        self._turn = asyncio.Lock()
        """Held by the request that waits to start. The others wait for the lock, which costs
        nothing, because a sweep may have hundreds."""
        self._full_until = 0.0
        """Time of the event loop until which no request starts, because the engine was full."""
        self._unique = uuid.uuid4().hex[:12]
        noises = [len(pair.bases) for pair in pairs]
        self._progress = _Progress(
            repeats=[[[] for _ in range(count)] for count in noises],
            other=[[] for _ in pairs],
            waiting_baselines=sum(settings.baselines + count - 1 for count in noises),
        )

    async def run(self, put: _Put) -> None:
        """Runs the sweep, and puts its cells.

        Raises:
            RheostatError: it cannot go on.
        """
        settings, grid = self._settings, self._settings.grid
        await self._prepare()
        first = settings.zoom.coarse(grid) if settings.zoom is not None else range(grid.cells)
        wanted = [cell for cell in first if settings.zoom is not None or not settings.done[cell]]
        await self._run_cells(wanted, put, self._baselines())
        if settings.zoom is None:
            return
        ran = set(wanted)
        peaks = settings.zoom.peaks_of(self._scores.effects(), grid)
        added = [cell for cell in settings.zoom.fine(peaks, grid) if cell not in ran]
        added = [cell for cell in added if not settings.done[cell]]
        phase = sweep_pb2.SweepPhase(added_cell_count=len(added), around=peaks)
        await put(_pb.SweepResponse(phase=phase))
        await self._run_cells(added, put, ())

    def summary(self, seconds: float, run_ids: Sequence[str]) -> sweep_pb2.SweepSummary:
        """The last event."""
        grid, values = self._settings.grid, self._scores.values
        elapsed = duration_pb2.Duration()
        elapsed.FromNanoseconds(int(seconds * 1e9))
        effects = self._scores.effects()
        peaks = np.abs(values - self._scores.base)
        grades = []
        for number, noise in enumerate(self._scores.noises()):
            clean, corrupt = self._scores.unchanged(number)
            grade = sweep_pb2.SweepGrade(
                values=tensor_pb2.Tensor(
                    dtype=tensor_pb2.DTYPE_FLOAT64,
                    shape=[len(grid.rows), grid.columns],
                    inline=values[:, number].astype("<f8").tobytes(),
                ),
                clean=clean,
                noise=noise,
            )
            if not np.isnan(corrupt):
                grade.corrupt = corrupt
            if not np.isnan(effects).all():
                grade.peak = int(np.nanargmax(peaks[:, number]))
            grades.append(grade)
        return sweep_pb2.SweepSummary(
            grades=grades,
            missing=cell_runs(np.flatnonzero(np.isnan(values).any(axis=1))),
            run_ids=run_ids,
            computed_token_count=self._progress.computed,
            elapsed=elapsed,
        )

    async def _prepare(self) -> None:
        """Captures the rows of all pairs, and asks the prompts that they come from."""
        self._sources = [[] for _ in self._pairs]
        waiting = iter(range(len(self._pairs)))

        async def work() -> None:
            for index in waiting:
                await self._prepare_pair(index)

        await _together(work, min(self._settings.concurrency, len(self._pairs)))

    async def _prepare_pair(self, index: int) -> None:
        pair = self._pairs[index]
        name = f"sweep-{self._unique}-{index}"
        captured = await sources_of(
            pair, name, self._settings.grid, self._runs, self._manager, self._asked
        )
        self._sources[index] = captured.sources
        self._progress.computed += captured.computed
        if any(grade.metric == sweep_pb2.METRIC_KL for grade in self._settings.grades):
            self._references[index] = (await self._answered(pair.clean, pair)).last_row
        for prompt in pair.corrupt if pair.into_clean else (pair.clean,):
            self._progress.other[index].append(await self._unchanged(prompt, index))

    def _baselines(self) -> list[_Work]:
        """The unchanged prompts: the first noise's again and again, and each further noise's once.

        Their values differ by what batching alone does.
        """
        return [
            _Work(None, pair, noise)
            for pair, one in enumerate(self._pairs)
            for noise in range(len(one.bases))
            for _ in range(1 if noise else self._settings.baselines)
        ]

    async def _run_cells(self, cells: Iterable[int], put: _Put, baselines: Sequence[_Work]) -> None:
        """Runs cells, and baselines among the first of them, a few at a time."""
        work = _alternating(baselines, self._work(cells))

        async def run() -> None:
            for one in work:
                await self._do(one, put)

        await _together(run, self._settings.concurrency)

    def _work(self, cells: Iterable[int]) -> Iterator[_Work]:
        grades = len(self._settings.grades)
        for cell in cells:
            waiting = sum(len(pair.bases) for pair in self._pairs)
            self._progress.cells[cell] = _Cell(waiting, np.zeros((len(self._pairs), grades)))
            for index, pair in enumerate(self._pairs):
                for noise in range(len(pair.bases)):
                    yield _Work(cell, index, noise)

    async def _do(self, work: _Work, put: _Put) -> None:
        """Runs one prompt, and puts its cell if that is complete."""
        progress, pair = self._progress, self._pairs[work.pair]
        base = pair.bases[work.noise]
        if work.cell is None:
            values = await self._unchanged(base, work.pair)
            progress.repeats[work.pair][work.noise].append(values)
            progress.waiting_baselines -= 1
            if not progress.waiting_baselines:
                self._set_scales()
                for index in progress.held_back:
                    await self._finish(index, put)
                progress.held_back.clear()
            return
        cell = progress.cells[work.cell]
        if cell.error is None:
            try:
                changed = await self._changed(base, work)
                answered = await self._answered(changed, pair)
                values = await self._metrics(answered, work.pair)
                cell.raw[work.pair] += values / len(pair.bases)
                if work.pair == work.noise == 0:
                    first = answered.readings[pair.answers.questions[0]]
                    cell.top_token_id = first.top_token_id or 0
            except (EngineLost, Draining):
                raise
            except RheostatError as error:
                error.message = f"{pair.path}: {error.message}"
                cell.error = error
        cell.waiting -= 1
        if cell.waiting:
            return
        if progress.waiting_baselines:
            progress.held_back.append(work.cell)
        else:
            await self._finish(work.cell, put)

    async def _finish(self, index: int, put: _Put) -> None:
        """Scores a complete cell, and puts it unless the client has it."""
        event = self._scored(index)
        if not self._settings.done[index]:
            await put(event)

    async def _changed(self, base: AdmittedRequest, work: _Work) -> AdmittedRequest:
        """The request of a cell in a prompt."""
        assert work.cell is not None
        row, column = self._settings.grid.place(work.cell)
        placed = self._pairs[work.pair].placed(column)
        if -1 in placed.base:
            raise RunIncomplete(
                "a position of the column has no partner in the prompt that is run, which differs "
                "from the clean one there"
            )
        source = self._sources[work.pair][work.noise]
        replaced = [
            Replaced(site, placed.base, await source.rows(site, placed.source))
            for site in self._settings.grid.rows[row].window
        ]
        blend = self._settings.blend
        vectors = [one.source.vector for one in replaced]
        if blend.mask is not None:
            vectors.append(blend.mask)
        size = packing_work(base, len(placed.base) * len(replaced))
        return await offload(size, _with_replaced, base, replaced, blend, vectors)

    async def _answered(self, prompt: AdmittedRequest, pair: Pair) -> _Answered:
        """Asks a prompt all questions of its pair, the first of which captures rows."""
        first, *others = pair.answers.questions
        asked, readers = await self._asked(partial(self._ask_and_read, prompt, first))
        several = [asked]
        for question in others:
            several.append(await self._asked(partial(ask, prompt, question)))
        self._progress.computed += sum(one.computed for one in several)
        readings = [one.reading for one in several]
        return _Answered(dict(zip(pair.answers.questions, readings, strict=True)), readers)

    async def _unchanged(self, prompt: AdmittedRequest, number: int) -> Values:
        """[grades]: the numbers of an unchanged prompt of a pair.

        Raises:
            RheostatError: it cannot run, or has no finite number. The error names the pair.
        """
        pair = self._pairs[number]
        try:
            return await self._metrics(await self._answered(prompt, pair), number)
        except NonFinite as error:
            error.field = pair.path
            raise

    async def _ask_and_read(
        self, prompt: AdmittedRequest, question: Question, request_id: str, manager: RequestManager
    ) -> tuple[Asked, dict[int, RowReader]]:
        """Asks a question, and reads the rows of each grade that needs some."""
        readers = {
            number: reader
            for number, grade in enumerate(self._settings.grades)
            if (reader := grade.row_reader()) is not None
        }
        asked = await ask(prompt, question, request_id, manager, tuple(readers.values()))
        return asked, readers

    async def _metrics(self, answered: _Answered, pair: int) -> Values:
        """[grades]: the numbers of a prompt that was asked.

        Raises:
            NonFinite: one is not finite.
        """
        values = np.empty(len(self._settings.grades))
        for number, grade in enumerate(self._settings.grades):
            reader = answered.readers.get(number)
            if isinstance(reader, PooledReading):
                values[number] = reader.value
            elif isinstance(reader, LastRow):
                reference = self._references[pair]
                assert reference is not None
                values[number] = await self._divergences.between(reference, reader.row)
            else:
                assert grade.metric is not None
                answers = self._pairs[pair].answers
                values[number] = answers.value(grade.metric, answered.readings)
            if not np.isfinite(values[number]):
                raise NonFinite(
                    f"{grade.name} is {values[number]}: the model gives the answer no probability, "
                    "or its numbers overflow"
                )
        return values

    async def _asked(self, ask_as: Callable[[str, RequestManager], Coroutine[None, None, T]]) -> T:
        """Asks under a new id. Waits while the engine has no room, or while other requests wait."""
        while True:
            await self._until_one_may_start()
            self._requests += 1
            self._running += 1
            try:
                return await ask_as(f"{self._unique}/{self._requests}", self._manager)
            except (ResourceExhausted, CacheSuspect) as error:
                if error.retry_after is None:
                    raise
            finally:
                self._running -= 1
            self._full_until = asyncio.get_running_loop().time() + _LATER

    async def _until_one_may_start(self) -> None:
        """Returns when a request may start."""
        now = asyncio.get_running_loop().time
        async with self._turn:
            while (seconds := self._full_until - now()) > 0:
                await asyncio.sleep(seconds)
            if self._settings.background:
                await self._until_nobody_waits()

    async def _until_nobody_waits(self) -> None:
        """Returns when no other request waits.

        vLLM reports its queue with each step. An idle engine takes no step, so its last report may
        name requests that have left the queue since.
        """
        manager, now = self._manager, asyncio.get_running_loop().time
        report, since = manager.backend.queue_stats(), now()
        while manager.open_requests > self._running:
            if (latest := manager.backend.queue_stats()) is not report:
                report, since = latest, now()
            believed = report.waiting and now() - since < _STALE
            if not believed and not manager.admission_queue.waiting:
                return
            await asyncio.sleep(_TURN)

    def _set_scales(self) -> None:
        scales: list[PairScale] = []
        for pair, repeats, other in zip(
            self._pairs, self._progress.repeats, self._progress.other, strict=True
        ):
            asked = np.mean(other, axis=0) if other else None
            scales.append(
                pair_scale(
                    repeats[0],
                    [values for one in repeats[1:] for values in one],
                    clean=None if pair.into_clean else asked,
                    corrupt=asked if pair.into_clean else None,
                    into_clean=pair.into_clean,
                )
            )
        check_contrast(scales, self._settings.grades)
        self._scores.set_scales(scales)

    def _scored(self, index: int) -> sweep_service_pb2.SweepResponse:
        """The event of a complete cell."""
        cell = self._progress.cells.pop(index)
        if cell.error is None:
            message = self._scores.score(index, cell.raw, pair_values=self._settings.pair_values)
            message.top_token_id = cell.top_token_id
        else:
            message = sweep_pb2.SweepCell(error=to_status(cell.error))
        message.index = index
        message.row, message.column = self._settings.grid.place(index)
        return _pb.SweepResponse(cell=message)


def _with_replaced(
    base: AdmittedRequest, replaced: Sequence[Replaced], blend: Blend, vectors: Sequence[Vector]
) -> AdmittedRequest:
    return with_acts(base, replacing(replaced, blend), vectors)


def _alternating(first: Iterable[_Work], second: Iterable[_Work]) -> Iterator[_Work]:
    """Takes turns between two kinds of work, then what is left of one."""
    ends = object()
    for one, other in zip_longest(first, second, fillvalue=ends):
        if isinstance(one, _Work):
            yield one
        if isinstance(other, _Work):
            yield other


async def _together(work: Callable[[], Coroutine[None, None, None]], count: int) -> None:
    """Runs `count` calls of a coroutine at a time. Raises the first error."""
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
