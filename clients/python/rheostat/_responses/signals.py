"""Signals: readings of probes in a sample, openness of gates, and firings of rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rheostat._capture.activations import IntArray, positions_of
from rheostat._capture.encodings import read_tensor
from rheostat._errors import ServerError
from rheostat._points import Site, knows_point, read_site
from rheostat._responses.receipts import Reference, read_reference
from rheostat._steering.gates import Probe
from rheostat_wire.dtypes import FloatArray
from rheostat_wire.v1 import monitor_pb2

_NO_POSITIONS: IntArray = np.zeros(0, np.int64)


class SignalColumn(NamedTuple):
    """A column of `Signals.values`."""

    probe: str
    """Name of the probe; empty for a gate."""
    site: Site | None
    """Where it was read; None for a gate, and at points that only newer clients know."""
    gate: Reference | None = None
    """The intervention whose gate it is; None for a probe."""


@dataclass(frozen=True, eq=False)
class Signals:
    """The signals of a sample, or a part of them.

    ``signals[probe]`` are the numbers of a probe, given itself or by its name: float32 [positions],
    or [positions, sites] if it reads at several sites. NaN: not read.
    """

    sample: int = 0
    """Sample, from 0."""
    columns: tuple[SignalColumn, ...] = ()
    positions: IntArray = field(default_factory=lambda: _NO_POSITIONS)
    """Absolute positions, int64 [positions], ascending."""
    token_ids: IntArray = field(default_factory=lambda: _NO_POSITIONS)
    """Input token at each position, int64 [positions]."""
    values: FloatArray = field(default_factory=lambda: np.zeros((0, 0), np.float32))
    """float32 [positions, columns]: what was read, and how far gates were open; NaN: not read."""
    firings: Mapping[str, IntArray] = field(default_factory=dict)
    """By rule: the positions at which it fired, int64, ascending. Rules that did not fire are
    missing."""
    dropped: IntArray = field(default_factory=lambda: _NO_POSITIONS)
    """Positions whose signals were dropped, because the client read too slowly, int64."""

    def __len__(self) -> int:
        """The number of positions."""
        return len(self.positions)

    def __getitem__(self, probe: Probe | str) -> FloatArray:
        return readings_of(probe, self.columns, self.values)

    def openness(self, index: int) -> FloatArray:
        """How far the gate of intervention ``index`` was open, 0 to 1: float32 [positions].

        Raises KeyError if its gate has no ``signals``.
        """
        for number, column in enumerate(self.columns):
            if column.gate is not None and column.gate.index == index:
                opened: FloatArray = self.values[:, number]
                return opened
        raise KeyError(
            f"no signals of the gate of intervention {index}: give the gate signals=True"
        )

    def __repr__(self) -> str:
        fired = {name: len(positions) for name, positions in self.firings.items()}
        return (
            f"Signals(sample={self.sample}, positions={len(self)}, columns={len(self.columns)}"
            + (f", fired={fired}" if fired else "")
            + ")"
        )


def column_numbers(probe: Probe | str, columns: Sequence[SignalColumn]) -> list[int]:
    """The indices of a probe's columns. Raises KeyError if there are none."""
    name = probe.name if isinstance(probe, Probe) else probe
    where = [number for number, column in enumerate(columns) if column.probe == name]
    if not where:
        names = ", ".join(sorted({column.probe for column in columns} - {""}))
        there = f"there are those of {names}" if names else "probes= asks for them"
        raise KeyError(f"no signals of a probe {name!r}; {there}")
    return where


def readings_of(
    probe: Probe | str, columns: Sequence[SignalColumn], values: FloatArray
) -> FloatArray:
    """The numbers of a probe: float32 [positions], or [positions, sites] at several sites.

    Raises KeyError if it has no columns in ``values``, [positions, columns].
    """
    where = column_numbers(probe, columns)
    found: FloatArray = values[:, where]
    return found[:, 0] if len(where) == 1 else found


def read_table(message: monitor_pb2.SignalTable) -> tuple[SignalColumn, ...]:
    """The columns of a request's signals."""
    return tuple(
        SignalColumn("", None, read_reference(column.gate))
        if column.HasField("gate")
        else SignalColumn(
            column.probe_name, read_site(column.site) if knows_point(column.site.point) else None
        )
        for column in message.columns
    )


def read_signals(message: monitor_pb2.Signals, columns: tuple[SignalColumn, ...]) -> Signals:
    """The signals of a message. Raises ServerError if its parts do not fit."""
    positions = positions_of(message.positions)
    if message.HasField("values"):
        values = read_tensor(message.values).values
    else:  # nothing is read, or signals were only dropped
        values = np.zeros((len(positions), 0 if len(positions) else len(columns)), np.float32)
    if values.shape != (len(positions), len(columns)) or len(message.token_ids) != len(positions):
        raise ServerError("the server sent signals whose parts do not fit together")
    return Signals(
        message.sample,
        columns,
        positions,
        np.fromiter(message.token_ids, np.int64, len(positions)),
        values,
        {
            firing.rule_name: positions[np.array(firing.rows, np.int64)]
            for firing in message.firings
        },
        positions_of(message.dropped_positions),
    )


def joined(sample: int, parts: Sequence[Signals], columns: tuple[SignalColumn, ...]) -> Signals:
    """The signals of a sample, from its parts in order."""
    if not parts:
        return Signals(sample, columns, values=np.zeros((0, len(columns)), np.float32))
    return Signals(
        sample,
        columns,
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.token_ids for part in parts]),
        np.concatenate([part.values for part in parts]),
        joined_firings([part.firings for part in parts]),
        np.concatenate([part.dropped for part in parts]),
    )


def joined_firings(parts: Sequence[Mapping[str, IntArray]]) -> dict[str, IntArray]:
    """The positions at which each rule fired, from parts in order."""
    rules = dict.fromkeys(name for part in parts for name in part)
    return {name: np.concatenate([part[name] for part in parts if name in part]) for name in rules}
