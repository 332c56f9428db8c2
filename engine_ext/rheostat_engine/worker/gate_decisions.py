"""Reports to the scheduler which requests' gates are shut at a position that a step computes.

The scheduler's questions arrive with the `SchedulerOutput` of that step. After the forward pass and
the fold of its readings, the openness at the asked positions is copied to the host, on the step's
own stream. The host waits for the copy only when vLLM reads the step's output, so no step is
delayed.

Invariant: a request is reported only if the openness of all its asked gates was computed in this
step and is exactly 0; NaN is not 0. The scheduler shares no gated block of any other request.
"""

from collections.abc import Mapping

import numpy as np
import torch

from rheostat_engine.plan.gate_decisions import DecidedOnce
from rheostat_engine.worker.state.buffers import GateBuffers
from rheostat_engine.worker.state.device_table import HostCopy, to_device
from rheostat_engine.worker.state.position_functions import Int64
from rheostat_engine.worker.step_tokens import Batch

Questions = Mapping[str, DecidedOnce]
"""The gates to report on, and their position, by vLLM's request id."""


class DecisionReport:
    """The openness of the asked requests' gates, while it is copied to the host."""

    def __init__(self, asked: Questions, openness: torch.Tensor) -> None:
        """Begins the copy.

        Args:
            asked: the requests and their gates.
            openness: [requests, gates], on the device: a copy of the openness at each request's
                position, because later steps overwrite the buffer.
        """
        self._asked = asked
        self._openness = HostCopy(openness)

    def shut(self) -> list[str]:
        """The ids of the requests whose asked gates are all shut. Waits for the copy."""
        rows = zip(self._asked.items(), self._openness.numpy(), strict=True)
        return [name for (name, decided), row in rows if (row[list(decided.gates)] == 0).all()]


class GateDecisions:
    """The questions of the current step, and its report."""

    def __init__(self, gates: GateBuffers) -> None:
        """Nothing is asked."""
        self._gates = gates
        self.asked: Questions = {}
        """The questions of the next step."""
        self._found: dict[str, DecidedOnce] = {}
        """The questions that the step can answer."""
        self._tokens: list[int] = []
        """The index in the step of each found request's token."""
        self._report: DecisionReport | None = None

    def ask(self, questions: Questions) -> None:
        """Asks about requests of the next step."""
        self.asked = questions

    def begin(self, batch: Batch, gate_states: Int64) -> None:
        """Finds the tokens at the asked positions.

        Args:
            batch: the batch.
            gate_states: [n]: the state of the first gate of each token's sample; 0: it has none.
        """
        if not self.asked:
            return
        begins = np.cumsum(batch.scheduled) - batch.scheduled
        for name, begin, computed, count in zip(
            batch.request_ids, begins, batch.computed, batch.scheduled, strict=True
        ):
            decided = self.asked.get(name)
            if decided is None or not 0 <= decided.position - computed < count:
                continue
            token = int(begin + decided.position - computed)
            if gate_states[token]:  # otherwise its plan was not installed
                self._found[name] = decided
                self._tokens.append(token)

    def end(self) -> None:
        """Begins the report. The forward pass and the fold must have been launched."""
        self.asked = {}
        found, tokens, self._found, self._tokens = self._found, self._tokens, {}, []
        if found:
            where = to_device(torch.tensor(tokens), self._gates.openness.device)
            self._report = DecisionReport(found, self._gates.openness.index_select(0, where))

    def take(self) -> DecisionReport | None:
        """Returns and removes the last step's report; None if the step answered no question."""
        report, self._report = self._report, None
        return report
