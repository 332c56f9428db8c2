"""The gains of samples, and the tables that apply them.

A sample with gains has two tables of its acts: its plan's table, and a table whose programs
multiply each strength by a gain. A token uses the second table only if one of its gains is not 1.

Why two tables
    Additions at a site are summed and rounded once, and a site adds the sum in its fastest path. A
    gain of one addition needs the addends apart. So gains of 1 must leave the plan's own table in
    use, to change no bit and cost nothing.
Why by position
    A preempted sample computes its tokens again. Each must get the gains that it had, although the
    present gains are others. So a sample's changes are kept with their positions.

Invariants: a step costs a few numpy calls for the samples with gains, and a search in the changes
of a sample for tokens that are computed again. The values of a state's unused gains are 1.
"""

from array import array
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.plan.gains import MAX_GAINS
from rheostat_engine.worker.state.buffers import GateBuffers
from rheostat_engine.worker.state.device_table import to_device
from rheostat_engine.worker.state.position_functions import Int64

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.uint16]

_FEWEST = 16
"""States for which memory is allocated initially."""


class GainedTokens(NamedTuple):
    """The tokens of a step whose gains are not all 1."""

    tokens: Int64
    """[n]: their indices in the step."""
    gains: Floats
    """[n, most gains of a sample]."""


class GainedTable(NamedTuple):
    """The table of a sample that applies its gains, as `Steering` refers to it."""

    function: int
    """Its function of the position."""
    dose_slots: int
    """The first dose slot of the sample; 0: it has none."""
    variants: int
    """The first variant of the sample."""


class _Changes:
    """The changes of a sample's gains, in the order in which they came."""

    def __init__(self) -> None:
        self._positions = array("i")
        self._indices = array("H")
        self._gains = array("f")

    def add(self, first: int, indices: Indices, gains: Floats) -> None:
        """Adds changes that act from a position on, which is not below those before."""
        self._positions.extend([first] * len(indices))
        self._indices.frombytes(indices.tobytes())
        self._gains.frombytes(gains.tobytes())

    def at(self, positions: Int64, count: int) -> Floats:
        """The gains at some positions, [n, count].

        Args:
            positions: [n], ascending.
            count: the number of gains.
        """
        firsts = np.frombuffer(self._positions, np.int32)
        indices = np.frombuffer(self._indices, np.uint16)
        values = np.frombuffer(self._gains, np.float32)
        begin, end = np.searchsorted(firsts, positions[[0, -1]], side="right").tolist()
        before = np.ones(count, np.float32)
        before[indices[:begin]] = values[:begin]  # of equal indices, the last counts
        if begin == end:
            return np.broadcast_to(before, (len(positions), count))
        # The last change of each gain up to each position; -1: none after the first position.
        last = np.full((len(positions), count), -1, np.int64)
        rows = np.searchsorted(positions, firsts[begin:end])
        last[rows, indices[begin:end]] = np.arange(end - begin)
        np.maximum.accumulate(last, axis=0, out=last)
        return np.where(last >= 0, values[begin:end][last], before)


