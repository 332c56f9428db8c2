"""The states of the gates of all samples, and their part in each step.

A step first clears the readings and writes which state and position each token has. The forward
pass reads numbers and opens gates. Afterwards the readings are folded into the states, and how far
each gate is open at each token is stored, also of gates that no act has; see `GateBuffers`.

Invariants: a state has been folded up to the position that its sample computes next, or is zero. A
sample that computes positions again begins with zeros, because it then computes all that its gates
read. But what a late gate has decided stays, because the sample may compute tokens behind the
decision in one step with it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from rheostat_engine.plan.gate_table import State
from rheostat_engine.worker.state.buffers import GateBuffers
from rheostat_engine.worker.state.device_table import to_device
from rheostat_engine.worker.state.id_allocators import RangeAllocator
from rheostat_engine.worker.state.position_functions import Int64
from rheostat_engine.worker.steering.gate_reference import fold_step
from rheostat_engine.worker.steering.vectors import Exhausted


class GateStates:
    """The states in device memory, and what the host knows about each."""

    def __init__(self, buffers: GateBuffers) -> None:
        """No sample has gates."""
        self._buffers = buffers
        count = len(buffers.states)
        self._ranges = RangeAllocator(1, count)
        self._counts = np.zeros(count, np.int64)
        """Number of gates, by the state of a sample's first gate."""
        self._gates = np.zeros(count, np.int32)
        """The gate of each state, as a row of its table."""
        self._next = np.zeros(count, np.int64)
        """By the state of the first gate: the position up to which the states are folded."""
        self._late = np.zeros(count, np.bool_)
        """Whether each state is that of a late gate."""
        self._stale: list[int] = []
        """States that were used by other samples before."""
        self._folds: torch.Tensor | None = None

    def acquire(self, gates: Sequence[int], late: Sequence[bool]) -> int:
        """Takes states for the gates of a sample; returns the first, or 0 for no gates.

        Args:
            gates: the rows of their table.
            late: for each, whether it is late.

        Raises:
            Exhausted: too few are free.
        """
        if not gates:
            return 0
        start = self._ranges.take(len(gates))
        if start is None:
            raise Exhausted("every state of gates is in use")
        self._counts[start] = len(gates)
        self._gates[start : start + len(gates)] = gates
        self._late[start : start + len(gates)] = late
        self._next[start] = 0
        self._stale += range(start, start + len(gates))
        return start

    def release(self, start: int) -> None:
        """Frees the states of a sample."""
        if start:
            self._ranges.give(start, int(self._counts[start]))
            self._counts[start] = 0

    def begin(self, states: Int64, numbers: Int64, positions: Int64) -> None:
        """Prepares a step, before its forward pass.

        Args:
            states: [n]: the state of the first gate of each token's sample, or 0.
            numbers: [n]: the number of each token's request.
            positions: [n]: the position of each token.
        """
        begins = np.flatnonzero(np.append(True, (np.diff(states) != 0) | (np.diff(numbers) != 0)))
        counts = np.diff(np.append(begins, len(states)))
        own = states[begins]
        gated = own > 0
        self._clear(own[gated], positions[begins[gated]])
        self._next[own[gated]] = positions[begins[gated]] + counts[gated]
        rows = np.stack([states, np.repeat(begins, counts), positions]).astype(np.int32)
        device = self._buffers.tokens.device
        self._buffers.tokens[:, : len(states)].copy_(to_device(torch.from_numpy(rows), device))
        self._buffers.readings[: len(states)].fill_(torch.nan)
        self._folds = self._folds_of(own[gated], begins[gated], counts[gated])

    def end(self) -> None:
        """Folds the readings of the step, once its forward pass was launched."""
        if self._folds is None:
            return
        folds, self._folds = self._folds, None
        if folds.device.type == "cpu":
            fold_step(self._buffers, folds)
            return
        from rheostat_engine.worker.steering.gate_kernels import launch_fold

        launch_fold(self._buffers, folds)

    def _clear(self, starts: Int64, positions: Int64) -> None:
        """Clears new states, and those of samples that compute positions again."""
        again = starts[positions < self._next[starts]]
        stale, self._stale = self._stale, []
        read_again: list[int] = []
        for start in again.tolist():
            for state in range(start, start + int(self._counts[start])):
                (read_again if self._late[state] else stale).append(state)
        states = self._buffers.states
        for rows, numbers in ((states, stale), (states[:, State.VALUE :], read_again)):
            if numbers:
                rows.index_fill_(0, to_device(torch.tensor(numbers), states.device), 0.0)

    def _folds_of(
        self, starts: Int64, begins: npt.NDArray[np.intp], counts: npt.NDArray[np.intp]
    ) -> torch.Tensor | None:
        """[n, 4]: state, gate, first token and number of tokens of each gate in the step."""
        gates = self._counts[starts]
        if not gates.sum():
            return None
        first = np.repeat(starts, gates)
        index = np.arange(len(first)) - np.repeat(np.cumsum(gates) - gates, gates)
        states = first + index
        folds = np.stack(
            [states, self._gates[states], np.repeat(begins, gates), np.repeat(counts, gates)], 1
        )
        folds = folds[folds[:, 1] > 0].astype(np.int32)
        return to_device(torch.from_numpy(folds), self._buffers.states.device)
