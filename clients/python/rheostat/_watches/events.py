"""The events of a watch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from rheostat._capture.activations import IntArray
from rheostat._responses.results import FinishReason
from rheostat._responses.signals import SignalColumn, column_numbers, readings_of
from rheostat._responses.updates import UpdateApplied, UpdateRefused
from rheostat._steering.gates import Probe
from rheostat_wire.dtypes import FloatArray


@dataclass(frozen=True)
class WatchedRequestBegun:
    """The watch begins to read a request. Sent before all other events of the request."""

    sequence: int
    """Number of the event, from 1 without gaps."""
    request_id: str
    labels: Mapping[str, str]
    sample_count: int
    prompt_token_count: int


@dataclass(frozen=True, eq=False)
class Readings:
    """Readings of one sample, at some or all of its positions.

    ``readings[probe]`` has the numbers of a probe, which is given itself or by name: float32
    [positions], or [positions, sites] if it reads at several sites. NaN: the probe does not select
    the token.
    """

    request_id: str
    sample: int
    """Sample, from 0."""
    columns: tuple[SignalColumn, ...]
    positions: IntArray
    """Absolute positions, int64 [positions], ascending."""
    values: FloatArray
    """float32 [positions, columns]; NaN: not read."""
    firings: Mapping[str, IntArray] = field(default_factory=dict)
    """By rule: the positions at which it fired, int64, ascending. Rules that did not fire are
    missing."""
    dropped: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))
    """Positions whose readings were dropped, because the client read too slowly, int64."""

    def __len__(self) -> int:
        """The number of positions."""
        return len(self.positions)

    def __getitem__(self, probe: Probe | str) -> FloatArray:
        return readings_of(probe, self.columns, self.values)

    def __repr__(self) -> str:
        fired = {name: len(positions) for name, positions in self.firings.items()}
        return (
            f"Readings({self.request_id!r}, sample={self.sample}, positions={len(self)}, "
            f"columns={len(self.columns)}" + (f", fired={fired}" if fired else "") + ")"
        )


@dataclass(frozen=True, eq=False)
class WatchedSignals:
    """Readings of all watched requests that had tokens in one step.

    If the watch only observes and a step reads more than 64 samples, one event may have the
    readings of up to four decode steps.

    Iterating gives `Readings`, one for each run of consecutive positions of a sample.
    """

    sequence: int
    """Number of the event."""
    columns: tuple[SignalColumn, ...]
    rules: tuple[str, ...]
    """The names of the watch's rules."""
    request_ids: tuple[str, ...]
    """The request of each run of rows, [runs]."""
    samples: IntArray
    """Its sample, int64 [runs]."""
    first_positions: IntArray
    """The position of its first row, int64 [runs]. Its further rows have the positions after it."""
    row_counts: IntArray
    """Its number of rows, int64 [runs], at least 1."""
    values: FloatArray
    """float32 [rows, columns], run after run; NaN: not read."""
    fired: IntArray
    """Row and index of the rule of each firing, int64 [firings, 2], by row."""

    def __len__(self) -> int:
        """The number of runs."""
        return len(self.request_ids)

    def __iter__(self) -> Iterator[Readings]:
        row = 0
        runs = zip(
            self.request_ids,
            self.samples.tolist(),
            self.first_positions.tolist(),
            self.row_counts.tolist(),
            strict=True,
        )
        for request_id, sample, first, count in runs:
            yield Readings(
                request_id,
                sample,
                self.columns,
                np.arange(first, first + count, dtype=np.int64),
                self.values[row : row + count],
                self._firings(row, count, first),
            )
            row += count

    def _firings(self, row: int, count: int, first: int) -> dict[str, IntArray]:
        if not len(self.fired):
            return {}
        begin, end = np.searchsorted(self.fired[:, 0], (row, row + count))
        here = self.fired[begin:end]
        return {
            self.rules[rule]: here[here[:, 1] == rule, 0] - row + first
            for rule in np.unique(here[:, 1]).tolist()
        }

    def __repr__(self) -> str:
        return (
            f"WatchedSignals({self.sequence}, runs={len(self)}, values={list(self.values.shape)}, "
            f"firings={len(self.fired)})"
        )


@dataclass(frozen=True, eq=False)
class SignalsDropped:
    """Readings of a sample were dropped, because the client read too slowly."""

    sequence: int
    """Number of the event."""
    request_id: str
    sample: int
    """Sample, from 0."""
    positions: IntArray
    """Positions whose readings were dropped, int64."""


class SignalSummary(NamedTuple):
    """Summary of one column's readings of one sample, including dropped ones."""

    sample: int
    """Sample, from 0."""
    column: SignalColumn
    position_count: int
    """Number of readings."""
    max: float
    """Largest reading."""
    max_position: int
    """First position of the largest reading."""
    mean: float


@dataclass(frozen=True)
class WatchedRequestEnded:
    """The last event of a request: all readings that the server counts have arrived."""

    sequence: int
    """Number of the event."""
    request_id: str
    position_count: int
    """Positions whose readings were sent, over all samples."""
    dropped_position_count: int
    """Positions whose readings were dropped or lost, over all samples."""
    finish_reasons: tuple[FinishReason, ...]
    """Why each sample ended; empty if the watch ended before the request."""
    summaries: tuple[SignalSummary, ...] = ()
    """One for each sample and column with readings, by sample, then column."""
    missed_reason: str = ""
    """Why the watch could not read the request; empty if it did."""

    def summary(self, probe: Probe | str, sample: int = 0) -> SignalSummary:
        """The summary of a probe that reads at one site, or of the first of its sites.

        Raises KeyError if the probe read nothing of the sample.
        """
        columns = tuple(summary.column for summary in self.summaries if summary.sample == sample)
        first = column_numbers(probe, columns)[0]
        return next(
            summary
            for summary in self.summaries
            if (summary.sample, summary.column) == (sample, columns[first])
        )


WatchEvent: TypeAlias = (
    WatchedRequestBegun
    | WatchedSignals
    | SignalsDropped
    | WatchedRequestEnded
    | UpdateApplied
    | UpdateRefused
)
"""The events of a watch."""
