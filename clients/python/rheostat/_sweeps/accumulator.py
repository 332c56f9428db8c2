"""Collects the events of a sweep, also over several calls, into a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rheostat._errors import RheostatError, ServerError
from rheostat._notebook import Watcher
from rheostat._points import read_site
from rheostat._positions import ranges_of, read_ranges
from rheostat._sweeps.checkpoint import Checkpoint
from rheostat._sweeps.grades import NamedGrade
from rheostat._sweeps.progress import OnProgress
from rheostat._sweeps.result import Cell, Noise, ResolvedPair, SweepResult
from rheostat_wire.v1 import sweep_pb2, sweep_service_pb2

OnCell = Callable[[Cell], None]
"""Is called with each cell that has values; the value is that of the first grade."""

_DONE_RUNS = 4096
"""Most runs of cells that a server takes as done."""
_UNKNOWN = float("nan")
_RUNNING = sweep_pb2.SweepGrade(
    clean=_UNKNOWN, noise=sweep_pb2.Noise(mean=_UNKNOWN, std=_UNKNOWN, max=_UNKNOWN)
)
"""A grade before the summary has come."""


class SweepAccumulator:
    """Turns events of a sweep into a `SweepResult`. Further calls add the cells that are left."""

    def __init__(
        self,
        grades: Sequence[NamedGrade],
        *,
        pair_values: bool,
        progress: OnProgress | None,
        on_cell: OnCell | None,
        watcher: Watcher[SweepResult] | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """No event has come but those of a checkpoint."""
        self._names = tuple(grade.name for grade in grades)
        self._pair_values = pair_values
        self._progress = progress
        self._on_cell = on_cell
        self._watcher = watcher
        self._started: sweep_pb2.SweepStarted | None = None
        self._summary: sweep_pb2.SweepSummary | None = None
        self._cells: dict[int, sweep_pb2.SweepCell] = {}
        self._expected = 0
        self._checkpoint = checkpoint
        for response in () if checkpoint is None else checkpoint.responses:
            if response.HasField("started"):
                self._started = response.started
            elif response.cell.values:  # a cell that failed is tried again
                self._cells[response.cell.index] = response.cell
        self.tokens: tuple[str, ...] = ()
        """The texts of the columns' tokens."""

    def leave_out(self, request: sweep_service_pb2.SweepRequest) -> None:
        """Says in a request which cells need not come again."""
        # The cells of all further runs come again.
        runs = sorted(ranges_of(sorted(self._cells)), key=len, reverse=True)[:_DONE_RUNS]
        del request.done[:], request.done_values[:]
        for run in sorted(runs, key=lambda run: run.start):
            request.done.add(start=run.start, count=len(run))
            if request.HasField("zoom"):
                request.done_values.extend(map(self._first_value, run))

    def _first_value(self, index: int) -> float:
        values = self._cells[index].values
        return values[0] if values else _UNKNOWN

    @property
    def count(self) -> int:
        """Number of cells that have come."""
        return len(self._cells)

    @property
    def clean_token_ids(self) -> list[int]:
        """Tokens of the first clean prompt."""
        return list(self._begun().pairs[0].clean_token_ids.ids)

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self._begun().columns)

    def add(self, message: sweep_service_pb2.SweepResponse) -> list[None]:
        """Take the next event."""
        match message.WhichOneof("event"):
            case "started":
                self._begin(message)
                self._expected = len(self._cells) + message.started.cell_count
                self._tell()
            case "phase":
                self._expected += message.phase.added_cell_count
                self._tell()
            case "cell":
                self._cells[message.cell.index] = message.cell
                if self._checkpoint is not None:
                    self._checkpoint.append(message)
                self._tell()
                self._show(message.cell)
            case "summary":
                self._summary = message.summary
                return []
        if self._watcher is not None:
            self._watcher.offer(self._result)
        return []

    def result(self) -> SweepResult:
        """The result, once the stream has ended with OK."""
        if self._summary is None:
            raise ServerError("the server ended a sweep without its summary")
        return self._result()

    def _result(self) -> SweepResult:
        """The cells that have come; all others are NaN."""
        started, summary = self._begun(), self._summary
        if summary is None:
            summary = sweep_pb2.SweepSummary(grades=[_RUNNING] * len(self._names))
        shape = len(self._names), len(started.rows), len(started.columns)
        pairs = len(started.pairs) if self._pair_values else 0
        values, errors = np.full(shape, np.nan), np.full(shape, np.nan)
        each = np.full((pairs, *shape), np.nan)
        top = np.full(shape[1:], -1, np.int64)
        below = np.zeros(shape[1:], np.bool_)
        skipped = {}
        for index, cell in self._cells.items():
            if cell.HasField("error"):
                skipped[index] = cell.error.message
                continue
            at = cell.row, cell.column
            values[:, *at], errors[:, *at] = cell.values, cell.standard_errors
            top[at] = cell.top_token_id
            # An earlier call's cells are marked by the noise of that call, and by that of the last.
            below[at] = cell.below_noise or (self._summary is not None and _within(cell, summary))
            if pairs:
                each[:, :, *at] = np.reshape(cell.pair_values, (pairs, shape[0]))
        return SweepResult(
            grades=self._names,
            sites=tuple(map(read_site, started.rows)),
            columns=tuple(started.columns),
            tokens=self.tokens,
            values=values,
            standard_errors=errors,
            pair_values=each,
            top_token_ids=top,
            below_noise=below,
            skipped=skipped,
            pairs=tuple(map(_read_pair, started.pairs)),
            clean=tuple(grade.clean for grade in summary.grades),
            corrupt=tuple(
                grade.corrupt if grade.HasField("corrupt") else float("nan")
                for grade in summary.grades
            ),
            noise=tuple(_read_noise(grade.noise) for grade in summary.grades),
            run_ids=tuple(summary.run_ids),
            computed_token_count=summary.computed_token_count,
            seconds=summary.elapsed.ToNanoseconds() / 1e9,
        )

    def _begin(self, message: sweep_service_pb2.SweepResponse) -> None:
        before = self._started
        self._started = message.started
        if before is not None:
            if not _same(before, message.started):
                raise self._changed()
        elif self._checkpoint is not None:
            self._checkpoint.append(message)

    def _changed(self) -> RheostatError:
        """The error if cells of another grid would be added to those that have come."""
        if self._checkpoint is not None:
            return self._checkpoint.changed()
        return ServerError(
            "a sweep broke, and the server that took it up has other rows, columns or tokens: its "
            "model has changed. Run the sweep again"
        )

    def _begun(self) -> sweep_pb2.SweepStarted:
        if self._started is None:
            raise ServerError("the server began a sweep without saying what it runs")
        return self._started

    def _tell(self) -> None:
        if self._progress is not None:
            self._progress(len(self._cells), self._expected)

    def _show(self, cell: sweep_pb2.SweepCell) -> None:
        if self._on_cell is None or not cell.values:
            return
        site = read_site(self._begun().rows[cell.row])
        column = self._begun().columns[cell.column]
        self._on_cell(Cell(cell.index, site, column, cell.values[0], cell.standard_errors[0]))


def _same(before: sweep_pb2.SweepStarted, now: sweep_pb2.SweepStarted) -> bool:
    """Whether two calls have the same grid and prompts."""
    return all(
        list(getattr(before, field)) == list(getattr(now, field))
        for field in ("rows", "columns", "pairs")
    )


def _within(cell: sweep_pb2.SweepCell, summary: sweep_pb2.SweepSummary) -> bool:
    """Whether every value lies within the noise, which may be wider than when the cell came."""
    graded = zip(cell.values, summary.grades, strict=True)
    return all(abs(value - grade.noise.mean) <= grade.noise.max for value, grade in graded)


def _read_pair(pair: sweep_pb2.ResolvedPair) -> ResolvedPair:
    return ResolvedPair(
        tuple(pair.clean_token_ids.ids),
        tuple(pair.corrupt_token_ids.ids),
        read_ranges(pair.alignment.unaligned),
    )


def _read_noise(noise: sweep_pb2.Noise) -> Noise:
    return Noise(noise.mean, noise.std, noise.max, noise.sample_count)
