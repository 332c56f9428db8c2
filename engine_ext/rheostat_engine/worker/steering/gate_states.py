"""The states of the gates of all samples, and what each step does with them.

Before the forward pass, a step clears the readings, and writes the state and position of each
token. The forward pass stores readings and opens gates. After it, the readings are folded into the
states, and the openness of each gate at each token is stored, also if no act has the gate; see
`GateBuffers`.

Invariants
    * A state includes all readings before the position that its sample computes next, or is zero.
    * If a sample computes positions again after a preemption, its states begin with zeros, because
      it computes all that its gates read again. Exception: the state of a late gate stays, and the
      fold skips these positions. One step may compute them together with tokens after a decision,
      whose openness must be known before the step.

Why late gates have a record
    Tokens on which a late gate acts are first computed one by one, and the state before each step
    gives the openness. If a preempted sample computes them again in one step, the state already
    includes later readings. So a bit for each position stores whether the gate was open there.
    These bits are in additional states after those of the sample's gates.

Cost
    If a step repeats the last one, its tokens have the same gates, and their programs write the
    same columns. Only the positions are new, and the fold of the last step has advanced them. Any
    other step makes one copy to the device and clears the columns in use. Each step launches one
    kernel after its forward pass.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.plan.gate_table import Held, State, states_of
from rheostat_engine.plan.gates import Gate
from rheostat_engine.worker.state.buffers import ALIGNED, FoldColumn, SiteBuffers, TokenColumn
from rheostat_engine.worker.state.device_table import StagingBuffers, to_device
from rheostat_engine.worker.state.id_allocators import Exhausted, RangeAllocator
from rheostat_engine.worker.state.position_functions import Int64, consecutive
from rheostat_engine.worker.steering.gate_reference import fold_step
from rheostat_engine.worker.steering.row_sums import Means, RowSums


class _Samples(NamedTuple):
    """The samples of a step."""

    states: Int64
    """[n]: as in `GateStates.begin`."""
    numbers: Int64
    """[n]: as in `GateStates.begin`."""
    firsts: Int64
    """[n]: the first token of each token's sample."""
    gated: Int64
    """[g]: the state of the first gate of each sample with gates."""
    begins: Int64
    """[g]: its first token."""
    counts: Int64
    """[g]: its number of tokens."""
    folds: npt.NDArray[np.int32]
    """[m, columns of `FoldColumn`]. The positions are those of the last copy to the device. After
    that, only the positions on the device are advanced."""
    summed: bool
    """Whether any sample has sums of rows."""

    def are(self, states: Int64, numbers: Int64) -> bool:
        """Whether a step with these states and numbers has the same samples."""
        return np.array_equal(states, self.states) and np.array_equal(numbers, self.numbers)


