"""Runs the phases of a sweep: captures rows, runs cells and baselines, and scores the cells.

Invariant: each cell that the client does not have is put exactly once, with values or an error.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from google.protobuf import duration_pb2

from rheostat_server.errors import Draining, EngineLost, RheostatError
from rheostat_server.errors.status import to_status
from rheostat_server.sweeps.grid import cell_runs
from rheostat_server.sweeps.measurements import Measurements
from rheostat_server.sweeps.pairs import Pair
from rheostat_server.sweeps.scores import PairScale, Scores, Values, check_contrast, pair_scale
from rheostat_server.sweeps.settings import Settings
from rheostat_wire.v1 import sweep_pb2, sweep_service_pb2, tensor_pb2

_pb = sweep_service_pb2

Put = Callable[[sweep_service_pb2.SweepResponse], Coroutine[None, None, None]]
"""Puts an event. Waits while many events are not read."""


@dataclass
class _Cell:
    """A cell that runs: its values so far."""

    waiting: int
    """Prompts that have not answered yet."""
    raw: Values
    """[pairs, grades]: sums over the noises."""
    top_token_id: int = 0
    error: RheostatError | None = None


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


class RunningSweep:
    """A sweep that runs."""

    def __init__(
        self, settings: Settings, pairs: Sequence[Pair], measurements: Measurements
    ) -> None:
        """Makes a sweep that has run nothing."""
        self._settings = settings
        self._pairs = pairs
        self._measurements = measurements
        self._scores = Scores(settings.grid.cells, settings.grades)
        noises = [len(pair.bases) for pair in pairs]
        self._progress = _Progress(
            repeats=[[[] for _ in range(count)] for count in noises],
            other=[[] for _ in pairs],
            waiting_baselines=sum(settings.baselines + count - 1 for count in noises),
        )

    async def run(self, put: Put) -> None:
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
            computed_token_count=self._measurements.computed,
            elapsed=elapsed,
        )

    async def _prepare(self) -> None:
        """Captures the rows of all pairs, and asks the prompts that they come from."""
        waiting = iter(range(len(self._pairs)))

        async def work() -> None:
            for index in waiting:
                await self._prepare_pair(index)

        await _together(work, min(self._settings.concurrency, len(self._pairs)))

    async def _prepare_pair(self, index: int) -> None:
        pair = self._pairs[index]
        await self._measurements.prepare(index)
        for prompt in pair.corrupt if pair.into_clean else (pair.clean,):
            values = await self._measurements.unchanged(prompt, index)
            self._progress.other[index].append(values)

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

    async def _run_cells(self, cells: Iterable[int], put: Put, baselines: Sequence[_Work]) -> None:
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

    async def _do(self, work: _Work, put: Put) -> None:
        """Runs one prompt, and puts its cell if that is complete."""
        progress, pair = self._progress, self._pairs[work.pair]
        if work.cell is None:
            base = pair.bases[work.noise]
            values = await self._measurements.unchanged(base, work.pair)
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
                values, top = await self._measurements.cell(work.cell, work.pair, work.noise)
                cell.raw[work.pair] += values / len(pair.bases)
                if work.pair == work.noise == 0:
                    cell.top_token_id = top or 0
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

    async def _finish(self, index: int, put: Put) -> None:
        """Scores a complete cell, and puts it unless the client has it."""
        event = self._scored(index)
        if not self._settings.done[index]:
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