class GainStates:
    """The gains of all samples that have any. State 0 belongs to none."""

    def __init__(self, buffers: GateBuffers) -> None:
        """No sample has gains."""
        self._buffers = buffers
        self._free: list[int] = []
        self._made = 0
        self._changes: dict[int, _Changes] = {}
        self._counts: Int64 = np.zeros(_FEWEST, np.int64)
        self._tables: Int64 = np.zeros((_FEWEST, len(GainedTable._fields)), np.int64)
        self._first: Int64 = np.zeros(_FEWEST, np.int64)
        """The position from which on the values hold."""
        self._values: Floats = np.ones((_FEWEST, MAX_GAINS), np.float32)

    def __len__(self) -> int:
        """Number of states in use."""
        return len(self._changes)

    def acquire(self, count: int) -> int:
        """Takes a state for a sample with so many gains, all of them 1."""
        if self._free:
            state = self._free.pop()
        else:
            self._made += 1
            state = self._made
            if state >= len(self._counts):
                self._grow()
        self._counts[state] = count
        self._first[state] = 0
        self._changes[state] = _Changes()
        return state

    def release(self, state: int) -> None:
        """Frees a state, unless it is 0."""
        if state:
            del self._changes[state]
            self._values[state] = 1.0
            self._counts[state] = 0
            self._free.append(state)

    def set_table(self, state: int, table: GainedTable) -> None:
        """Sets the table that applies a sample's gains."""
        self._tables[state] = table

    def set(self, state: int, first: int, gains: Mapping[int, float]) -> None:
        """Changes gains of a sample from a position on.

        Args:
            state: the sample's state.
            first: the position, not below that of any change before.
            gains: by index; an index that the sample does not have is ignored.
        """
        indices = np.fromiter(gains, np.int64, len(gains))
        wanted = np.fromiter(gains.values(), np.float32, len(gains))
        own = self._values[state]
        changed = (indices < self._counts[state]) & (own[indices] != wanted)
        if changed.any():
            indices, wanted = indices[changed], wanted[changed]
            self._changes[state].add(first, indices.astype(np.uint16), wanted)
            own[indices] = wanted
            self._first[state] = first

    def set_all(self, states: Int64, firsts: Int64, gains: Floats) -> None:
        """Changes gains of several samples, each from a position on.

        Args:
            states: [n]: their states, all different.
            firsts: [n]: the positions, each not below that of any change of its sample before.
            gains: [n, g]: by index; 1 where a sample has no such gain.
        """
        count = gains.shape[1]
        changed = gains != self._values[states, :count]
        (rows,) = np.nonzero(changed.any(axis=1))
        every, all_changed = np.arange(count, dtype=np.uint16), changed.all(axis=1).tolist()
        ids, starts = states.tolist(), firsts.tolist()
        for row in rows.tolist():
            indices, wanted = every, gains[row]
            if not all_changed[row]:
                indices, wanted = every[changed[row]], wanted[changed[row]]
            self._changes[ids[row]].add(starts[row], indices, wanted)
        self._values[states[rows], :count] = gains[rows]
        self._first[states[rows]] = firsts[rows]

    def values(self, states: Int64, count: int) -> Floats:
        """The present gains of some samples, [n, count]; 1 where a sample has no such gain."""
        values: Floats = self._values[states, :count]
        return values

    def choose(
        self, states: Int64, positions: Int64, functions: Int64, bases: tuple[Int64, Int64]
    ) -> GainedTokens | None:
        """Chooses the tables of a step's tokens.

        Args:
            states: [n]: the state of each token's sample, or 0.
            positions: [n], ascending for each sample.
            functions: [n]: changed for the tokens whose gains are not all 1.
            bases: [n] each: the first dose slot and the first variant, changed alike.
        """
        gained = np.flatnonzero(states)
        if not len(gained):
            return None
        own, at = states[gained], positions[gained]
        values = self._values[own, : int(self._counts[own].max())]
        early = np.flatnonzero(at < self._first[own])
        for state in np.unique(own[early]).tolist():
            tokens = early[own[early] == state]
            count = int(self._counts[state])
            values[tokens, :count] = self._changes[state].at(at[tokens], count)
        other = (values != 1).any(axis=1)
        if not other.any():
            return None
        tokens, tables = gained[other], self._tables[own[other]]
        functions[tokens] = tables[:, 0]
        for base, column in zip(bases, tables.T[1:], strict=True):
            base[tokens] = column
        return GainedTokens(tokens, values[other])

    def write(self, gained: GainedTokens) -> None:
        """Writes the gains of a step's tokens, before its forward pass."""
        gains = self._buffers.gains
        where = to_device(torch.from_numpy(gained.tokens), gains.device)
        content = to_device(torch.from_numpy(gained.gains), gains.device)
        gains[:, : content.shape[1]].index_copy_(0, where, content)

    def _grow(self) -> None:
        more = len(self._counts)
        self._counts = np.pad(self._counts, (0, more))
        self._first = np.pad(self._first, (0, more))
        self._tables = np.pad(self._tables, ((0, more), (0, 0)))
        self._values = np.pad(self._values, ((0, more), (0, 0)), constant_values=1.0)
