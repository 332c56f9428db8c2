"""Runs the phases of a sweep: captures rows, runs cells and baselines, and scores the cells.

Invariant: each cell that the client does not have is put exactly once, with values or an error.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, islice, zip_longest
from typing import NamedTuple

import numpy as np
from google.protobuf import duration_pb2

from rheostat_server.errors import Draining, EngineLost, NonFinite, RheostatError
from rheostat_server.errors.status import to_status
from rheostat_server.sweeps.cell_requests import CellGroup
from rheostat_server.sweeps.grid import cell_runs
from rheostat_server.sweeps.measurements import Measured, Measurements
from rheostat_server.sweeps.scores import Scores, Values, check_contrast, pair_scale
from rheostat_server.sweeps.settings import Settings
from rheostat_server.tasks.tracebacks import drop_tracebacks
from rheostat_wire.v1 import sweep_pb2, sweep_service_pb2, tensor_pb2

_pb = sweep_service_pb2

Put = Callable[[sweep_service_pb2.SweepResponse], Coroutine[None, None, None]]
"""Queues an event for the client. Waits while many events are unread."""


@dataclass
class _Cell:
    """The values so far of a cell that runs."""

    waiting: int
    """Prompts that have not answered yet."""
    raw: list[list[float]]
    """[pairs][grades]: sums over the noises."""
    top_token_id: int = 0
    """The most likely token in the first prompt of the first pair; 0 if it is not known."""
    error: RheostatError | None = None


class _Work(NamedTuple):
    """Cells to run in one prompt, or a baseline: an unchanged prompt."""

    cells: tuple[int, ...]
    """The cells, which are of one block and may share a request. Empty for a baseline."""
    pair: int
    noise: int
    late: bool = False
    """Whether cells are graded without waiting for this baseline."""

    @property
    def prompts(self) -> int:
        """Number of prompts that the engine runs: one for each cell, or the baseline's."""
        return len(self.cells) or 1

    def parts(self, most: Callable[[], int]) -> "Iterator[_Work]":
        """Splits the cells into parts of at most `most()` cells.

        `most` is called before each part, because its result may change while parts run.
        """
        cells = self.cells
        while len(cells) > (count := most()):
            yield self._replace(cells=cells[:count])
            cells = cells[count:]
        yield self._replace(cells=cells)


class _Places:
    """Limits how many prompts run at the same time, like a semaphore with counts."""

    def __init__(self, count: int) -> None:
        """All `count` places are free."""
        self._free = count
        self._freed: asyncio.Future[None] | None = None
        """Set while `take` waits."""

    async def take(self, count: int) -> None:
        """Takes `count` places, and waits until so many are free. Only one caller may wait."""
        while self._free < count:
            self._freed = asyncio.get_running_loop().create_future()
            await self._freed
        self._free -= count

    def free(self, count: int) -> None:
        """Frees `count` places."""
        self._free += count
        if self._freed is not None and not self._freed.done():
            self._freed.set_result(None)


