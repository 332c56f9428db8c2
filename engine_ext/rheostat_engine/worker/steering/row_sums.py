"""Sums of prompt rows, from which numbers of a prompt's mean row are read.

During the forward pass, the reading's site adds each selected row to a sum of the sample. The step
that computes the last prompt token reads the number of the mean. If a gate needs it in the forward
pass, the gate's first site reads it. Otherwise a kernel after the forward pass reads it.

Why another site reads the number
    A site computes all tokens of a step at once, and each token's row has its own Triton program.
    So no program at the site can see the complete sum. The programs of a later site, and kernels
    after the forward pass, can.
Why float64
    Programs add their rows in any order. In float64 the order changes a sum only beyond the digits
    that float32 keeps. So a prompt gives the same number, whatever chunks it is computed in.
Why sums have names
    A token refers to the first sum of its sample, so the sample's sums must follow one another. But
    admission counts sums, not gaps. So the names follow one another, and a name costs four bytes.

Invariants: a sum is zero before its sample computes its first token, also after a preemption. The
sum then gets every selected row, because prefix cache hits end before the first row that is read. A
sample has all its sums, or none.
"""

from typing import NamedTuple

import numpy as np
import torch

from rheostat_engine.plan.gates import NEVER
from rheostat_engine.worker.state.buffers import SiteBuffers
from rheostat_engine.worker.state.device_table import to_device
from rheostat_engine.worker.state.id_allocators import Exhausted, RangeAllocator
from rheostat_engine.worker.state.position_functions import Int64
from rheostat_engine.worker.steering.readout_reference import read_means


class Means(NamedTuple):
    """The numbers of mean rows that a plan reads."""

    sums: int
    """The count of these numbers. A sample needs one sum for each."""
    step: int
    """The first step of the program that reads them."""
    position: int
    """The position at which they are read: the last prompt token's."""


class RowSums:
    """The sums of all samples, by the state of a sample's first gate; see `GateStates`."""

    def __init__(self, site: SiteBuffers) -> None:
        """No sample has sums. `site` is any site's buffers."""
        self._site = site
        states = len(site.gates.states)
        self._free = list(range(len(site.gates.row_sums) - 1, 0, -1))
        self._names = RangeAllocator(1, len(site.gates.row_sum_names))
        self._sums: dict[int, list[int]] = {}
        """The sums of each sample."""
        self.first = np.zeros(states, np.int64)
        """The name of a sample's first sum; 0: it has none."""
        self._steps = np.zeros(states, np.int64)
        self._positions = np.full(states, NEVER, np.int64)
        """See `Means`."""
        self._new: list[int] = []
        """Samples whose sums have no names on the device yet, and are not cleared yet."""
        self._due: torch.Tensor | None = None
        """[n, 2] int32: tokens of this step at which numbers are read, and the first step of the
        program that reads them."""
        self.read_any = False
        """Whether the last step read a number. The next step must then clear the readings."""

    @property
    def used(self) -> int:
        """Sums in use."""
        return sum(map(len, self._sums.values()))

    def acquire(self, state: int, means: Means) -> None:
        """Takes sums for a sample.

        Raises:
            Exhausted: too few are free.
        """
        if means.sums > len(self._free):
            raise Exhausted("every sum of rows is in use")
        first = self._names.take(means.sums)
        if first is None:
            raise Exhausted("every name of a sum of rows is in use")
        self._sums[state] = [self._free.pop() for _ in range(means.sums)]
        self.first[state] = first
        self._steps[state], self._positions[state] = means.step, means.position
        self._new.append(state)

    def release(self, state: int) -> None:
        """Frees the sums of a sample, if it has any."""
        sums = self._sums.pop(state, None)
        if sums is not None:
            self._names.give(int(self.first[state]), len(sums))
            self._free += sums
            self.first[state] = 0
            self._positions[state] = NEVER

    def clear(self, again: Int64) -> None:
        """Clears new sums, and the sums of samples that compute positions again.

        Args:
            again: [n]: the first states of these samples.
        """
        new, self._new = [state for state in self._new if state in self._sums], []
        stale = [*new, *again[self.first[again] > 0].tolist()]
        if not stale:
            return
        gates = self._site.gates
        sums = [number for state in stale for number in self._sums[state]]
        names = [
            int(self.first[state]) + index
            for state in stale
            for index in range(len(self._sums[state]))
        ]
        both = to_device(torch.tensor([names, sums]), gates.row_sums.device)
        gates.row_sum_names[both[0]] = both[1].int()
        gates.row_sums.index_fill_(0, both[1], 0.0)

    def begin(self, states: Int64, positions: Int64, tokens: Int64, counts: Int64) -> None:
        """Prepares a step.

        Args:
            states: [n]: the first state of each sample.
            positions: [n]: the position of each sample's first token in the step.
            tokens: [n]: the index of this token in the step.
            counts: [n]: the number of each sample's tokens in the step.
        """
        self._due, self.read_any = None, False
        at = self._positions[states] - positions
        (due,) = np.nonzero((at >= 0) & (at < counts))
        if len(due):
            self.read_any = True
            rows = np.stack([tokens[due] + at[due], self._steps[states[due]]], axis=1)
            host = torch.from_numpy(rows.astype(np.int32))
            self._due = to_device(host, self._site.gates.row_sums.device)

    def end(self) -> None:
        """Reads the numbers of complete means. The forward pass must have been launched."""
        due, self._due = self._due, None
        if due is None:
            return
        if not due.is_cuda:
            read_means(self._site, due[:, 0].long(), due[:, 1].long())
            return
        from rheostat_engine.worker.steering.readout_kernels import launch_read_means

        launch_read_means(self._site, due)
