"""Collects the events of a sweep, also over several calls, into a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rheostat._errors import ServerError
from rheostat._points import read_site
from rheostat._positions import read_ranges
from rheostat._sweeps.grades import NamedGrade
from rheostat._sweeps.result import Cell, Noise, ResolvedPair, SweepResult
from rheostat._sweeps.watching import Watcher
from rheostat_wire.v1 import sweep_pb2, sweep_service_pb2

OnProgress = Callable[[int, int], None]
"""Is called with the number of cells that are done, and of all cells known so far."""

OnCell = Callable[[Cell], None]
"""Is called with each cell that has values; the value is that of the first grade."""

_UNKNOWN = float("nan")
_RUNNING = sweep_pb2.SweepGrade(
    clean=_UNKNOWN, noise=sweep_pb2.Noise(mean=_UNKNOWN, std=_UNKNOWN, max=_UNKNOWN)
)
"""What is known of a grade before the summary."""


class SweepAccumulator:
    """Turns events of a sweep into a `SweepResult`. Further calls add the cells that are left."""

    def __init__(
        self,
        grades: Sequence[NamedGrade],
        *,
        pair_values: bool,
        progress: OnProgress | None,
        on_cell: OnCell | None,
        watcher: Watcher | None = None,
    ) -> None:
        """No event has come."""
        self._names = tuple(grade.name for grade in grades)
        self._pair_values = pair_values
        self._progress = progress
        self._on_cell = on_cell
        self._watcher = watcher
        self._started: sweep_pb2.SweepStarted | None = None
        self._summary: sweep_pb2.SweepSummary | None = None
        self._cells: dict[int, sweep_pb2.SweepCell] = {}
        self._expected = 0
        self.tokens: tuple[str, ...] = ()
        """The texts of the columns' tokens."""

    @property
    def done(self) -> list[sweep_pb2.CellRun]:
        """The cells that need not come again."""
        runs: list[sweep_pb2.CellRun] = []
        for index in sorted(self._cells):
            if runs and runs[-1].start + runs[-1].count == index:
                runs[-1].count += 1
            else:
                runs.append(sweep_pb2.CellRun(start=index, count=1))
        return runs

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
                if self._cells:
                    _check_same(self._begun(), message.started)
                self._started = message.started
                self._expected = len(self._cells) + message.started.cell_count
                self._tell()
            case "phase":
                self._expected += message.phase.added_cell_count
                self._tell()
            case "cell":
                self._cells[message.cell.index] = message.cell
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
            top[at], below[at] = cell.top_token_id, cell.below_noise
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


def _check_same(before: sweep_pb2.SweepStarted, now: sweep_pb2.SweepStarted) -> None:
    """Refuses to add cells of another grid to those that have come.

    Raises:
        ServerError: the server has another model or tokenizer now.
    """
    same = all(
        list(getattr(before, field)) == list(getattr(now, field))
        for field in ("rows", "columns", "pairs")
    )
    if not same:
        raise ServerError(
            "a sweep broke, and the server that took it up has other rows, columns or tokens: its "
            "model has changed. Run the sweep again"
        )


def _read_pair(pair: sweep_pb2.ResolvedPair) -> ResolvedPair:
    return ResolvedPair(
        tuple(pair.clean_token_ids.ids),
        tuple(pair.corrupt_token_ids.ids),
        read_ranges(pair.alignment.unaligned),
    )


def _read_noise(noise: sweep_pb2.Noise) -> Noise:
    return Noise(noise.mean, noise.std, noise.max, noise.sample_count)