class RunningSweep:
    """A sweep that runs."""

    def __init__(self, settings: Settings, measurements: Measurements) -> None:
        """Makes a sweep that has run nothing."""
        self._settings = settings
        self._pairs = settings.pairs
        self._measurements = measurements
        self._scores = Scores(settings.done.values, settings.grades)
        self._base_counts = base_counts = [len(pair.bases) for pair in settings.pairs]
        """For each pair, the number of its `bases`: the prompts in which cells are run."""
        first = settings.baselines - settings.late_baselines
        self._waiting_baselines = sum(first + count - 1 for count in base_counts)
        """First baselines that have not answered yet."""
        self._repeats: list[list[list[Values]]] = [[[] for _ in range(n)] for n in base_counts]
        """For each pair and noise, the values of its first baselines."""
        self._sources: list[list[Values]] = [[] for _ in settings.pairs]
        """For each pair, the values of the prompts that rows come from."""
        self._early: list[tuple[int, Values]] = []
        """Pairs and values of the late baselines that answered before all first baselines had."""
        self._cells: dict[int, _Cell] = {}
        """The cells that run."""
        self._held_back: list[int] = []
        """Complete cells that wait for the first baselines, by which they are graded."""

    async def run(self, put: Put) -> None:
        """Runs the sweep, and puts its cells.

        Raises:
            RheostatError: it cannot go on.
        """
        try:
            await self._run(put)
        finally:
            await self._measurements.prefetch.close()

    async def _run(self, put: Put) -> None:
        grid, zoom, done = self._settings.grid, self._settings.zoom, self._settings.done
        await self._prepare()
        late = self._late_baselines()
        if zoom is None:
            wanted = [cell for cell in range(grid.cells) if not done.cells[cell]]
            await self._run_cells(wanted, put, self._first_baselines(), late)
            return
        # Zoom needs the effects of all cells of the coarse grid.
        wanted = [cell for cell in zoom.coarse(grid) if not done.known[cell]]
        kept = len(late) // 2
        await self._run_cells(wanted, put, self._first_baselines(), late[kept:])
        peaks = zoom.peaks_of(self._scores.effects(), grid)
        ran = set(wanted)
        added = [
            cell for cell in zoom.fine(peaks, grid) if cell not in ran and not done.cells[cell]
        ]
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
            self._sources[index].append(np.array(metrics))

    def _first_baselines(self) -> list[_Work]:
        """The baselines by which cells are graded: one for each noise, and repeats for the first.

        The repeats differ only because their batches differ.
        """
        first = self._settings.baselines - self._settings.late_baselines
        return [
            _Work((), number, noise)
            for number, bases in enumerate(self._base_counts)
            for noise in range(bases)
            for _ in range(1 if noise else first)
        ]

    def _late_baselines(self) -> list[_Work]:
        """Further repeats, so that later batches contribute to the noise too."""
        return [
            _Work((), pair, 0, late=True)
            for _ in range(self._settings.late_baselines)
            for pair in range(len(self._pairs))
        ]

    async def _run_cells(
        self, cells: Sequence[int], put: Put, first: Sequence[_Work], late: Sequence[_Work]
    ) -> None:
        """Runs cells and baselines, `concurrency` prompts at a time.

        The first baselines alternate with the first cells. The late ones are spread over all cells.
        """
        blocks = self._blocks(cells)
        count = len(blocks) * sum(self._base_counts)
        places, begun = _Places(self._settings.concurrency), 0
        expected = self._expected(self._work(blocks))
        ahead = [*islice(expected, 1)]  # this expects the rows of the first cells
        if ahead:
            await self._measurements.prefetch.first_loaded()
        work = _alternating(first, _spread(late, chain(ahead, expected), count))
        try:
            async with asyncio.TaskGroup() as tasks:
                for piece in work:
                    for part in piece.parts(self._measurements.most_together):
                        await places.take(part.prompts)
                        tasks.create_task(self._do(part, put, places, tasks))
                        begun += part.prompts
                        if begun >= self._measurements.starter.at_once:
                            begun = 0
                            await asyncio.sleep(0)
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def _blocks(self, cells: Sequence[int]) -> list[tuple[int, ...]]:
        """Splits cells into blocks that may begin together: neighbours in a row of the grid.

        A block has at most a quarter of the cells that run at a time. So when one block ends, the
        engine still has others.
        """
        most = max(1, self._settings.concurrency // 4)
        blocks = [tuple(group) for _, group in groupby(cells, self._measurements.requests.block)]
        return [
            block[first : first + most] for block in blocks for first in range(0, len(block), most)
        ]

    def _work(self, blocks: Iterable[tuple[int, ...]]) -> Iterator[_Work]:
        """Yields each block of cells in every prompt of every pair."""
        waiting, zeros = sum(self._base_counts), [0.0] * len(self._settings.grades)
        for cells in blocks:
            for cell in cells:
                self._cells[cell] = _Cell(waiting, [zeros] * len(self._pairs))
            for index, bases in enumerate(self._base_counts):
                for noise in range(bases):
                    yield _Work(cells, index, noise)

    def _expected(self, work: Iterable[_Work]) -> Iterator[_Work]:
        """Yields the work of cells, and expects the rows of each piece `concurrency` prompts ahead.

        It is so far ahead because these prompts may all start in one step of the engine.
        """
        coming: deque[_Work] = deque()
        ahead = 0
        for piece in work:
            self._measurements.prefetch.expect(piece.cells[0], piece.pair, piece.noise)
            coming.append(piece)
            ahead += piece.prompts
            while ahead >= self._settings.concurrency:
                ahead -= coming[0].prompts
                yield coming.popleft()
        yield from coming

    async def _do(self, work: _Work, put: Put, places: _Places, tasks: asyncio.TaskGroup) -> None:
        """Runs a piece of work, puts the cells that it completes, and frees its places."""
        if not work.cells:
            prompt = self._pairs[work.pair].bases[work.noise]
            metrics = await self._measurements.unchanged(prompt, work.pair)
            await self._take_baseline(work, np.array(metrics), put)
            places.free(1)
            return
        # A cell that has failed in an earlier prompt is not run again.
        failed = [cell for cell in work.cells if self._cells[cell].error is not None]
        cells = [cell for cell in work.cells if cell not in failed]
        groups, errors = await self._measurements.requests.groups(cells, work.pair, work.noise)
        for group in groups[1:]:
            tasks.create_task(self._measure(group, work, put, places))
        for cell, error in errors.items():
            self._fail([cell], work.pair, error)
        await self._count_answers([*failed, *errors], put)
        places.free(len(failed) + len(errors))
        if groups:
            await self._measure(groups[0], work, put, places)

    async def _measure(self, group: CellGroup, work: _Work, put: Put, places: _Places) -> None:
        """Runs the cells of a group, which is a part of `work`, and frees their places."""
        try:
            results = await self._measurements.cells(group, work.pair)
        except (EngineLost, Draining):
            raise
        except RheostatError as error:
            self._fail(group.cells, work.pair, error)
        else:
            for cell, result in zip(group.cells, results, strict=True):
                if isinstance(result, NonFinite):
                    self._fail([cell], work.pair, result)
                else:
                    self._add(cell, work, result)
        await self._count_answers(group.cells, put)
        places.free(len(group.cells))

    def _add(self, cell: int, work: _Work, measured: Measured) -> None:
        """Adds the result of a cell in a prompt to the cell's sums."""
        values, bases = self._cells[cell], self._base_counts[work.pair]
        values.raw[work.pair] = [
            total + metric / bases
            for total, metric in zip(values.raw[work.pair], measured.metrics, strict=True)
        ]
        if work.pair == work.noise == 0:
            values.top_token_id = measured.top_token_id or 0

    def _fail(self, cells: Iterable[int], pair: int, error: RheostatError) -> None:
        """Makes an error the result of cells. The error came from a prompt of a pair."""
        error.message = f"{self._pairs[pair].path}: {error.message}"
        drop_tracebacks(error)  # they refer to the cells
        for cell in cells:
            self._cells[cell].error = error

    async def _count_answers(self, cells: Iterable[int], put: Put) -> None:
        """Counts one more answered prompt for each cell, and puts the cells that are complete."""
        for cell in cells:
            self._cells[cell].waiting -= 1
            if self._cells[cell].waiting:
                continue
            if self._waiting_baselines:
                self._held_back.append(cell)
            else:
                await self._finish(cell, put)

    async def _take_baseline(self, work: _Work, values: Values, put: Put) -> None:
        """Adds the values of a baseline. Once all first baselines answered, puts waiting cells."""
        if work.late:
            if self._waiting_baselines:
                self._early.append((work.pair, values))
            else:
                self._scores.add_baseline(work.pair, values)
            return
        self._repeats[work.pair][work.noise].append(values)
        self._waiting_baselines -= 1
        if self._waiting_baselines:
            return
        self._set_scales()
        for pair, repeat in self._early:
            self._scores.add_baseline(pair, repeat)
        for index in self._held_back:
            await self._finish(index, put)
        self._held_back.clear()

    async def _finish(self, index: int, put: Put) -> None:
        """Scores a complete cell, and puts it unless the client has it."""
        event = self._scored(index)
        if not self._settings.done.cells[index]:
            await put(event)

    def _set_scales(self) -> None:
        scales = [
            pair_scale(
                repeats[0],
                [values for repeat in repeats[1:] for values in repeat],
                np.mean(sources, axis=0) if sources else None,
                into_clean=pair.into_clean,
            )
            for pair, repeats, sources in zip(
                self._pairs, self._repeats, self._sources, strict=True
            )
        ]
        check_contrast(scales, self._settings.grades)
        self._scores.set_scales(scales)

    def _scored(self, index: int) -> sweep_service_pb2.SweepResponse:
        """The event of a complete cell."""
        cell, event = self._cells.pop(index), _pb.SweepResponse()
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
    """Alternates between two kinds of work. Once one kind ends, yields the rest of the other."""
    both = chain.from_iterable(zip_longest(first, second))
    return (work for work in both if work is not None)


def _spread(late: Sequence[_Work], work: Iterable[_Work], count: int) -> Iterator[_Work]:
    """Puts late baselines evenly among `count` pieces of work, none of them first or last."""
    spread = 0
    for number, piece in enumerate(work):
        while spread < len(late) and number * (len(late) + 1) >= (spread + 1) * count:
            yield late[spread]
            spread += 1
        yield piece
    yield from late[spread:]


async def _together(work: Callable[[], Coroutine[None, None, None]], count: int) -> None:
    """Runs `count` calls of `work` concurrently. Raises the first error.

    One call starts in each iteration of the event loop, because a call may take milliseconds
    before it first waits.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(work())
                await asyncio.sleep(0)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
