"""Runs the phases of a sweep: captures rows, runs cells and baselines, and scores the cells.

Invariant: each cell that the client does not have is put exactly once, with values or an error.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from google.protobuf import duration_pb2

from rheostat_engine import requests_together
from rheostat_server.errors import Draining, EngineLost, RheostatError
from rheostat_server.errors.status import to_status
from rheostat_server.sweeps.grid import cell_runs
from rheostat_server.sweeps.measurements import Measurements
from rheostat_server.sweeps.pairs import Pair
from rheostat_server.sweeps.scores import (
    PairScale,
    Scores,
    Values,
    check_contrast,
    pair_scale,
)
from rheostat_server.sweeps.settings import Settings
from rheostat_server.tasks.tracebacks import drop_tracebacks
from rheostat_wire.v1 import sweep_pb2, sweep_service_pb2, tensor_pb2

_pb = sweep_service_pb2

Put = Callable[[sweep_service_pb2.SweepResponse], Coroutine[None, None, None]]
"""Queues an event for the client. Waits while many events are unread."""


@dataclass
class _Cell:
    """A cell that runs: its values so far."""

    waiting: int
    """Prompts that have not answered yet."""
    raw: list[list[float]]
    """[pairs][grades]: sums over the noises."""
    top_token_id: int = 0
    error: RheostatError | None = None


class _Work(NamedTuple):
    """A prompt of a cell or a baseline."""

    cell: int | None
    """The cell; None for an unchanged prompt."""
    pair: int
    noise: int
    late: bool = False
    """Whether cells are graded without waiting for this baseline."""


@dataclass
class _Progress:
    """The results of a sweep so far."""

    repeats: list[list[list[Values]]]
    """For each pair and noise, the values of its first baselines."""
    other: list[list[Values]]
    """For each pair, the values of the prompts that rows come from."""
    waiting_baselines: int
    """First baselines that have not answered yet."""
    early: list[tuple[int, Values]] = field(default_factory=list)
    """Pairs and values of late baselines that answered while first ones had not."""
    cells: dict[int, _Cell] = field(default_factory=dict)
    held_back: list[int] = field(default_factory=list)
    """Cells that are complete, while the first baselines are not."""


class RunningSweep:
    """A sweep that runs."""

    def __init__(
        self, settings: Settings, pairs: Sequence[Pair], measurements: Measurements
    ) -> None:
        """Makes a sweep that has run nothing."""
        self._settings = settings
        self._pairs = pairs
        self._measurements = measurements
        self._scores = Scores(settings.done.values, settings.grades)
        base_counts = [len(pair.bases) for pair in pairs]
        self._base_counts = base_counts
        """For each pair, the number of its `bases`: the prompts in which cells are run."""
        first = settings.baselines - settings.late_baselines
        self._progress = _Progress(
            repeats=[[[] for _ in range(count)] for count in base_counts],
            other=[[] for _ in pairs],
            waiting_baselines=sum(first + count - 1 for count in base_counts),
        )

    async def run(self, put: Put) -> None:
        """Runs the sweep, and puts its cells.

        Raises:
            RheostatError: it cannot go on.
        """
        try:
            await self._run(put)
        finally:
            await self._measurements.close()

    async def _run(self, put: Put) -> None:
        settings, grid = self._settings, self._settings.grid
        await self._prepare()
        first = settings.zoom.coarse(grid) if settings.zoom is not None else range(grid.cells)
        # Zoom needs the effects of all cells of the coarse grid.
        have = settings.done.cells if settings.zoom is None else settings.done.known
        wanted = [cell for cell in first if not have[cell]]
        late = self._late_baselines()
        kept = 0 if settings.zoom is None else len(late) // 2
        await self._run_cells(wanted, put, self._first_baselines(), late[kept:])
        if settings.zoom is None:
            return
        ran = set(wanted)
        peaks = settings.zoom.peaks_of(self._scores.effects(), grid)
        added = [cell for cell in settings.zoom.fine(peaks, grid) if cell not in ran]
        added = [cell for cell in added if not settings.done.cells[cell]]
        phase = sweep_pb2.SweepPhase(added_cell_count=len(added), around=peaks)
        await put(_pb.SweepResponse(phase=phase))
        await self._run_cells(added, put, (), late[:kept])

    def summary(self, seconds: float, run_ids: Sequence[str]) -> sweep_pb2.SweepSummary:
        """The last event."""
        grid, values = self._settings.grid, self._scores.values
        elapsed = duration_pb2.Duration()
        elapsed.FromNanoseconds(int(seconds * 1e9))
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
            if not np.isnan(peaks[:, number]).all():
                grade.peak = int(np.nanargmax(peaks[:, number]))
            grades.append(grade)
        return sweep_pb2.SweepSummary(
            grades=grades,
            missing=cell_runs(np.flatnonzero(np.isnan(values).any(axis=1))),
            run_ids=run_ids,
            computed_token_count=self._measurements.computed,
            elapsed=elapsed,
        )

    async def _prepare(self) -> None:
        """Captures the rows of all pairs, and measures the prompts that they come from.

        Both at once, because each waits for the end of a step or, in the background, for the next
        burst.
        """
        measurements = self._measurements
        waiting = iter(
            [
                partial(prepare, index)
                for index in range(len(self._pairs))
                for prepare in (measurements.capture, self._measure_sources)
            ]
        )

        async def work() -> None:
            for prepare in waiting:
                await prepare()

        await _together(work, min(self._settings.concurrency, 2 * len(self._pairs)))

    async def _measure_sources(self, index: int) -> None:
        """Measures the prompts of a pair that rows come from."""
        pair = self._pairs[index]
        await self._measurements.set_reference(index)
        for prompt in pair.corrupt if pair.into_clean else (pair.clean,):
            metrics = await self._measurements.unchanged(prompt, index)
            self._progress.other[index].append(np.array(metrics))

    def _first_baselines(self) -> list[_Work]:
        """The unchanged prompts by which cells are graded: each noise's, the first's repeatedly.

        The repeats differ by what batching alone does.
        """
        first = self._settings.baselines - self._settings.late_baselines
        return [
            _Work(None, number, noise)
            for number, bases in enumerate(self._base_counts)
            for noise in range(bases)
            for _ in range(1 if noise else first)
        ]

    def _late_baselines(self) -> list[_Work]:
        """Further repeats, so that later batches contribute to the noise too."""
        return [
            _Work(None, pair, 0, late=True)
            for _ in range(self._settings.late_baselines)
            for pair in range(len(self._pairs))
        ]

    async def _run_cells(
        self, cells: Sequence[int], put: Put, first: Sequence[_Work], late: Sequence[_Work]
    ) -> None:
        """Runs cells and baselines, `concurrency` prompts at a time.

        The first baselines alternate with the first cells. The late ones are spread over all cells.
        """
        count = len(cells) * sum(self._base_counts)
        work = _alternating(first, _spread(late, self._expected(self._work(cells)), count))

        async def run() -> None:
            for piece in work:
                await self._do(piece, put)

        with requests_together():
            await _together(run, self._settings.concurrency, self._measurements.starts_at_once)

    def _work(self, cells: Iterable[int]) -> Iterator[_Work]:
        waiting, zeros = sum(self._base_counts), [0.0] * len(self._settings.grades)
        for cell in cells:
            self._progress.cells[cell] = _Cell(waiting, [zeros] * len(self._pairs))
            for index, bases in enumerate(self._base_counts):
                for noise in range(bases):
                    yield _Work(cell, index, noise)

    def _expected(self, work: Iterable[_Work]) -> Iterator[_Work]:
        """Yields the prompts of cells. The rows of each are expected `concurrency` prompts earlier.

        That many, because all of these prompts may start in one step of the engine.
        """
        coming: deque[_Work] = deque()
        for piece in work:
            if piece.cell is not None:
                self._measurements.expect(piece.cell, piece.pair, piece.noise)
            coming.append(piece)
            if len(coming) > self._settings.concurrency:
                yield coming.popleft()
        yield from coming

    async def _do(self, work: _Work, put: Put) -> None:
        """Runs one prompt, and puts its cell if that is complete."""
        progress = self._progress
        if work.cell is None:
            prompt = self._pairs[work.pair].bases[work.noise]
            metrics = await self._measurements.unchanged(prompt, work.pair)
            await self._take_baseline(work, np.array(metrics), put)
            return
        cell = progress.cells[work.cell]
        if cell.error is None:
            try:
                metrics, top = await self._measurements.cell(work.cell, work.pair, work.noise)
                bases = self._base_counts[work.pair]
                cell.raw[work.pair] = [
                    total + metric / bases
                    for total, metric in zip(cell.raw[work.pair], metrics, strict=True)
                ]
                if work.pair == work.noise == 0:
                    cell.top_token_id = top or 0
            except (EngineLost, Draining):
                raise
            except RheostatError as error:
                error.message = f"{self._pairs[work.pair].path}: {error.message}"
                drop_tracebacks(error)  # they refer to the cell
                cell.error = error
        cell.waiting -= 1
        if cell.waiting:
            return
        if progress.waiting_baselines:
            progress.held_back.append(work.cell)
        else:
            await self._finish(work.cell, put)

    async def _take_baseline(self, work: _Work, values: Values, put: Put) -> None:
        """Adds the values of a baseline. After the last first one, puts the cells held back."""
        progress = self._progress
        if work.late:
            if progress.waiting_baselines:
                progress.early.append((work.pair, values))
            else:
                self._scores.add_baseline(work.pair, values)
            return
        progress.repeats[work.pair][work.noise].append(values)
        progress.waiting_baselines -= 1
        if progress.waiting_baselines:
            return
        self._set_scales()
        for pair, repeat in progress.early:
            self._scores.add_baseline(pair, repeat)
        for index in progress.held_back:
            await self._finish(index, put)
        progress.held_back.clear()

    async def _finish(self, index: int, put: Put) -> None:
        """Scores a complete cell, and puts it unless the client has it."""
        event = self._scored(index)
        if not self._settings.done.cells[index]:
            await put(event)

    def _set_scales(self) -> None:
        scales: list[PairScale] = []
        for pair, repeats, other in zip(
            self._pairs, self._progress.repeats, self._progress.other, strict=True
        ):
            asked = np.mean(other, axis=0) if other else None
            scales.append(
                pair_scale(
                    repeats[0],
                    [values for repeat in repeats[1:] for values in repeat],
                    clean=None if pair.into_clean else asked,
                    corrupt=asked if pair.into_clean else None,
                    into_clean=pair.into_clean,
                )
            )
        check_contrast(scales, self._settings.grades)
        self._scores.set_scales(scales)

    def _scored(self, index: int) -> sweep_service_pb2.SweepResponse:
        """The event of a complete cell."""
        cell, event = self._progress.cells.pop(index), _pb.SweepResponse()
        message = event.cell  # filled in place; copying a message takes twice as long
        if cell.error is None:
            pair_values = self._settings.pair_values
            self._scores.score(index, cell.raw, message, pair_values=pair_values)
            message.top_token_id = cell.top_token_id
        else:
            message.error.CopyFrom(to_status(cell.error))
        message.index = index
        message.row, message.column = self._settings.grid.place(index)
        return event


def _alternating(first: Iterable[_Work], second: Iterable[_Work]) -> Iterator[_Work]:
    """Takes turns between two kinds of work, then what is left of one."""
    ends = object()
    for first_work, other in zip_longest(first, second, fillvalue=ends):
        if isinstance(first_work, _Work):
            yield first_work
        if isinstance(other, _Work):
            yield other


def _spread(late: Sequence[_Work], work: Iterable[_Work], count: int) -> Iterator[_Work]:
    """Puts late baselines evenly among `count` pieces of work, none of them first or last."""
    spread = 0
    for number, piece in enumerate(work):
        while spread < len(late) and number * (len(late) + 1) >= (spread + 1) * count:
            yield late[spread]
            spread += 1
        yield piece
    yield from late[spread:]


async def _together(
    work: Callable[[], Coroutine[None, None, None]],
    count: int,
    at_once: Callable[[], int] = lambda: 1,
) -> None:
    """Runs `count` calls of `work` concurrently. Raises the first error.

    Only `at_once()` calls start in each iteration of the event loop, because a call may take
    milliseconds before it first waits.
    """
    try:
        async with asyncio.TaskGroup() as group:
            started = 0
            for _ in range(count):
                group.create_task(work())
                started += 1
                if started >= at_once():
                    started = 0
                    await asyncio.sleep(0)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