class GateStates:
    """The states in device memory, and the host's information about each."""

    def __init__(self, site: SiteBuffers) -> None:
        """No sample has gates. `site` is any site's buffers."""
        self._buffers = buffers = site.gates
        self.row_sums = RowSums(site)
        count = len(buffers.states)
        self._ranges = RangeAllocator(1, count)
        self._counts = np.zeros(count, np.int64)
        """Number of gates, by the state of a sample's first gate."""
        self._sizes = np.zeros(count, np.int64)
        """Number of states, records included, by the state of a sample's first gate."""
        self._gates = np.zeros(count, np.int32)
        """The gate of each state, as a row of its table; 0: it is not the state of a gate."""
        self._next = np.zeros(count, np.int64)
        """By the state of the first gate: the first position that the states do not include."""
        self._one_term = np.zeros(count, np.bool_)
        """Whether the gate of each state has a single term."""
        self._late = np.zeros(count, np.bool_)
        """Whether each state is that of a late gate."""
        self._stale: list[int] = []
        """States that were used by other samples before."""
        self._records: dict[int, int] = {}
        """For states of recorded gates among `_stale`: how many states later the record begins."""
        self._columns = 0
        """The most columns that a sample has had since the start."""
        self._samples: _Samples | None = None
        """The samples of the last step with gates; None if states were taken or freed since."""
        self.folds: torch.Tensor | None = None
        """Folds of this step, on the device, [m, columns of `FoldColumn`]; None if it has none."""
        self._last_folds: torch.Tensor | None = None
        """Folds of the last step for which `begin` was called."""
        self._cuda = buffers.step.device.type == "cuda"
        self._stages = StagingBuffers(len(buffers.step), buffers.step.device)

    @property
    def used(self) -> int:
        """States in use."""
        return int(self._sizes.sum())

    def use_columns(self, columns: int) -> None:
        """Each step clears so many columns from now on, because a sample uses them.

        A sample may use them without gates, or with states that it has already.
        """
        self._columns = max(self._columns, columns)

    def acquire(
        self,
        numbers: Sequence[int],
        gates: Sequence[Gate],
        means: Means | None = None,
    ) -> int:
        """Takes states for the gates of a sample; returns the first, or 0 if none are needed.

        A sample with sums of rows gets a state even without gates.

        Args:
            numbers: [gates]: the gates' rows in the gate table.
            gates: the gates.
            means: the readings of means of rows; None: none.

        Raises:
            Exhausted: too few are free.
        """
        if not gates and means is None:
            return 0
        sizes = list(map(states_of, gates))
        size = max(1, sum(sizes))
        start = self._ranges.take(size)
        if start is None:
            raise Exhausted("every state of gates is in use")
        if means is not None:
            try:
                self.row_sums.acquire(start, means)
            except Exhausted:
                self._ranges.give(start, size)
                raise
        self._samples = None
        self._counts[start], self._sizes[start] = len(gates), size
        self._gates[start : start + len(gates)] = numbers
        self._one_term[start : start + len(gates)] = [len(gate.columns) == 1 for gate in gates]
        self._late[start : start + len(gates)] = [gate.late > 0 for gate in gates]
        self._next[start] = 0
        self._stale += range(start, start + size)
        record = start + len(gates)
        for state, (gate, size) in enumerate(zip(gates, sizes, strict=True), start):
            if gate.recorded:
                self._records[state] = record - state
                record += size - 1
        return start

    def release(self, start: int) -> None:
        """Frees the states of a sample."""
        if start:
            self._samples = None
            for state in range(start, start + int(self._counts[start])):
                self._records.pop(state, None)
            self.row_sums.release(start)
            self._ranges.give(start, int(self._sizes[start]))
            self._gates[start : start + int(self._counts[start])] = 0
            self._counts[start] = self._sizes[start] = 0

    def begin(
        self, states: Int64, numbers: Int64, positions: Int64, *, repeated: bool = False
    ) -> None:
        """Prepares a step, before its forward pass.

        Args:
            states: [n]: the state of the first gate of each token's sample, or 0.
            numbers: [n]: the number of each token's request.
            positions: [n]: the position of each token.
            repeated: whether the last step was prepared here too, and this step has the same
                tokens with the same states and programs, each at the next position.
        """
        # Programs write the same columns in each step. But means are read in only one step.
        if repeated and not self.row_sums.read_any:
            self._advance()
            return
        self.row_sums.read_any = False
        self._last_folds = None
        if states.any():  # otherwise no kernel reads what `_write` copies
            samples = self._samples
            if samples is None or not samples.are(states, numbers):
                self._samples = samples = self._samples_of(states, numbers)
            firsts = positions[samples.begins]
            self._clear(samples.gated, firsts)
            self._next[samples.gated] = firsts + samples.counts
            if samples.summed:
                self.row_sums.begin(samples.gated, firsts, samples.begins, samples.counts)
            self._last_folds = self._write(samples, positions)
        self.folds = self._last_folds
        self._buffers.readings[: len(states), : self._columns].fill_(torch.nan)

    def _advance(self) -> None:
        """Prepares a step that repeats the last one, without a copy to the device."""
        self.folds = self._last_folds
        if self.folds is not None:
            samples = self._samples
            assert samples is not None, "its samples keep their states"
            if samples.summed:
                firsts = self._next[samples.gated]
                self.row_sums.begin(samples.gated, firsts, samples.begins, samples.counts)
            self._next[samples.gated] += 1

    def end(self) -> None:
        """Folds the readings of the step, after its forward pass was launched."""
        self.row_sums.end()
        folds, self.folds = self.folds, None
        if folds is None or not len(folds):
            return
        if not self._cuda:
            fold_step(self._buffers, folds)
            return
        from rheostat_engine.worker.steering.gate_kernels import launch_fold

        launch_fold(self._buffers, folds)

    def _samples_of(self, states: Int64, numbers: Int64) -> _Samples:
        changes = (states[1:] != states[:-1]) | (numbers[1:] != numbers[:-1])
        begins = np.concatenate([[0], np.flatnonzero(changes) + 1])
        counts = np.diff(begins, append=len(states))
        own = states[begins]
        gated = own > 0
        samples = own[gated], begins[gated], counts[gated]
        summed = bool((self.row_sums.first[own] > 0).any())
        folds = self._folds_of(*samples)
        return _Samples(states, numbers, np.repeat(begins, counts), *samples, folds, summed)

    def _write(self, samples: _Samples, positions: Int64) -> torch.Tensor:
        """Copies folds and tokens of the step to the device; returns the folds there."""
        host = self._stages.take()
        folds, count = samples.folds, len(positions)
        folds[:, FoldColumn.POSITION] = positions[folds[:, FoldColumn.FIRST]]
        middle = self._buffers.step.numel() - self._buffers.tokens.numel()
        start, end = middle - folds.size, middle + len(TokenColumn) * count
        start -= start % ALIGNED
        folds_end = start + folds.size
        staged = host.numpy()
        staged[start:folds_end] = folds.ravel()
        tokens = staged[middle:end].reshape(count, len(TokenColumn))
        tokens[:, TokenColumn.STATE] = samples.states
        tokens[:, TokenColumn.FIRST] = samples.firsts
        tokens[:, TokenColumn.POSITION] = positions
        tokens[:, TokenColumn.ROW_SUM] = self.row_sums.first[samples.states]
        self._buffers.step[start:end].copy_(host[start:end], non_blocking=True)
        self._stages.give(host)
        return self._buffers.step[start:folds_end].view(-1, len(FoldColumn))

    def _clear(self, starts: Int64, positions: Int64) -> None:
        """Clears new states, and those of samples that compute positions again."""
        again = starts[positions < self._next[starts]]
        self.row_sums.clear(again)
        if not len(again) and not self._stale:
            return
        stale, self._stale = self._stale, []
        for start in again.tolist():
            states = range(start, start + int(self._counts[start]))
            stale += [state for state in states if not self._late[state]]
        buffer = self._buffers.states
        if stale:
            buffer.index_fill_(0, to_device(torch.tensor(stale), buffer.device), 0.0)
        named = [state for state in stale if self._gates[state]]
        if named:
            rows = torch.tensor([named, self._gates[named].tolist()])
            where, values = to_device(rows, buffer.device).unbind()
            buffer[where, State.HEAD, Held.GATE] = values.to(buffer.dtype)
        records, self._records = self._records, {}
        if records:
            numbers, behind = torch.tensor([*records.items()]).T.contiguous()
            where, values = to_device(numbers, buffer.device), to_device(behind, buffer.device)
            buffer[where, State.HEAD, Held.RECORD] = values.to(buffer.dtype)

    def _folds_of(self, starts: Int64, begins: Int64, counts: Int64) -> npt.NDArray[np.int32]:
        """[m, columns of `FoldColumn`]: each gate in the step. Positions are filled in later."""
        gates = self._counts[starts]
        states = consecutive(starts, gates)
        folds = np.zeros((len(states), len(FoldColumn)), np.int32)
        folds[:, FoldColumn.STATE] = states
        folds[:, FoldColumn.GATE] = self._gates[states]
        folds[:, FoldColumn.NUMBER] = states - np.repeat(starts, gates)
        folds[:, FoldColumn.FIRST] = np.repeat(begins, gates)
        folds[:, FoldColumn.COUNT] = np.repeat(counts, gates)
        folds[:, FoldColumn.ONE_TERM] = self._one_term[states]
        return folds
